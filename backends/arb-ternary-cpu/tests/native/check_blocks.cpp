// Random rows through what lies between the products of a block, forward and backward: every instruction set against
// plain loops in double. Where a kernel says what it has computed on the way (the factor of a norm, a scale), what
// follows from that is held to the last bit.
//
// All buffers have exactly the size that the kernels are told, so that an address sanitizer sees a step beyond them.
// Now and then they hold bits at random: those results are only compared with those of one thread.
// Arguments: rounds, first seed; compiled with -DARB_FUZZ and libFuzzer it takes its seeds from the fuzzer.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "blocks.h"
#include "numbers.h"

namespace {

using namespace arb;

using Bytes = std::vector<int8_t>;

constexpr double kEpsilon = 0x1p-24;
// Of exp and of what is made of it, relative.
constexpr double kActivationError = 1e-6;

// What a round draws for all of its kernels.
struct Drawn {
  uint64_t seed;
  Isa isa;
  Random random;
  bool any;  // bits at random
  Dtype dtype;
  int64_t batch, heads, length, features;
  int threads;

  Drawn(uint64_t number, Isa set)
      : seed(number),
        isa(set),
        random(number),
        any(random.within(0, 5) == 0),
        dtype(static_cast<Dtype>(random.within(0, 2))),
        batch(random.within(1, 3)),
        heads(random.within(1, 3)),
        length(random.within(1, random.within(0, 5) == 0 ? 150 : 5)),
        features(2 * random.within(1, random.within(0, 3) == 0 ? 300 : 40)),
        threads(static_cast<int>(random.within(2, 3))) {}

  int64_t rows() const { return batch * length; }
  int64_t columns() const { return heads * features; }
  Tensor tensor(int64_t count) { return {random, dtype, count, any}; }
  float eps() { return random.within(0, 2) == 0 ? -1.0f : 1e-5f; }
  // Gains of rows with a norm, now and then, or nothing.
  Tensor gain(int64_t count, float eps) {
    return {random, Dtype::float32, eps < 0.0f || random.within(0, 1) == 0 ? 0 : count, any};
  }

  void require(bool holds, const char* what) const {
    if (holds) return;
    std::printf("%s: %s, seed %llu\n", isa_name(isa), what, static_cast<unsigned long long>(seed));
    std::exit(1);
  }

  // What `f` gives on one thread, and on several.
  template <class F>
  auto same(const char* what, F f) const {
    auto alone = f(BlockCall(static_cast<int>(isa), 1));
    require(alone == f(BlockCall(static_cast<int>(isa), threads)), what);
    return alone;
  }
};

// Rows in pieces, whose order in memory and whose gaps are drawn.
struct Pieces {
  HeadRows at;
  Tensor memory;

  static HeadRows drawn(Drawn& round) {
    const int64_t piece = round.features + round.random.within(0, 2);
    HeadRows at{nullptr, round.heads, round.features, round.length, round.heads * round.length * piece, piece, piece};
    if (round.random.within(0, 1) == 0) {
      at.head_stride = round.length * piece;
    } else {
      at.position_stride = round.heads * piece;
    }
    return at;
  }
  static int64_t size(const HeadRows& at, int64_t batch) {
    return (batch - 1) * at.batch_stride + (at.heads - 1) * at.head_stride + (at.length - 1) * at.position_stride +
           at.features;
  }

  Pieces(const HeadRows& places, Tensor held) : at(places), memory(std::move(held)) {}
  Pieces(Drawn& round, bool empty) : Pieces(drawn(round), Tensor(round.dtype, 0)) {
    const int64_t count = size(at, round.batch);
    memory = empty ? Tensor(round.dtype, count) : round.tensor(count);
  }

  HeadRows rows() {
    at.memory = memory.data();
    return at;
  }
  int64_t place(int64_t row, int64_t column) const { return at.place(row, column / at.features) + column % at.features; }
  double operator()(int64_t row, int64_t column) const { return memory[place(row, column)]; }
  bool operator==(const Pieces& other) const { return memory == other.memory; }
  // Whether what lies between the pieces is as it was.
  bool gaps_kept(int64_t count) const {
    std::vector<bool> written(static_cast<size_t>(memory.size()));
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t c = 0; c < at.columns(); ++c) written[static_cast<size_t>(place(row, c))] = true;
    }
    const Tensor fresh(memory.dtype(), 1);
    for (int64_t i = 0; i < memory.size(); ++i) {
      if (!written[static_cast<size_t>(i)] && memory[i] != fresh[0]) return false;
    }
    return true;
  }
};

// Gains, if there are any, and where their gradients go, which start at zero.
struct Gained {
  Tensor gain, sums;

  explicit Gained(const Tensor& drawn) : gain(drawn), sums(Dtype::float32, drawn.size()) {
    for (int64_t i = 0; i < sums.size(); ++i) sums.set(i, 0.0);
  }
  const float* values() const { return gain.size() == 0 ? nullptr : gain.floats(); }
  Gain call() { return {values(), gain.size() == 0 ? nullptr : sums.floats()}; }
  float at(int64_t i) const { return gain.size() == 0 ? 1.0f : gain.floats()[i]; }
};

// Whether r is the factor of a norm of x, whose elements may be off by a share `error` of themselves.
template <class X>
bool is_factor(double r, X x, int64_t count, float eps, double error) {
  double squares = 0.0;
  for (int64_t i = 0; i < count; ++i) squares += x(i) * x(i);
  const double wanted = 1.0 / std::sqrt(squares / static_cast<double>(count) + eps);
  return std::abs(r - wanted) <= wanted * (error + sum_error(count));
}

// Whether q and scale are y, whose elements may be off by a share `error` of themselves; to the last bit for none.
template <class Y>
bool is_quantised(const int8_t* q, float scale, Y y, int64_t count, double error) {
  double largest = 0.0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(y(i)));
  const float plain = static_cast<float>(largest) / 127.0f;
  if (error == 0.0 ? scale != plain : std::abs(scale - plain) > plain * (error + kEpsilon)) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (plain == 0.0f) {
      if (q[i] != 0) return false;
    } else if (error == 0.0) {
      if (q[i] != std::nearbyint(static_cast<float>(y(i)) / scale)) return false;
    } else if (std::abs(q[i] - y(i) / scale) > 0.5 + 128.0 * (error + kEpsilon)) {
      return false;
    }
  }
  return true;
}

void check_norm(Drawn& round) {
  Pieces x(round, false);
  const int64_t rows = round.rows(), columns = round.columns();
  const float eps = round.eps();
  const Gained gained(round.gain(columns, eps));
  const auto [q, scale, r] = round.same("a norm depends on threads", [&](const BlockCall& call) {
    Bytes made(static_cast<size_t>(rows * columns));
    Tensor scales(Dtype::float32, rows), factors(Dtype::float32, eps < 0.0f ? 0 : rows);
    normalise_quantize(call, x.rows(), round.dtype, rows, eps, gained.values(), made.data(), scales.floats(),
                       factors.floats());
    return std::tuple(made, scales, factors);
  });
  std::vector<Tensor> grads;
  const void* given[3] = {};
  for (int64_t i = 0; i < round.random.within(1, 3); ++i) grads.push_back(round.tensor(rows * columns));
  for (size_t i = 0; i < grads.size(); ++i) given[i] = grads[i].data();
  Pieces place(round, true);
  Tensor own = r;
  const auto [back, gain_sums] = round.same("a norm's gradient depends on threads", [&](const BlockCall& call) {
    Pieces out = place;
    Gained to = gained;
    normalise_back(call, given, x.rows(), eps < 0.0f ? nullptr : own.floats(), to.call(), round.dtype, rows,
                   out.rows());
    return std::tuple(out, to.sums);
  });
  if (round.any) return;
  RowSums wanted_sums(columns);
  round.require(back.gaps_kept(rows), "a norm's gradient lies beside its place");
  for (int64_t row = 0; row < rows; ++row) {
    const auto element = [&](int64_t c) { return x(row, c); };
    const float factor = eps < 0.0f ? 1.0f : r.floats()[row];
    if (eps >= 0.0f) round.require(is_factor(factor, element, columns, eps, 0.0), "a norm's factor differs");
    const auto plain = [&](int64_t c) { return static_cast<float>(x(row, c)) * factor; };
    const auto normed = [&](int64_t c) { return static_cast<double>(plain(c) * gained.at(c)); };
    round.require(is_quantised(q.data() + row * columns, scale.floats()[row], normed, columns, 0.0), "a norm differs");
    const auto given_grad = [&](int64_t c) {
      float sum = 0.0f;
      for (const Tensor& one : grads) sum += static_cast<float>(one[row * columns + c]);
      return sum;
    };
    const auto grad = [&](int64_t c) { return static_cast<double>(given_grad(c) * gained.at(c)); };
    for (int64_t c = 0; c < columns; ++c) {
      wanted_sums.add(c, static_cast<double>(given_grad(c)) * static_cast<double>(plain(c)), 0.0, rows);
    }
    const Back wanted(grad, element, factor, columns);
    for (int64_t c = 0; c < columns; ++c) {
      const size_t i = static_cast<size_t>(c);
      const bool same = eps < 0.0f ? back(row, c) == nearest(grad(c), round.dtype)
                                   : close(back(row, c), wanted.values[i], wanted.slack[i], round.dtype);
      round.require(same, "a norm's gradient differs");
    }
  }
  round.require(wanted_sums.are(gain_sums), "the gradient of a norm's gain differs");
}

void check_columns(Drawn& round) {
  const int64_t rows = round.rows(), columns = round.columns();
  const Tensor x = round.tensor(rows * columns), grad = round.tensor(rows * columns);
  const Gained gained(Tensor(round.random, Dtype::float32, columns, round.any));
  const auto [back, sums] = round.same("scaled columns depend on threads", [&](const BlockCall& call) {
    Tensor out(round.dtype, rows * columns);
    Gained to = gained;
    scale_columns_back(call, grad.data(), x.data(), to.call(), round.dtype, rows, columns, out.data());
    return std::tuple(out, to.sums);
  });
  if (round.any) return;
  RowSums wanted(columns);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const double product = static_cast<double>(static_cast<float>(grad[i]) * gained.at(i % columns));
    round.require(back[i] == nearest(product, round.dtype), "scaled columns differ");
    wanted.add(i % columns, grad[i] * x[i], 0.0, rows);
  }
  round.require(wanted.are(sums), "the gradient of factors of columns differs");
}

// act(g) and its slope.
struct Activated {
  double value, slope, slope_size;

  Activated(Activation kind, double g) {
    if (kind == Activation::swiglu) {
      const double s = 1.0 / (1.0 + std::exp(-g));
      value = g * s;
      slope = s * (1.0 + g * (1.0 - s));
      slope_size = s * (1.0 + std::abs(g));
    } else {
      const double rest = std::max(g, 0.0);
      value = rest * rest;
      slope = slope_size = 2.0 * rest;
    }
  }
};

void check_activation(Drawn& round) {
  const int64_t rows = round.rows(), columns = round.columns();
  const Activation kind = static_cast<Activation>(round.random.within(0, 2));
  const bool gated = kind != Activation::relu2;
  const Tensor gate = round.tensor(gated ? rows * columns : 0), up = round.tensor(rows * columns);
  const Tensor grad = round.tensor(rows * columns);
  const float eps = round.eps();
  const Gained gained(round.gain(columns, eps));
  const auto [q, scale, r] = round.same("an activation depends on threads", [&](const BlockCall& call) {
    Bytes made(static_cast<size_t>(rows * columns));
    Tensor scales(Dtype::float32, rows), factors(Dtype::float32, eps < 0.0f ? 0 : rows);
    activate_quantize(call, kind, gate.data(), up.data(), round.dtype, rows, columns, eps, gained.values(),
                      made.data(), scales.floats(), factors.floats());
    return std::tuple(made, scales, factors);
  });
  const Tensor own = r;
  const auto [grad_gate, grad_up, gain_sums] = round.same("an activation's gradient depends on threads", [&](const BlockCall& call) {
    Tensor of_gate(round.dtype, gate.size()), of_up(round.dtype, up.size());
    Gained to = gained;
    activate_back(call, kind, grad.data(), gate.data(), up.data(), eps < 0.0f ? nullptr : own.floats(), to.call(),
                  round.dtype, rows, columns, of_gate.data(), of_up.data());
    return std::tuple(of_gate, of_up, to.sums);
  });
  if (round.any) return;
  RowSums wanted_sums(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const auto u = [&](int64_t c) { return up[row * columns + c]; };
    const auto act = [&](int64_t c) { return Activated(kind, gated ? gate[row * columns + c] : u(c)); };
    const auto hidden = [&](int64_t c) { return act(c).value * (gated ? u(c) : 1.0); };
    const double factor = eps < 0.0f ? 1.0 : r.floats()[row];
    if (eps >= 0.0f) {
      round.require(is_factor(factor, hidden, columns, eps, kActivationError), "an activation's factor differs");
    }
    const auto normed = [&](int64_t c) { return hidden(c) * factor * static_cast<double>(gained.at(c)); };
    round.require(is_quantised(q.data() + row * columns, scale.floats()[row], normed, columns, 2.0 * kActivationError),
                  "an activation differs");
    const auto of_hidden = [&](int64_t c) { return grad[row * columns + c] * static_cast<double>(gained.at(c)); };
    for (int64_t c = 0; c < columns; ++c) {
      const double term = grad[row * columns + c] * hidden(c) * factor;
      wanted_sums.add(c, term, 2.0 * kActivationError * std::abs(term), rows);
    }
    const Back behind(of_hidden, hidden, factor, columns, 2.0 * kActivationError);
    for (int64_t c = 0; c < columns; ++c) {
      const size_t i = static_cast<size_t>(c);
      const double d = eps < 0.0f ? of_hidden(c) : behind.values[i], slack = eps < 0.0f ? 0.0 : behind.slack[i];
      const Activated a = act(c);
      // Both gradients are d times something that is off by a share of its size.
      const auto is_product = [&](double got, double by, double size) {
        return close(got, d * by, (slack + kActivationError * (std::abs(d) + slack)) * size, round.dtype);
      };
      if (gated) {
        round.require(is_product(grad_up[row * columns + c], a.value, std::abs(a.value)), "up's gradient differs");
        round.require(is_product(grad_gate[row * columns + c], u(c) * a.slope, std::abs(u(c)) * a.slope_size),
                      "a gate's gradient differs");
      } else {
        round.require(is_product(grad_up[row * columns + c], a.slope, a.slope_size), "up's gradient differs");
      }
    }
  }
  round.require(wanted_sums.are(gain_sums), "the gradient of a hidden norm's gain differs");
}

void check_turn(Drawn& round) {
  const int64_t rows = round.rows(), columns = round.columns(), features = round.features, planes = features / 2;
  const bool turns = round.random.within(0, 3) != 0;
  Tensor cos(Dtype::float32, turns ? round.length * planes : 0), sin = cos;
  for (int64_t i = 0; i < cos.size(); ++i) {
    const double angle = static_cast<double>(round.random.within(-3000, 3000)) * 0.001;
    cos.set(i, std::cos(angle));
    sin.set(i, std::sin(angle));
  }
  const float* const cosines = turns ? cos.floats() : nullptr;
  const float* const sines = turns ? sin.floats() : nullptr;
  const Tensor x = round.tensor(rows * columns);
  const float eps = round.eps();
  const Gained gained(round.gain(features, eps));
  const Pieces place(round, true);
  const auto [y, r] = round.same("a turn depends on threads", [&](const BlockCall& call) {
    Pieces out = place;
    Tensor factors(Dtype::float32, eps < 0.0f ? 0 : rows * round.heads);
    turn_heads(call, x.data(), round.dtype, rows, out.rows(), cosines, sines, eps, gained.values(), factors.floats());
    return std::tuple(out, factors);
  });
  Pieces grad(round, false);
  const Tensor own = r;
  const auto [back, gain_sums] = round.same("a turn's gradient depends on threads", [&](const BlockCall& call) {
    Tensor out(round.dtype, rows * columns);
    Gained to = gained;
    turn_heads_back(call, grad.rows(), x.data(), round.dtype, rows, cosines, sines,
                    eps < 0.0f ? nullptr : own.floats(), to.call(), out.data());
    return std::tuple(out, to.sums);
  });
  if (round.any) return;
  RowSums wanted_sums(features);
  round.require(y.gaps_kept(rows), "a turn lies beside its place");
  for (int64_t i = 0; i < rows * round.heads; ++i) {
    const int64_t row = i / round.heads, first = i % round.heads * features;
    const auto element = [&](int64_t c) { return x[row * columns + first + c]; };
    const auto louder = [&](int64_t c) { return element(c) * static_cast<double>(gained.at(c)); };
    const double factor = eps < 0.0f ? 1.0 : r.floats()[i];
    if (eps >= 0.0f) round.require(is_factor(factor, element, features, eps, 0.0), "a head's factor differs");
    // Feature c after R (`sign` 1) or its transpose (-1), or, `size`, the magnitudes that are added for it.
    const auto turned = [&](auto from, int64_t c, double sign, bool size) {
      const int64_t p = c % planes, angle = row % round.length * planes + p;
      const double cosine = turns ? cos[angle] : 1.0, sine = turns ? sin[angle] * sign : 0.0;
      const double a = from(p), b = from(p + planes);
      const double one = (c < planes ? a : b) * cosine, other = c < planes ? -b * sine : a * sine;
      return size ? std::abs(one) + std::abs(other) : one + other;
    };
    const auto of_y = [&](int64_t c) { return grad(row, first + c); };
    double off = 0.0;
    double loudest = 1.0;
    for (int64_t c = 0; c < features; ++c) {
      const double rounded = turned(of_y, c, -1.0, true) * 4.0 * kEpsilon, normed = element(c) * factor;
      off = std::max(off, rounded);
      loudest = std::max(loudest, std::abs(static_cast<double>(gained.at(c))));
      wanted_sums.add(c, turned(of_y, c, -1.0, false) * normed, rounded * std::abs(normed), rows * round.heads);
    }
    off *= 2.0 * loudest;
    const auto of_normed = [&](int64_t c) {
      return turned(of_y, c, -1.0, false) * static_cast<double>(gained.at(c));
    };
    const Back wanted(of_normed, element, factor, features, 0.0, off);
    for (int64_t c = 0; c < features; ++c) {
      const double slack = turned(louder, c, 1.0, true) * factor * 6.0 * kEpsilon;
      round.require(close(y(row, first + c), turned(louder, c, 1.0, false) * factor, slack, round.dtype),
                    "a turn differs");
      const double value = eps < 0.0f ? turned(of_y, c, -1.0, false) : wanted.values[static_cast<size_t>(c)];
      const double error = eps < 0.0f ? off : wanted.slack[static_cast<size_t>(c)];
      round.require(close(back[row * columns + first + c], value, error, round.dtype), "a turn's gradient differs");
    }
  }
  round.require(wanted_sums.are(gain_sums), "the gradient of a head norm's gain differs");
}

// The least power of two that 127 of are as large as everything in `x`, and the numbers in its units, rounded by noise.
bool is_rounded(const Tensor& x, const HashWords& words, const Bytes& q, float scale) {
  double largest = 0.0, power = 0x1p-126;
  for (int64_t i = 0; i < x.size(); ++i) largest = std::max(largest, std::abs(x[i]));
  while (127.0 * power < largest) power *= 2.0;
  if (scale != (largest == 0.0 ? 1.0 : power)) return false;
  const HashStream noise(words);
  for (int64_t i = 0; i < x.size(); ++i) {
    const float u = static_cast<float>(hash_finish(noise.base(static_cast<uint64_t>(i))) >> 8) * 0x1p-24f;
    const float value = largest == 0.0 ? 0.0f : std::floor(static_cast<float>(x[i] / power) + u);
    if (q[static_cast<size_t>(i)] != std::min(127.0f, std::max(-127.0f, value))) return false;
  }
  return true;
}

void check_both(Drawn& round) {
  const int64_t rows = round.rows(), columns = round.columns();
  const Tensor grad = round.tensor(rows * columns);
  Tensor row_scale(Dtype::float32, rows);
  for (int64_t i = 0; i < rows; ++i) row_scale.set(i, static_cast<double>(round.random.within(1, 1000)) * 1e-3);
  const HashWords words{round.seed, 1, 2}, folded_words{round.seed, 1, 3};
  const auto [q, folded, scales] = round.same("two gradients depend on threads", [&](const BlockCall& call) {
    Bytes one(static_cast<size_t>(rows * columns)), other = one;
    Tensor units(Dtype::float32, 2);
    quantize_both(call, grad.data(), round.dtype, rows, columns, row_scale.floats(), words, folded_words, one.data(),
                  other.data(), units.floats());
    return std::tuple(one, other, units);
  });
  if (round.any) return;
  Tensor scaled(round.dtype, grad.size());
  for (int64_t i = 0; i < grad.size(); ++i) scaled.set(i, grad[i] * nearest(row_scale[i / columns], round.dtype));
  round.require(is_rounded(grad, words, q, scales.floats()[0]), "a gradient differs");
  round.require(is_rounded(scaled, folded_words, folded, scales.floats()[1]), "a folded gradient differs");
}

void round(uint64_t seed) {
  for (const Isa isa : usable_isas()) {
    Drawn drawn(seed, isa);
    check_norm(drawn);
    check_columns(drawn);
    check_activation(drawn);
    check_turn(drawn);
    check_both(drawn);
  }
}

}  // namespace

#include "check_main.h"
