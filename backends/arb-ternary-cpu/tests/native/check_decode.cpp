// A token through random small decoders: every instruction set against plain loops in double, with one thread and more,
// and sequences together against one alone; and texts that are read in pieces, together, in blocks that lie anywhere,
// against each alone and token by token.
//
// A number that lies so close to the middle of two integers that float32 may round it the other way makes what follows
// of its sequence another, and is not compared with the plain loops; how many sequences were is said at the end. Keys
// and values are compared, and then taken as the kernel stored them. All buffers have exactly the size that the kernels
// are told, so that an address sanitizer sees a step beyond them.
// Arguments: rounds, first seed; compiled with -DARB_FUZZ and libFuzzer it takes its seeds from the fuzzer.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "small_decoders.h"

namespace {

using namespace arb;

using Row = std::vector<double>;

// How far from the middle of two integers a number is told from it, and how far off results are, relative to the
// largest of a row: float32 has a relative error of 6e-8, sums and products of a layer have some of them.
constexpr double kMiddle = 5e-4;
constexpr double kError = 5e-5;

int64_t sequences = 0, compared = 0;

void require(bool holds, Isa isa, const char* what, uint64_t seed) {
  if (holds) return;
  std::printf("%s: %s, seed %llu\n", isa_name(isa), what, static_cast<unsigned long long>(seed));
  std::exit(1);
}

double weight_at(const Weight& w, int64_t n, int64_t k) {
  const int64_t block = n / 16 * blocks_of(w.columns) + k / 16;
  const int code = w.packed[block * 64 + n % 16 * 4 + k % 4] >> (k % 16 / 4 * 2) & 3;
  return std::ldexp(code - 1, w.exponent[n * w.groups + k / w.group_size]);
}

// Whether the sums of a product fit in 32 bits.
bool fits(const Projection& p) {
  const Weight& w = p.weight;
  for (int64_t n = 0; p.present() && n < w.rows; ++n) {
    const int8_t* const row = w.exponent + n * w.groups;
    const int spread = *std::max_element(row, row + w.groups) - *std::min_element(row, row + w.groups);
    if (spread >= 24 || w.columns >= (1 << 24 >> spread)) return false;
  }
  return true;
}

bool fits(const DecodePlan& plan) {
  for (const DecodeLayer& l : plan.layers) {
    for (const Projection* p : {&l.query, &l.key, &l.value, &l.output, &l.gate, &l.up, &l.down}) {
      if (!fits(*p)) return false;
    }
  }
  return fits(plan.head);
}

// One sequence through a decoder.
class Plain {
 public:
  bool clear = true;  // no number in the middle of two integers
  bool stored = true; // keys and values are those of the cache

  Plain(const DecodePlan& plan, const Cache& cache, int64_t sequence, double position)
      : plan_(plan), cache_(cache), sequence_(sequence), position_(position) {}

  Row run(int64_t id) {
    Row x(static_cast<size_t>(plan_.width));
    for (int64_t i = 0; i < plan_.width; ++i) {
      x[static_cast<size_t>(i)] = plan_.float_embedding == nullptr
                                      ? weight_at(plan_.ternary_embedding, id, i)
                                      : element(plan_.float_embedding, plan_.embedding_dtype, id * plan_.width + i);
    }
    for (size_t l = 0; l < plan_.layers.size(); ++l) {
      const DecodeLayer& layer = plan_.layers[l];
      add(x, product(layer.output_norm, attended(layer, l, x), layer.output), layer.residual_scale);
      const Row gate = layer.gate.present() ? product(layer.feed_norm, x, layer.gate) : Row();
      Row hidden = product(layer.feed_norm, x, layer.up);
      for (size_t i = 0; i < hidden.size(); ++i) {
        const double g = gate.empty() ? hidden[i] : gate[i], rest = std::max(g, 0.0);
        if (plan_.activation == Activation::relu2) hidden[i] = rest * rest;
        if (plan_.activation == Activation::reglu2) hidden[i] *= rest * rest;
        if (plan_.activation == Activation::swiglu) hidden[i] *= g / (1.0 + std::exp(-g));
      }
      add(x, product(layer.hidden_norm, hidden, layer.down), layer.residual_scale);
    }
    if (!plan_.head.present()) return normed(plan_.final_norm, x);
    Row logits = product(plan_.final_norm, x, plan_.head);
    for (double& logit : logits) logit *= plan_.logit_scale;
    return logits;
  }

 private:
  static double element(const void* x, Dtype dtype, int64_t i) {
    Tensor one(dtype, 1);
    std::memcpy(one.data(), static_cast<const char*>(x) + i * dtype_size(dtype), static_cast<size_t>(dtype_size(dtype)));
    return one[0];
  }

  static void add(Row& x, const Row& update, double scale) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += update[i] * scale;
  }

  static Row normed(const Norm& n, Row x) {
    if (!n.present) return x;
    double squares = 0.0;
    for (const double f : x) squares += f * f;
    const double r = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + n.eps);
    for (size_t i = 0; i < x.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i);
      x[i] *= r * (n.ternary ? weight_at(n.row, 0, at) : n.gain != nullptr ? element(n.gain, n.gain_dtype, at) : 1.0);
    }
    return x;
  }

  Row product(const Norm& before, const Row& x, const Projection& p) {
    Row q = normed(before, x);
    double scale = 0.0;
    for (const double f : q) scale = std::max(scale, std::abs(f) / 127.0);
    for (double& f : q) {
      const double quotient = scale == 0.0 ? 0.0 : f / scale;
      f = std::nearbyint(quotient);
      if (std::abs(quotient - f) > 0.5 - kMiddle) clear = false;
    }
    Row y(static_cast<size_t>(p.weight.rows));
    for (size_t n = 0; n < y.size(); ++n) {
      for (size_t k = 0; k < q.size(); ++k) {
        y[n] += q[k] * weight_at(p.weight, static_cast<int64_t>(n), static_cast<int64_t>(k));
      }
      y[n] *= scale * (p.factor == nullptr ? 1.0 : *p.factor);
    }
    return y;
  }

  // Head `number` of a row of them, turned by its position.
  Row turned(const Norm& n, const Row& heads, int64_t number) const {
    const auto first = heads.begin() + number * plan_.features;
    Row x = normed(n, Row(first, first + plan_.features));
    const size_t planes = x.size() / 2;
    for (size_t p = 0; p < planes; ++p) {
      const double angle = position_ * plan_.speeds[p], a = x[p], b = x[p + planes];
      x[p] = a * std::cos(angle) - b * std::sin(angle);
      x[p + planes] = b * std::cos(angle) + a * std::sin(angle);
    }
    return x;
  }

  int64_t cache_row(int64_t head, int64_t place) const {
    return (sequence_ * plan_.key_heads + head) * cache_.capacity + place;
  }
  double cached(size_t which, int64_t head, int64_t place, int64_t feature) const {
    return cache_.at(which, cache_row(head, place), plan_.features, feature);
  }

  void compare(size_t which, int64_t head, const Row& wanted) {
    double size = 0.0;
    for (const double f : wanted) size = std::max(size, std::abs(f));
    const bool rounded = cache_.kept == Kept::int8;
    if (clear && rounded) {
      // Rounded to the nearest of 255 numbers, of which the last is the largest of the row.
      const double scale = cache_.tensors[which][cache_row(head, cache_.slot)];
      if (!close(scale, size / 127.0, kError * size, Dtype::float32)) stored = false;
    }
    for (size_t c = 0; clear && c < wanted.size(); ++c) {
      const double got = cached(which, head, cache_.slot, static_cast<int64_t>(c));
      const double slack = (kError + (rounded ? 0.5 / 127.0 : 0.0)) * size;
      if (!close(got, wanted[c], slack, rounded ? Dtype::float32 : cache_.tensors[which].dtype())) stored = false;
    }
  }

  Row attended(const DecodeLayer& layer, size_t l, const Row& x) {
    const Row queries = product(layer.attention_norm, x, layer.query);
    const Row keys = product(layer.attention_norm, x, layer.key);
    const Row values = product(layer.attention_norm, x, layer.value);
    for (int64_t h = 0; h < plan_.key_heads; ++h) {
      compare(2 * l, h, turned(layer.key_norm, keys, h));
      const auto first = values.begin() + h * plan_.features;
      compare(2 * l + 1, h, Row(first, first + plan_.features));
    }
    Row seen;
    for (int64_t h = 0; h < plan_.heads; ++h) {
      const int64_t from = h / (plan_.heads / plan_.key_heads);
      const Row query = turned(layer.query_norm, queries, h);
      Row weights, sums(query.size());
      double total = 0.0;
      for (int64_t t = cache_.slot - cache_.past; t <= cache_.slot; ++t) {
        double score = 0.0;
        for (size_t c = 0; c < query.size(); ++c) score += query[c] * cached(2 * l, from, t, static_cast<int64_t>(c));
        weights.push_back(score / std::sqrt(static_cast<double>(plan_.features)));
      }
      const double most = *std::max_element(weights.begin(), weights.end());
      for (size_t t = 0; t < weights.size(); ++t) {
        const double weight = std::exp(weights[t] - most);
        const int64_t place = cache_.slot - cache_.past + static_cast<int64_t>(t);
        total += weight;
        for (size_t c = 0; c < sums.size(); ++c) {
          sums[c] += weight * cached(2 * l + 1, from, place, static_cast<int64_t>(c));
        }
      }
      for (const double sum : sums) seen.push_back(sum / total);
    }
    return seen;
  }

  const DecodePlan& plan_;
  const Cache& cache_;
  int64_t sequence_;
  double position_;
};

// Keys and values of all layers, undefined, in `blocks` blocks of `size` positions.
struct Blocks {
  std::vector<std::vector<char>> parts;
  std::vector<int64_t> addresses;

  Blocks(const DecodePlan& plan, Kept kept, int64_t blocks, int64_t size) {
    const int64_t rows = blocks * plan.key_heads * size;
    for (size_t layer = 0; layer < plan.layers.size(); ++layer) {
      const size_t bytes = static_cast<size_t>(rows * plan.features * kept_size(kept));
      for (int i = 0; i < 2; ++i) parts.emplace_back(bytes, '\x7f');
      for (int i = 0; i < 2 && kept == Kept::int8; ++i) parts.emplace_back(static_cast<size_t>(rows * 4), '\x7f');
    }
    for (const std::vector<char>& part : parts) addresses.push_back(reinterpret_cast<int64_t>(part.data()));
  }
};

struct Text {
  std::vector<int64_t> ids, table;
  std::vector<Tensor> results;
  int64_t length() const { return static_cast<int64_t>(ids.size()); }
};

double place(int64_t slot) { return static_cast<double>(slot) * 0.25; }

void check_rows(Random& random, const Model& model, uint64_t seed) {
  const DecodePlan& plan = model.plan;
  if (!fits(plan)) return;
  const Kept kept = static_cast<Kept>(random.within(0, 2));
  const Dtype dtype = random.within(0, 1) == 0 ? Dtype::float32 : Dtype::bfloat16;
  const int64_t size = random.within(1, 9), most_past = random.within(0, 2) == 0 ? random.within(0, 12) : 1000;
  const int64_t most_rows = random.within(1, 14);
  std::vector<Text> texts(static_cast<size_t>(random.within(1, 3)));
  int64_t blocks = 0, width = 0;
  for (Text& text : texts) {
    text.ids = random.numbers<int64_t>(random.within(1, 20), 0, plan.vocabulary - 1);
    const int64_t needed = (text.length() + size - 1) / size;
    for (int64_t i = 0; i < needed; ++i) text.table.push_back(blocks++);
    std::reverse(text.table.begin(), text.table.end());
    width = std::max(width, needed);
  }
  std::vector<int64_t> tables;
  for (const Text& text : texts) {
    tables.insert(tables.end(), text.table.begin(), text.table.end());
    tables.resize(tables.size() + static_cast<size_t>(width) - text.table.size(), -1);
  }

  for (const Isa isa : usable_isas()) {
    for (Text& text : texts) {
      text.results.clear();
      Blocks alone(plan, kept, 1, text.length());
      for (int64_t t = 0; t < text.length(); ++t) {
        text.results.emplace_back(dtype, model.outputs());
        const DecodeStepCache cache{alone.addresses.data(), kept, text.length(), t, std::min(t, most_past)};
        require(decode_step(static_cast<int>(isa), 1, plan, 1, &text.ids[static_cast<size_t>(t)], place(t), cache,
                            text.results.back().data(), dtype),
                isa, "a token is refused", seed);
      }
    }
    const Blocks all(plan, kept, blocks, size);
    const int64_t count = static_cast<int64_t>(texts.size());
    const DecodeCache cache{all.addresses.data(), kept, blocks, size, tables.data(), count, width};
    std::vector<int64_t> read(texts.size());
    for (bool done = false; !done;) {
      std::vector<int64_t> ids, sequences, slots, pasts, wanted;
      std::vector<double> positions;
      done = true;
      for (size_t s = 0; s < texts.size(); ++s) {
        const int64_t stop = std::min(texts[s].length(), read[s] + random.within(0, most_rows));
        for (; read[s] < stop; ++read[s]) {
          const int64_t t = read[s];
          if (random.within(0, 2) != 0) wanted.push_back(static_cast<int64_t>(ids.size()));
          ids.push_back(texts[s].ids[static_cast<size_t>(t)]);
          sequences.push_back(static_cast<int64_t>(s));
          slots.push_back(t);
          pasts.push_back(std::min(t, most_past));
          positions.push_back(place(t));
        }
        done = done && read[s] == texts[s].length();
      }
      if (ids.empty()) continue;
      const int64_t results = static_cast<int64_t>(wanted.size());
      const DecodeRows rows{static_cast<int64_t>(ids.size()), ids.data(),       sequences.data(), slots.data(),
                            pasts.data(),                     positions.data(), results,          wanted.data()};
      Tensor out(dtype, results * model.outputs());
      const int threads = static_cast<int>(random.within(1, 3));
      require(decode_rows(static_cast<int>(isa), threads, plan, rows, cache, out.data(), dtype), isa,
              "rows are refused", seed);
      for (int64_t i = 0; i < results; ++i) {
        const size_t row = static_cast<size_t>(wanted[static_cast<size_t>(i)]);
        const Tensor& expected = texts[static_cast<size_t>(sequences[row])].results[static_cast<size_t>(slots[row])];
        for (int64_t j = 0; j < model.outputs(); ++j) {
          require(out[i * model.outputs() + j] == expected[j], isa, "a token depends on others", seed);
        }
      }
    }
  }
}

void round(uint64_t seed) {
  Random random(seed);
  const Model model(random);
  const DecodePlan& plan = model.plan;
  const Cache before(random, model);
  const Dtype dtype = random.within(0, 1) == 0 ? Dtype::float32 : Dtype::bfloat16;
  const double position = static_cast<double>(random.within(0, 4000)) * 0.25;
  std::vector<int64_t> ids = random.numbers<int64_t>(model.batch, 0, plan.vocabulary - 1);
  const bool unknown = random.within(0, 19) == 0;
  if (unknown) ids.back() = random.within(0, 1) == 0 ? -1 : plan.vocabulary;
  const int64_t one = random.within(0, model.batch - 1);
  const Tensor fresh(dtype, model.batch * model.outputs());

  for (const Isa isa : usable_isas()) {
    Cache cache = before;
    Tensor out = fresh;
    const bool done = cache.step(isa, 1, plan, ids, position, out);
    require(done == (!unknown && fits(plan)), isa, "a step is taken, or refused, wrongly", seed);
    if (unknown) require(cache == before, isa, "a refused step writes keys", seed);
    require(cache.keeps(before, plan.features), isa, "a step writes other positions", seed);
    if (!done) continue;
    for (const int threads : {2, 3}) {
      Cache again = before;
      Tensor same = fresh;
      require(again.step(isa, threads, plan, ids, position, same) && same == out && again == cache, isa,
              "a step depends on threads", seed);
    }
    Cache own = before.alone(plan, one);
    Tensor alone(dtype, model.outputs());
    require(own.step(isa, 1, plan, {ids[static_cast<size_t>(one)]}, position, alone), isa, "a sequence is refused", seed);
    for (int64_t i = 0; i < model.outputs(); ++i) {
      require(alone[i] == out[one * model.outputs() + i], isa, "a sequence depends on the others", seed);
    }
    require(own == cache.alone(plan, one), isa, "keys depend on other sequences", seed);

    for (int64_t b = 0; b < model.batch; ++b) {
      Plain plain(plan, cache, b, position);
      const Row wanted = plain.run(ids[static_cast<size_t>(b)]);
      require(plain.stored, isa, "a key or a value differs", seed);
      ++sequences;
      if (!plain.clear) continue;
      ++compared;
      double size = 0.0;
      for (const double f : wanted) size = std::max(size, std::abs(f));
      for (int64_t i = 0; i < model.outputs(); ++i) {
        require(close(out[b * model.outputs() + i], wanted[static_cast<size_t>(i)], kError * size, dtype), isa,
                "a result differs", seed);
      }
    }
  }
  check_rows(random, model, seed);
}

void say_how_many() {
  std::printf("%lld of %lld sequences compared with plain loops\n", static_cast<long long>(compared),
              static_cast<long long>(sequences));
}

}  // namespace

#define ARB_CHECK_END say_how_many()
#include "check_main.h"
