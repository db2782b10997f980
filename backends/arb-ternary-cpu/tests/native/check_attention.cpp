// Random heads through causal attention, forward and backward: every instruction set against plain loops in double.
//
// How far a kernel may be off is added up from the roundings of its operands, to its dtype, and of its sums, to float32.
// All buffers have exactly the size that the kernels are told, so that an address sanitizer sees a step beyond them.
// Now and then they hold bits at random: those results are only compared with those of one thread.
// Arguments: rounds, first seed; compiled with -DARB_FUZZ and libFuzzer it takes its seeds from the fuzzer.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "attention.h"
#include "numbers.h"

namespace {

using namespace arb;

using Row = std::vector<double>;

double largest(const Row& x) {
  double size = 0.0;
  for (const double f : x) size = std::max(size, std::abs(f));
  return size;
}

// What a round draws.
struct Case {
  int64_t batch, length, heads, key_heads, features;
  bool any, turns;
  Dtype dtype;
  float query_eps, key_eps;
  Tensor query, key, value, grad, cos, sin, query_gain, key_gain;

  explicit Case(Random& random)
      : batch(random.within(1, 2)),
        length(random.within(1, random.within(0, 3) == 0 ? 140 : 20)),
        key_heads(random.within(1, 2)),
        features(2 * random.within(1, random.within(0, 3) == 0 ? 70 : 20)),
        any(random.within(0, 5) == 0),
        turns(random.within(0, 2) != 0),
        dtype(static_cast<Dtype>(random.within(0, 2))),
        query_eps(random.within(0, 1) == 0 ? -1.0f : 1e-2f),
        key_eps(random.within(0, 1) == 0 ? -1.0f : 1e-2f),
        query(dtype, 0),
        key(dtype, 0),
        value(dtype, 0),
        grad(dtype, 0),
        cos(Dtype::float32, turns ? length * features / 2 : 0),
        sin(cos),
        query_gain(gain(random, query_eps)),
        key_gain(gain(random, key_eps)) {
    heads = key_heads * random.within(1, 3);
    const auto drawn = [&](int64_t count) {
      Tensor made(random, dtype, batch * length * count * features, any);
      for (int64_t i = 0; !any && i < made.size(); ++i) {
        made.set(i, static_cast<double>(random.within(-1000, 1000)) * 7e-4);
      }
      return made;
    };
    query = drawn(heads);
    key = drawn(key_heads);
    value = drawn(key_heads);
    grad = drawn(heads);
    for (int64_t i = 0; i < cos.size(); ++i) {
      const double angle = static_cast<double>(random.within(-3000, 3000)) * 0.001;
      cos.set(i, std::cos(angle));
      sin.set(i, std::sin(angle));
    }
  }

  // Of heads with a norm, now and then, or nothing.
  Tensor gain(Random& random, float eps) const {
    Tensor made(random, Dtype::float32, eps < 0.0f || random.within(0, 1) == 0 ? 0 : features, any);
    for (int64_t i = 0; !any && i < made.size(); ++i) {
      made.set(i, static_cast<double>(random.within(-1000, 1000)) * 2e-3);
    }
    return made;
  }
  static const float* values(const Tensor& gain) { return gain.size() == 0 ? nullptr : gain.floats(); }

  Attended attended() const {
    return {query.data(), key.data(), value.data(), dtype, batch, length, heads, key_heads, features,
            turns ? cos.floats() : nullptr, turns ? sin.floats() : nullptr, query_eps, key_eps,
            values(query_gain), values(key_gain)};
  }
  int64_t place(int64_t b, int64_t t, int64_t count, int64_t head) const {
    return ((b * length + t) * count + head) * features;
  }
  Row row(const Tensor& x, int64_t count, int64_t b, int64_t t, int64_t head) const {
    Row made;
    for (int64_t c = 0; c < features; ++c) made.push_back(x[place(b, t, count, head) + c]);
    return made;
  }
  // The factor of a norm, and a row turned by its position, or back.
  double factor(const Row& x, float eps) const {
    double squares = 0.0;
    for (const double f : x) squares += f * f;
    return eps < 0.0f ? 1.0 : 1.0 / std::sqrt(squares / static_cast<double>(features) + eps);
  }
  // A row with its factor and its gains.
  Row normed(Row x, float eps, const Tensor& gain) const {
    const double r = factor(x, eps);
    for (size_t f = 0; f < x.size(); ++f) x[f] *= r * (gain.size() == 0 ? 1.0 : gain[static_cast<int64_t>(f)]);
    return x;
  }
  Row turned(const Row& x, int64_t t, double sign) const {
    Row made = x;
    const size_t planes = x.size() / 2;
    for (size_t p = 0; p < planes; ++p) {
      const int64_t angle = t * features / 2 + static_cast<int64_t>(p);
      const double c = turns ? cos[angle] : 1.0, s = turns ? sign * sin[angle] : 0.0;
      made[p] = x[p] * c - x[p + planes] * s;
      made[p + planes] = x[p + planes] * c + x[p] * s;
    }
    return made;
  }
};

struct Results {
  Tensor seen, logs, query, key, value, query_gain, key_gain;
  bool operator==(const Results& other) const {
    return std::tie(seen, logs, query, key, value, query_gain, key_gain) ==
           std::tie(other.seen, other.logs, other.query, other.key, other.value, other.query_gain, other.key_gain);
  }
};

Tensor zeros(int64_t count) {
  Tensor made(Dtype::float32, count);
  for (int64_t i = 0; i < count; ++i) made.set(i, 0.0);
  return made;
}

Results run(const Case& c, Isa isa, int threads) {
  const BlockCall call(static_cast<int>(isa), threads);
  const AttentionKernels& kernels = attention_kernels(static_cast<int>(isa), c.dtype);
  const Attended of = c.attended();
  Results r{Tensor(c.dtype, c.query.size()), Tensor(Dtype::float32, c.batch * c.heads * c.length),
            Tensor(c.dtype, c.query.size()), Tensor(c.dtype, c.key.size()), Tensor(c.dtype, c.key.size()),
            zeros(c.query_gain.size()), zeros(c.key_gain.size())};
  attend(call, kernels, of, r.seen.data(), r.logs.floats());
  attend_back(call, kernels, of, r.seen.data(), r.logs.floats(), c.grad.data(), r.query.data(), r.key.data(),
              r.value.data(), c.query_gain.size() == 0 ? nullptr : r.query_gain.floats(),
              c.key_gain.size() == 0 ? nullptr : r.key_gain.floats());
  return r;
}

// Gradients of gains, to which every sequence and every head adds.
struct GainSums {
  RowSums query, key;
};

// Plain loops over one sequence and one key head.
class Plain {
 public:
  Plain(const Case& c, const Results& got, GainSums& gains, int64_t b, int64_t key_head)
      : c_(c),
        got_(got),
        gains_(gains),
        b_(b),
        head_(key_head),
        unit_(Format(c.dtype).unit(1.0)),
        error_(4.0 * unit_ + 2.0 * sum_error(c.features + c.length)),
        grad_keys_(static_cast<size_t>(c.length), Row(static_cast<size_t>(c.features))),
        grad_values_(grad_keys_),
        key_error_(static_cast<size_t>(c.length)),
        value_error_(key_error_) {}

  // What differs, or null.
  const char* difference() {
    const int64_t shared = c_.heads / c_.key_heads;
    for (int64_t t = 0; t < c_.length; ++t) {
      const Row x = c_.row(c_.key, c_.key_heads, b_, t, head_);
      keys_.push_back(c_.turned(c_.normed(x, c_.key_eps, c_.key_gain), t, 1.0));
      values_.push_back(c_.row(c_.value, c_.key_heads, b_, t, head_));
    }
    for (int64_t h = head_ * shared; h < (head_ + 1) * shared; ++h) {
      for (int64_t t = 0; t < c_.length; ++t) {
        if (const char* const what = query(h, t)) return what;
      }
    }
    for (int64_t t = 0; t < c_.length; ++t) {
      const size_t i = static_cast<size_t>(t);
      const Row x = c_.row(c_.key, c_.key_heads, b_, t, head_);
      const Place place{got_.key, c_.key_heads, head_, t};
      if (!is_back(place, x, c_.key_eps, c_.key_gain, gains_.key, grad_keys_[i], key_error_[i])) return "a key's gradient";
      for (int64_t f = 0; f < c_.features; ++f) {
        const double wanted = grad_values_[i][static_cast<size_t>(f)];
        if (!close(got_.value[c_.place(b_, t, c_.key_heads, head_) + f], wanted, value_error_[i], c_.dtype)) {
          return "a value's gradient";
        }
      }
    }
    return nullptr;
  }

 private:
  // Some row of a gradient.
  struct Place {
    const Tensor& tensor;
    int64_t heads, head, position;
  };

  const char* query(int64_t h, int64_t t) {
    const size_t count = static_cast<size_t>(t) + 1;
    const double scale = 1.0 / std::sqrt(static_cast<double>(c_.features));
    const Row x = c_.row(c_.query, c_.heads, b_, t, h);
    const Row q = c_.turned(c_.normed(x, c_.query_eps, c_.query_gain), t, 1.0);
    const Row given = c_.row(c_.grad, c_.heads, b_, t, h);
    Row p, seen(q.size()), slopes, grad(q.size());
    double size = 0.0, most = -HUGE_VAL, total = 0.0, key_size = 0.0, value_size = 0.0;
    for (size_t j = 0; j < count; ++j) {
      double score = 0.0, magnitude = 0.0;
      for (size_t f = 0; f < q.size(); ++f) {
        score += scale * q[f] * keys_[j][f];
        magnitude += scale * std::abs(q[f] * keys_[j][f]);
      }
      p.push_back(score);
      most = std::max(most, score);
      size = std::max(size, magnitude);
      key_size = std::max(key_size, largest(keys_[j]));
      value_size = std::max(value_size, largest(values_[j]));
    }
    for (double& f : p) total += f = std::exp(f - most);
    for (size_t j = 0; j < count; ++j) {
      p[j] /= total;
      for (size_t f = 0; f < q.size(); ++f) seen[f] += p[j] * values_[j][f];
    }
    // The share that an exponential may be off by, and what is seen.
    const double share = 2.0 * error_ * (size + 1.0), off = (2.0 * share + error_) * value_size;
    const double log = most + std::log(total);
    if (std::abs(got_.logs[(b_ * c_.heads + h) * c_.length + t] - log) > share + 1e-6 * (std::abs(log) + size)) return "a log";
    const int64_t place = c_.place(b_, t, c_.heads, h);
    double dot = 0.0, dot_size = 0.0, given_size = 0.0;
    for (size_t f = 0; f < q.size(); ++f) {
      if (!close(got_.seen[place + static_cast<int64_t>(f)], seen[f], off, c_.dtype)) return "what is seen";
      dot += given[f] * seen[f];
      dot_size += std::abs(given[f]) * (std::abs(seen[f]) + 2.0 * off / error_);
      given_size = std::max(given_size, std::abs(given[f]));
    }
    double pair_size = 0.0, all_slopes = 0.0;
    for (size_t j = 0; j < count; ++j) {
      double sum = 0.0, magnitude = 0.0;
      for (size_t f = 0; f < q.size(); ++f) {
        sum += given[f] * values_[j][f];
        magnitude += std::abs(given[f] * values_[j][f]);
      }
      slopes.push_back(p[j] * (sum - dot));
      pair_size = std::max(pair_size, magnitude);
      all_slopes += std::abs(slopes[j]);
    }
    // What a slope is off by, in units of its exponential.
    const double slope_off = (pair_size + std::abs(dot)) * 2.0 * share + error_ * (pair_size + dot_size);
    for (size_t j = 0; j < count; ++j) {
      for (size_t f = 0; f < q.size(); ++f) {
        grad[f] += scale * slopes[j] * keys_[j][f];
        grad_keys_[j][f] += scale * slopes[j] * q[f];
        grad_values_[j][f] += p[j] * given[f];
      }
      key_error_[j] += scale * largest(q) * (p[j] * slope_off + std::abs(slopes[j]) * error_);
      value_error_[j] += p[j] * given_size * (2.0 * share + error_);
    }
    const double error = scale * key_size * (slope_off + all_slopes * error_);
    const Place where{got_.query, c_.heads, h, t};
    const bool right = is_back(where, x, c_.query_eps, c_.query_gain, gains_.query, grad, error);
    return right ? nullptr : "a query's gradient";
  }

  // Whether the gradient of a row x that was normalised and turned is there, from that of the result; adds what it gives
  // to the gradients of gains.
  bool is_back(const Place& at, const Row& x, float eps, const Tensor& gain, RowSums& sums, const Row& grad,
               double error) const {
    Row back = c_.turned(grad, at.position, -1.0);
    double off = 2.0 * (error + error_ * largest(grad));
    const double r = c_.factor(x, eps);
    double loudest = 1.0;
    for (size_t f = 0; f < x.size() && gain.size() > 0; ++f) {
      const int64_t i = static_cast<int64_t>(f);
      sums.add(i, back[f] * x[f] * r, off * std::abs(x[f] * r), c_.batch * c_.length * at.heads);
      back[f] *= gain[i];
      loudest = std::max(loudest, std::abs(gain[i]));
    }
    off *= loudest;
    const auto of = [](const Row& row) { return [&row](int64_t i) { return row[static_cast<size_t>(i)]; }; };
    const Back wanted(of(back), of(x), r, c_.features, 0.0, off);
    for (size_t f = 0; f < x.size(); ++f) {
      const double value = eps < 0.0f ? back[f] : wanted.values[f], slack = eps < 0.0f ? off : wanted.slack[f];
      const int64_t own = c_.place(b_, at.position, at.heads, at.head) + static_cast<int64_t>(f);
      if (!close(at.tensor[own], value, slack, c_.dtype)) return false;
    }
    return true;
  }

  const Case& c_;
  const Results& got_;
  GainSums& gains_;
  const int64_t b_, head_;
  const double unit_, error_;
  std::vector<Row> keys_, values_, grad_keys_, grad_values_;
  Row key_error_, value_error_;
};

void require(bool holds, Isa isa, const char* what, uint64_t seed) {
  if (holds) return;
  std::printf("%s: %s differs, seed %llu\n", isa_name(isa), what, static_cast<unsigned long long>(seed));
  std::exit(1);
}

void round(uint64_t seed) {
  Random random(seed);
  const Case drawn(random);
  const int threads = static_cast<int>(random.within(2, 3));
  for (const Isa isa : usable_isas()) {
    const Results got = run(drawn, isa, 1);
    require(run(drawn, isa, threads) == got, isa, "attention with threads", seed);
    GainSums gains{RowSums(drawn.features), RowSums(drawn.features)};
    for (int64_t i = 0; !drawn.any && i < drawn.batch * drawn.key_heads; ++i) {
      const char* const what = Plain(drawn, got, gains, i / drawn.key_heads, i % drawn.key_heads).difference();
      require(what == nullptr, isa, what, seed);
    }
    require(drawn.any || gains.query.are(got.query_gain), isa, "the gradient of queries' gains", seed);
    require(drawn.any || gains.key.are(got.key_gain), isa, "the gradient of keys' gains", seed);
  }
}

}  // namespace

#include "check_main.h"
