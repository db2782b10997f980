// One token through all layers of a decoder. Its stages, between which the threads wait for each other: queries, keys
// and values; attention; its output; gate and up; down; and at last the head. What enters a product is normalised and
// rounded by every thread for itself, which takes less time than to wait for one that does it.
#include <cmath>
#include <cstring>
#include <vector>

#include "crew.h"
#include "decode_token.h"
#include "product_plan.h"

namespace arb {

namespace {

// Multiply-accumulates below which one thread is done with a token before another has woken up.
constexpr double kShortWork = 6e6;
// Bytes of a weight that are asked for before the rows that it is multiplied with are ready.
constexpr int64_t kAhead = 16 << 10;
constexpr int64_t kLine = 64;

class Worker {
 public:
  Worker(Token& token, const Desk& desk, Crew::Member& member) : t_(token), desk_(desk), member_(member) {}

  void run() {
    for (size_t i = 0; i < t_.plan.layers.size(); ++i) {
      attention(t_.plan.layers[i], t_.cache.addresses + t_.cache.parts() * static_cast<int64_t>(i));
      feed_forward(t_.plan.layers[i]);
    }
    finish();
  }

 private:
  void norm(const Norm& n, const float* x, int64_t count, float* out) const {
    const float* gain = nullptr;
    if (n.ternary) {
      t_.products.lookup_row(n.row.packed, 0, n.row.exponent, count, n.row.groups == 1 ? count : n.row.group_size,
                             desk_.gain, Dtype::float32);
      gain = desk_.gain;
    } else if (n.gain != nullptr) {
      t_.loops.to_floats(n.gain, n.gain_dtype, count, desk_.gain);
      gain = desk_.gain;
    }
    t_.loops.norm_row(x, count, n.eps, gain, out);
  }

  // The rows `x` become operands of products with weights of the shape of `like`: normalised, rounded, in panels.
  void enter(const Norm& before, const float* x, const Weight& like) const {
    const Shape shape(like, false, t_.batch);
    const int64_t count = like.columns;
    for (int64_t r = 0; r < t_.batch; ++r) {
      const float* row = x + r * count;
      if (before.present) {
        norm(before, row, count, desk_.row);
        row = desk_.row;
      }
      int8_t* const q = desk_.q + r * count;
      desk_.scale[r] = t_.products.quantize_row(row, Dtype::float32, count, q);
      t_.products.sum_groups(q, count, shape.blocks_per_group * kBlockSide, desk_.sums + r * like.groups);
    }
    const Panels panels(t_.batch, t_.products.few_rows);
    const int64_t steps = shape.blocks * kStepsPerBlock;
    for (int64_t p = 0; p < panels.count; ++p) {
      t_.products.int8.pack(desk_.q + panels.start(p) * count, count, panels.rows(p), count, steps, 0,
                            desk_.panels + panels.start(p) * steps * 4);
    }
  }

  // The rows that entered last, times one strip of a weight: rows of at most 16, `stride` elements apart.
  void multiply(const Projection& p, int64_t strip, float factor, void* out, int64_t stride, Dtype dtype) const {
    const Shape shape(p.weight, false, t_.batch);
    alignas(64) int32_t floors[kBlockSide];
    alignas(64) int32_t acc[kMaxPanelRows * kBlockSide];
    alignas(64) const int32_t none[kBlockSide] = {};
    alignas(64) float column_scale[kBlockSide];
    DecodeSource source;
    const int spread = set_up(t_.products, p.weight, shape, {}, strip, 1, desk_.exponents, floors, source);
    if (!fits_in_32_bits(spread, shape.terms)) t_.fits.store(false, std::memory_order_relaxed);
    for (int64_t i = 0; i < kBlockSide; ++i) column_scale[i] = power_of_two(floors[i]);
    if (p.by_rows) {
      const int64_t first = strip * kBlockSide, count = least(kBlockSide, shape.outputs - first);
      for (int64_t i = 0; i < count; ++i) column_scale[i] *= p.factor[first + i];
    } else if (p.factor != nullptr) {
      factor *= *p.factor;
    }
    const Panels panels(t_.batch, t_.products.few_rows);
    const int64_t steps = shape.blocks * kStepsPerBlock;
    for (int64_t i = 0; i < panels.count; ++i) {
      const int64_t row = panels.start(i), rows = panels.rows(i);
      float scale[kMaxPanelRows];
      for (int64_t r = 0; r < rows; ++r) scale[r] = desk_.scale[row + r] * factor;
      t_.products.few_int8(rows, source, desk_.panels + row * steps * 4, desk_.sums + row * p.weight.groups, acc);
      t_.products.finish_int8(acc, none, rows, kBlockSide, least(kBlockSide, shape.outputs - strip * kBlockSide),
                              scale, column_scale, nullptr,
                              static_cast<char*>(out) + row * stride * dtype_size(dtype), stride, dtype, false);
    }
  }

  // Asks for the first blocks of a strip.
  static void look_ahead(const Weight& w, int64_t strip) {
    const int64_t bytes = blocks_of(w.columns) * kBlockBytes;
    const uint8_t* const first = w.packed + strip * bytes;
    const int64_t end = least(kAhead, (blocks_of(w.rows) - strip) * bytes);
    for (int64_t i = 0; i < end; i += kLine) __builtin_prefetch(first + i, 0, 2);
  }

  // A stage whose items are the strips of a few weights, one after another: `use(which, strip)` for each of them.
  template <size_t N, class Use>
  void strips(const Norm& before, const float* x, const Projection* const (&projections)[N], Use use) {
    int64_t starts[N + 1] = {};
    for (size_t i = 0; i < N; ++i) starts[i + 1] = starts[i] + blocks_of(projections[i]->weight.rows);
    bool entered = false;
    member_.run(starts[N], [&](int64_t first, int64_t last) {
      size_t which = 0;
      while (first >= starts[which + 1]) ++which;
      if (!entered) {
        look_ahead(projections[which]->weight, first - starts[which]);
        enter(before, x, projections[which]->weight);
        entered = true;
      }
      for (int64_t item = first; item < last; ++item) {
        while (item >= starts[which + 1]) ++which;
        use(which, item - starts[which]);
      }
    });
  }

  // A stage that adds to the residual stream.
  void add(const Norm& before, const float* x, const Projection& projection, float scale) {
    const Projection* const one[] = {&projection};
    strips(before, x, one, [&](size_t, int64_t strip) {
      alignas(64) float update[kMaxRows * kBlockSide];
      multiply(projection, strip, 1.0f, update, kBlockSide, Dtype::float32);
      const int64_t first = strip * kBlockSide, count = least(kBlockSide, t_.plan.width - first);
      for (int64_t r = 0; r < t_.batch; ++r) {
        float* const to = t_.x + r * t_.plan.width + first;
        for (int64_t i = 0; i < count; ++i) to[i] += update[r * kBlockSide + i] * scale;
      }
    });
  }

  void attention(const DecodeLayer& layer, const int64_t* addresses) {
    const Projection* const projections[] = {&layer.query, &layer.key, &layer.value};
    const int64_t starts[] = {0, t_.attended(), t_.attended() + t_.keyed()};
    const int64_t stride = t_.all_projected();
    strips(layer.attention_norm, t_.x, projections, [&](size_t which, int64_t strip) {
      multiply(*projections[which], strip, 1.0f, t_.projected + starts[which] + strip * kBlockSide, stride,
               Dtype::float32);
    });
    member_.run(t_.batch * t_.plan.heads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        head(layer, addresses, i / t_.plan.heads, i % t_.plan.heads, i == first);
      }
    });
    add(layer.output_norm, t_.seen, layer.output, layer.residual_scale);
  }

  void head(const DecodeLayer& layer, const int64_t* addresses, int64_t sequence, int64_t number, bool first) const {
    const DecodePlan& plan = t_.plan;
    const DecodeCache& cache = t_.cache;
    const int64_t features = plan.features, shared = plan.heads / plan.key_heads, key_head = number / shared;
    const int64_t start = (sequence * plan.key_heads + key_head) * cache.capacity;
    const float* const projected = t_.projected + sequence * t_.all_projected();
    float* const query = desk_.head;
    float* const key = query + features;
    float* const kept[2] = {query + 2 * features, query + 3 * features};
    if (first || number % shared == 0) {
      // Every thread makes the key and the value that its heads share; who has the first of them stores both.
      turned(layer.key_norm, projected + t_.attended() + key_head * features, key);
      keep(key, kept[0], desk_.kept_scales[0]);
      keep(projected + t_.attended() + t_.keyed() + key_head * features, kept[1], desk_.kept_scales[1]);
    }
    KeptRows rows[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t bytes = features * kept_size(cache.kept);
      char* const stored = reinterpret_cast<char*>(addresses[i]) + start * bytes;
      float* const scales = cache.kept == Kept::int8 ? reinterpret_cast<float*>(addresses[2 + i]) + start : nullptr;
      if (number % shared == 0) {
        std::memcpy(stored + cache.slot * bytes, kept[i], static_cast<size_t>(bytes));
        if (scales != nullptr) scales[cache.slot] = desk_.kept_scales[i];
      }
      const int64_t oldest = cache.slot - cache.past;
      rows[i] = {stored + oldest * bytes, kept[i], scales == nullptr ? nullptr : scales + oldest, desk_.kept_scales[i]};
    }
    turned(layer.query_norm, projected + number * features, query);
    t_.loops.attend(query, rows[0], rows[1], cache.kept, cache.past, features,
                    1.0f / std::sqrt(static_cast<float>(features)), desk_.scores,
                    t_.seen + sequence * t_.attended() + number * features);
  }

  // A key or a value as it is kept, and its scale.
  void keep(const float* x, void* kept, float& scale) const {
    if (t_.cache.kept == Kept::int8) {
      scale = t_.products.quantize_row(x, Dtype::float32, t_.plan.features, static_cast<int8_t*>(kept));
    } else {
      const Dtype dtype = t_.cache.kept == Kept::bfloat16 ? Dtype::bfloat16 : Dtype::float32;
      t_.loops.from_floats(x, t_.plan.features, kept, dtype);
      scale = 1.0f;
    }
  }

  // Queries or keys of a head as attention takes them.
  void turned(const Norm& n, const float* x, float* out) const {
    const int64_t features = t_.plan.features;
    if (n.present) {
      norm(n, x, features, out);
    } else {
      std::memcpy(out, x, static_cast<size_t>(features) * sizeof(float));
    }
    t_.loops.rotate(out, t_.cos, t_.sin, features / 2);
  }

  void feed_forward(const DecodeLayer& layer) {
    const int64_t hidden = t_.plan.hidden;
    const Projection* const one[] = {&layer.up};
    strips(layer.feed_norm, t_.x, one, [&](size_t, int64_t strip) {
      alignas(64) float gate[kMaxRows * kBlockSide], up[kMaxRows * kBlockSide] = {};
      if (layer.gate.present()) multiply(layer.gate, strip, 1.0f, gate, kBlockSide, Dtype::float32);
      multiply(layer.up, strip, 1.0f, up, kBlockSide, Dtype::float32);
      const int64_t first = strip * kBlockSide, count = least(kBlockSide, hidden - first);
      for (int64_t r = 0; r < t_.batch; ++r) {
        float* const row = up + r * kBlockSide;
        t_.loops.activate(t_.plan.activation, gate + r * kBlockSide, row, count);
        std::memcpy(t_.hidden + r * hidden + first, row, static_cast<size_t>(count) * sizeof(float));
      }
    });
    add(layer.hidden_norm, t_.hidden, layer.down, layer.residual_scale);
  }

  void finish() {
    const DecodePlan& plan = t_.plan;
    if (plan.head.present()) {
      const Projection* const one[] = {&plan.head};
      const int64_t size = dtype_size(t_.dtype);
      strips(plan.final_norm, t_.x, one, [&](size_t, int64_t strip) {
        multiply(plan.head, strip, plan.logit_scale, static_cast<char*>(t_.out) + strip * kBlockSide * size,
                 plan.vocabulary, t_.dtype);
      });
      return;
    }
    member_.run(t_.batch, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const float* row = t_.x + r * plan.width;
        if (plan.final_norm.present) {
          norm(plan.final_norm, row, plan.width, desk_.row);
          row = desk_.row;
        }
        t_.loops.from_floats(row, plan.width, static_cast<char*>(t_.out) + r * plan.width * dtype_size(t_.dtype),
                             t_.dtype);
      }
    });
  }

  static constexpr int64_t kMaxRows = kMostSequences;

  Token& t_;
  const Desk& desk_;
  Crew::Member& member_;
};

bool embed(const Token& t, const int64_t* ids) {
  const DecodePlan& plan = t.plan;
  for (int64_t i = 0; i < t.batch; ++i) {
    if (ids[i] < 0 || ids[i] >= plan.vocabulary) return false;
  }
  for (int64_t i = 0; i < t.batch; ++i) {
    float* const row = t.x + i * plan.width;
    const Weight& w = plan.ternary_embedding;
    if (w.packed == nullptr) {
      const char* const from = static_cast<const char*>(plan.float_embedding);
      t.loops.to_floats(from + ids[i] * plan.width * dtype_size(plan.embedding_dtype), plan.embedding_dtype, plan.width,
                        row);
    } else {
      t.products.lookup_row(w.packed + ids[i] / kBlockSide * blocks_of(w.columns) * kBlockBytes, ids[i] % kBlockSide,
                            w.exponent + ids[i] * w.groups, w.columns, w.groups == 1 ? w.columns : w.group_size, row,
                            Dtype::float32);
    }
  }
  return true;
}

}  // namespace

double DecodePlan::work() const {
  double sum = 0.0;
  const auto meet = [&](const Projection& p) {
    sum += static_cast<double>(p.weight.rows) * static_cast<double>(p.weight.columns);
  };
  for (const DecodeLayer& layer : layers) {
    for (const Projection* p :
         {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down}) {
      meet(*p);
    }
  }
  meet(head);
  return sum;
}

bool decode_step(int isa, int threads, const DecodePlan& plan, int64_t batch, const int64_t* ids, double position,
                 const DecodeCache& cache, void* out, Dtype dtype) {
  Token token(isa, plan, cache, batch, out, dtype);
  if (plan.work() * static_cast<double>(batch) < kShortWork) threads = 1;
  const int64_t planes = plan.features / 2;
  const int64_t rows[] = {plan.width, token.all_projected(), token.attended(), plan.hidden};
  Desk none;
  size_t bytes = static_cast<size_t>(threads) * Desk::lay_out(token, nullptr, none) + 2 * Workspace::padded(planes * 4);
  for (const int64_t count : rows) bytes += Workspace::padded(batch * count * 4);

  Workspace& space = workspace();
  space.reserve(bytes);
  float** const places[] = {&token.x, &token.projected, &token.seen, &token.hidden};
  for (int i = 0; i < 4; ++i) *places[i] = space.take<float>(batch * rows[i]);
  token.cos = space.take<float>(planes);
  token.sin = space.take<float>(planes);
  std::vector<Desk> desks(static_cast<size_t>(threads));
  for (Desk& desk : desks) Desk::lay_out(token, &space, desk);

  for (int64_t p = 0; p < planes; ++p) {
    const double angle = position * plan.speeds[static_cast<size_t>(p)];
    token.cos[p] = static_cast<float>(std::cos(angle));
    token.sin[p] = static_cast<float>(std::sin(angle));
  }
  const bool known = embed(token, ids);
  if (known) {
    Crew crew(threads);
    crew.work([&](Crew::Member& member, int worker) {
      Worker(token, desks[static_cast<size_t>(worker)], member).run();
    });
  }
  space.release();
  return known && token.fits.load();
}

}  // namespace arb
