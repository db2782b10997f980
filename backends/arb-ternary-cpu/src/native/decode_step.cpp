// Tokens through all layers of a decoder. The stages, between which the threads wait for each other: embedding;
// queries, keys and values; keys and values into the cache; attention; its output; gate and up; down; and at last the
// head.
//
// What enters a product is normalised and rounded by every thread for itself where rows are few, which takes less time
// than to wait for one that does it; of many rows it is a stage of its own. A product of few rows decodes the weight
// for each of them; one of many stores a decoded stretch of it. Either way a strip of a weight is read once a step, and
// the sums are exact: a token's numbers depend on no other token, nor on how many there are.
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
    begin();
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

  // The residual stream and the angles of each token.
  void begin() {
    const DecodePlan& plan = t_.plan;
    const int64_t planes = plan.features / 2;
    member_.run(t_.rows.count, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        embed(t_.rows.ids[r], t_.x + r * plan.width);
        for (int64_t p = 0; p < planes; ++p) {
          const double angle = t_.rows.positions[r] * plan.speeds[static_cast<size_t>(p)];
          t_.cos[r * planes + p] = static_cast<float>(std::cos(angle));
          t_.sin[r * planes + p] = static_cast<float>(std::sin(angle));
        }
      }
    });
  }

  void embed(int64_t id, float* row) const {
    const DecodePlan& plan = t_.plan;
    const Weight& w = plan.ternary_embedding;
    if (w.packed == nullptr) {
      const char* const from = static_cast<const char*>(plan.float_embedding);
      const Dtype own = plan.embedding_dtype;
      t_.loops.to_floats(from + id * plan.width * dtype_size(own), own, plan.width, row);
    } else {
      t_.products.lookup_row(w.packed + id / kBlockSide * blocks_of(w.columns) * kBlockBytes, id % kBlockSide,
                             w.exponent + id * w.groups, w.columns, w.groups == 1 ? w.columns : w.group_size, row,
                             Dtype::float32);
    }
  }

  bool many() const { return m_ > t_.few(); }
  // Strips that a product takes at a time.
  int64_t group_strips() const { return t_.group_strips(m_); }
  // Blocks of a weight that are decoded at a time.
  int64_t chunk_of_blocks(const Shape& shape) const {
    return least(shape.blocks, kChunkBytes / (kBlockSide * kBlockSide * group_strips()));
  }
  PackedRows packed_rows(const Panels& panels) const { return {t_.shared.panels, panels, t_.many_loops().unit, 1}; }

  // Row `r` of those that enter, normalised and rounded.
  void round_row(const Norm& before, const float* x, int64_t count, int64_t r, const Operand& to) const {
    const float* row = x + (which_ == nullptr ? r : which_[r]) * count;
    if (before.present) {
      norm(before, row, count, desk_.row);
      row = desk_.row;
    }
    to.scale[r] = t_.products.quantize_row(row, Dtype::float32, count, to.q + r * count);
  }

  // The rows `x` become operands of products with weights of the shape of `like`: normalised, rounded, in panels.
  void enter_few(const Norm& before, const float* x, const Weight& like) const {
    const Shape shape(like, false, m_);
    const int64_t count = like.columns;
    const Operand& own = desk_.own;
    for (int64_t r = 0; r < m_; ++r) {
      round_row(before, x, count, r, own);
      t_.products.sum_groups(own.q + r * count, count, shape.blocks_per_group * kBlockSide, own.sums + r * like.groups);
    }
    const Panels panels(m_, t_.products.few_rows);
    const int64_t steps = shape.blocks * kStepsPerBlock;
    for (int64_t p = 0; p < panels.count; ++p) {
      const int64_t row = panels.start(p);
      pack_unflipped(own.q + row * count, count, panels.rows(p), steps, own.panels + row * steps * 4);
    }
  }

  void enter_many(const Norm& before, const float* x, const Weight& like) {
    const Shape shape(like, false, m_);
    const Int8Loops& loops = t_.many_loops();
    const int64_t count = like.columns, chunk = chunk_of_blocks(shape);
    member_.run(m_, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) round_row(before, x, count, r, t_.shared);
    });
    const Panels panels(m_, loops.rows, loops.unit);
    const PackedRows packed = packed_rows(panels);
    member_.run(panels.count, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) {
        for (int64_t block = 0; block < shape.blocks; block += chunk) {
          const int64_t some = least(chunk, shape.blocks - block), term = block * kBlockSide;
          loops.pack(t_.shared.q + panels.start(p) * count + term, count, panels.rows(p),
                     least(some * kBlockSide, count - term), some * kStepsPerBlock, loops.flip,
                     reinterpret_cast<uint8_t*>(packed.at(p, block, some)));
        }
      }
    });
  }

  void pack_unflipped(const int8_t* q, int64_t count, int64_t rows, int64_t steps, char* panel) const {
    t_.products.int8.pack(q, count, rows, count, steps, 0, reinterpret_cast<uint8_t*>(panel));
  }

  // The rows that entered last, times one group of strips of a weight: rows of at most 16 a strip, `stride` elements
  // apart.
  void multiply(const Projection& p, int64_t strip, float factor, void* out, int64_t stride, Dtype dtype) const {
    const Shape shape(p.weight, false, m_);
    alignas(64) int32_t floors[kMaxLanes];
    alignas(64) float column_scale[kMaxLanes];
    DecodeSource source;
    const int spread = set_up(t_.products, p.weight, shape, {}, strip, group_strips(), desk_.exponents, floors, source);
    if (!fits_in_32_bits(spread, shape.terms)) t_.fits.store(false, std::memory_order_relaxed);
    const int64_t lanes = source.strips * kBlockSide, first = strip * kBlockSide;
    const int64_t count = least(lanes, shape.outputs - first);
    for (int64_t i = 0; i < lanes; ++i) column_scale[i] = power_of_two(floors[i]);
    if (p.by_rows) {
      for (int64_t i = 0; i < count; ++i) column_scale[i] *= p.factor[first + i];
    } else if (p.factor != nullptr) {
      factor *= *p.factor;
    }
    alignas(64) int32_t offset[kMaxLanes] = {};
    const auto finish_rows = [&](int64_t row, int64_t rows, const int32_t* acc, const float* row_scales) {
      float scale[kMaxPanelRows];
      for (int64_t r = 0; r < rows; ++r) scale[r] = row_scales[row + r] * factor;
      t_.products.finish_int8(acc, offset, rows, lanes, count, scale, column_scale, nullptr,
                              static_cast<char*>(out) + row * stride * dtype_size(dtype), stride, dtype, false);
    };
    if (!many()) {
      const Panels panels(m_, t_.products.few_rows);
      for (int64_t i = 0; i < panels.count; ++i) {
        const int64_t row = panels.start(i), rows = panels.rows(i);
        t_.products.few_int8(rows, source, panel_of(row, shape), desk_.own.sums + row * p.weight.groups, desk_.acc);
        finish_rows(row, rows, desk_.acc, desk_.own.scale);
      }
    } else if (spread < kBandBits) {
      multiply_decoded(source, shape, spread, lanes, offset, finish_rows);
    } else {
      multiply_spread(p.weight, shape, strip, floors, finish_rows);
    }
  }

  const uint8_t* panel_of(int64_t row, const Shape& shape) const {
    return reinterpret_cast<const uint8_t*>(desk_.own.panels + row * shape.blocks * kStepsPerBlock * 4);
  }

  // Many rows: a stretch of the weight is decoded, and all panels pass it.
  template <class Finish>
  void multiply_decoded(const DecodeSource& source, const Shape& shape, int spread, int64_t lanes, int32_t* offset,
                        Finish finish_rows) const {
    const Int8Loops& loops = t_.many_loops();
    const InUse in_use(loops.unit);
    const Panels panels(m_, loops.rows, loops.unit);
    const PackedRows packed = packed_rows(panels);
    const int64_t chunk = chunk_of_blocks(shape);
    for (int64_t block = 0; block < shape.blocks; block += chunk) {
      const int64_t some = least(chunk, shape.blocks - block);
      loops.decode(chunk_of(source, block, some), false, 0, desk_.weights, offset);
      for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t rows = panels.rows(p);
        loops.tile(rows, some * kStepsPerBlock, reinterpret_cast<const uint8_t*>(packed.at(p, block, some)), 4 * rows,
                   desk_.weights, source.strips, spread, block == 0, desk_.acc + panels.start(p) * lanes);
      }
    }
    for (int64_t p = 0; p < panels.count; ++p) {
      finish_rows(panels.start(p), panels.rows(p), desk_.acc + panels.start(p) * lanes, t_.shared.scale);
    }
  }

  // Many rows and exponents further apart than a decoded weight can say: one row after another.
  template <class Finish>
  void multiply_spread(const Weight& w, const Shape& shape, int64_t strip, int32_t* floors, Finish finish_rows) const {
    const int64_t steps = shape.blocks * kStepsPerBlock, strips = least(group_strips(), shape.strips - strip);
    for (int64_t r = 0; r < m_; ++r) {
      const int8_t* const q = t_.shared.q + r * shape.terms;
      pack_unflipped(q, shape.terms, 1, steps, desk_.own.panels);
      t_.products.sum_groups(q, shape.terms, shape.blocks_per_group * kBlockSide, desk_.own.sums);
      alignas(64) int32_t acc[kMaxLanes];
      for (int64_t s = 0; s < strips; ++s) {
        DecodeSource source;
        set_up(t_.products, w, shape, {}, strip + s, 1, desk_.exponents, floors, source);
        t_.products.few_int8(1, source, panel_of(0, shape), desk_.own.sums, acc + s * kBlockSide);
      }
      finish_rows(r, 1, acc, t_.shared.scale);
    }
  }

  // Asks for the first blocks of a strip.
  static void look_ahead(const Weight& w, int64_t strip) {
    const int64_t bytes = blocks_of(w.columns) * kBlockBytes;
    const uint8_t* const first = w.packed + strip * bytes;
    const int64_t end = least(kAhead, (blocks_of(w.rows) - strip) * bytes);
    for (int64_t i = 0; i < end; i += kLine) __builtin_prefetch(first + i, 0, 2);
  }

  // A stage whose items are the groups of strips of a few weights, one after another: `use(which, first strip)` for
  // each. The rows of `x` that enter are all, or those of which results are wanted.
  template <size_t N, class Use>
  void strips(const Norm& before, const float* x, const Projection* const (&projections)[N], Use use,
              bool only_wanted = false) {
    m_ = only_wanted ? t_.rows.wanted_count : t_.rows.count;
    which_ = only_wanted ? t_.rows.wanted : nullptr;
    const int64_t each = group_strips();
    int64_t starts[N + 1] = {};
    for (size_t i = 0; i < N; ++i) starts[i + 1] = starts[i] + ceil_of(blocks_of(projections[i]->weight.rows), each);
    bool entered = many();
    if (entered) enter_many(before, x, projections[0]->weight);
    member_.run(starts[N], [&](int64_t first, int64_t last) {
      size_t which = 0;
      while (first >= starts[which + 1]) ++which;
      if (!entered) {
        look_ahead(projections[which]->weight, (first - starts[which]) * each);
        enter_few(before, x, projections[which]->weight);
        entered = true;
      }
      for (int64_t item = first; item < last; ++item) {
        while (item >= starts[which + 1]) ++which;
        use(which, (item - starts[which]) * each);
      }
    });
  }

  // A stage that adds to the residual stream.
  void add(const Norm& before, const float* x, const Projection& projection, float scale) {
    const Projection* const one[] = {&projection};
    strips(before, x, one, [&](size_t, int64_t strip) {
      const int64_t lanes = group_strips() * kBlockSide;
      multiply(projection, strip, 1.0f, desk_.update, lanes, Dtype::float32);
      const int64_t first = strip * kBlockSide, count = least(lanes, t_.plan.width - first);
      for (int64_t r = 0; r < m_; ++r) {
        float* const to = t_.x + r * t_.plan.width + first;
        for (int64_t i = 0; i < count; ++i) to[i] += desk_.update[r * lanes + i] * scale;
      }
    });
  }

  void attention(const DecodeLayer& layer, const int64_t* addresses) {
    const Projection* const projections[] = {&layer.query, &layer.key, &layer.value};
    const int64_t starts[] = {0, t_.attended(), t_.attended() + t_.keyed()};
    const int64_t stride = t_.all_projected(), heads = t_.plan.heads, key_heads = t_.plan.key_heads;
    strips(layer.attention_norm, t_.x, projections, [&](size_t which, int64_t strip) {
      multiply(*projections[which], strip, 1.0f, t_.projected + starts[which] + strip * kBlockSide, stride,
               Dtype::float32);
    });
    member_.run(t_.rows.count * key_heads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) store(layer, addresses, i / key_heads, i % key_heads);
    });
    member_.run(t_.rows.count * heads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) head(layer, addresses, i / heads, i % heads);
    });
    add(layer.output_norm, t_.seen, layer.output, layer.residual_scale);
  }

  // The keys (0) or values (1) of a head of a token's sequence.
  KeptRows kept_rows(const int64_t* addresses, int which, int64_t token, int64_t key_head) const {
    const DecodeCache& cache = t_.cache;
    const int64_t features = t_.plan.features, first = key_head * cache.size;
    const char* const rows = reinterpret_cast<const char*>(addresses[which]) + first * features * kept_size(cache.kept);
    const float* scales = nullptr;
    if (cache.kept == Kept::int8) scales = reinterpret_cast<const float*>(addresses[2 + which]) + first;
    return {rows, scales, cache.tables + t_.rows.sequences[token] * cache.table_width, cache.size,
            t_.plan.key_heads * cache.size, features, cache.kept};
  }

  // A token's key and value of a head into their slots.
  void store(const DecodeLayer& layer, const int64_t* addresses, int64_t token, int64_t key_head) const {
    const float* const keys = t_.projected + token * t_.all_projected() + t_.attended();
    const float* const projected = keys + key_head * t_.plan.features;
    float* const key = desk_.head;
    turned(layer.key_norm, projected, token, key);
    const float* const kept[2] = {key, projected + t_.keyed()};
    for (int i = 0; i < 2; ++i) {
      const KeptRows rows = kept_rows(addresses, i, token, key_head);
      const int64_t slot = t_.rows.slots[token];
      float scale = 1.0f;
      keep(kept[i], const_cast<void*>(rows.at(slot)), scale);
      if (rows.scales != nullptr) *const_cast<float*>(rows.scales_at(slot)) = scale;
    }
  }

  void head(const DecodeLayer& layer, const int64_t* addresses, int64_t token, int64_t number) const {
    const int64_t features = t_.plan.features, key_head = number / (t_.plan.heads / t_.plan.key_heads);
    float* const query = desk_.head;
    turned(layer.query_norm, t_.projected + token * t_.all_projected() + number * features, token, query);
    t_.loops.attend(query, kept_rows(addresses, 0, token, key_head), kept_rows(addresses, 1, token, key_head),
                    t_.rows.slots[token], t_.rows.pasts[token], 1.0f / std::sqrt(static_cast<float>(features)),
                    desk_.scores, query + features, t_.seen + token * t_.attended() + number * features);
  }

  // A key or a value as it is kept, and its scale.
  void keep(const float* x, void* kept, float& scale) const {
    if (t_.cache.kept == Kept::int8) {
      scale = t_.products.quantize_row(x, Dtype::float32, t_.plan.features, static_cast<int8_t*>(kept));
    } else {
      const Dtype dtype = t_.cache.kept == Kept::bfloat16 ? Dtype::bfloat16 : Dtype::float32;
      t_.loops.from_floats(x, t_.plan.features, kept, dtype);
    }
  }

  // Queries or keys of a head as attention takes them.
  void turned(const Norm& n, const float* x, int64_t token, float* out) const {
    const int64_t features = t_.plan.features, angles = token * (features / 2);
    if (n.present) {
      norm(n, x, features, out);
    } else {
      std::memcpy(out, x, static_cast<size_t>(features) * sizeof(float));
    }
    t_.loops.rotate(out, t_.cos + angles, t_.sin + angles, features / 2);
  }

  void feed_forward(const DecodeLayer& layer) {
    const int64_t hidden = t_.plan.hidden;
    const Projection* const one[] = {&layer.up};
    strips(layer.feed_norm, t_.x, one, [&](size_t, int64_t strip) {
      const int64_t lanes = group_strips() * kBlockSide;
      if (layer.gate.present()) multiply(layer.gate, strip, 1.0f, desk_.gate, lanes, Dtype::float32);
      multiply(layer.up, strip, 1.0f, desk_.update, lanes, Dtype::float32);
      const int64_t first = strip * kBlockSide, count = least(lanes, hidden - first);
      for (int64_t r = 0; r < m_; ++r) {
        float* const row = desk_.update + r * lanes;
        t_.loops.activate(t_.plan.activation, desk_.gate + r * lanes, row, count);
        std::memcpy(t_.hidden + r * hidden + first, row, static_cast<size_t>(count) * sizeof(float));
      }
    });
    add(layer.hidden_norm, t_.hidden, layer.down, layer.residual_scale);
  }

  void finish() {
    const DecodePlan& plan = t_.plan;
    const int64_t wanted = t_.rows.wanted_count, size = dtype_size(t_.dtype);
    if (wanted == 0) return;
    if (plan.head.present()) {
      const Projection* const one[] = {&plan.head};
      const auto use = [&](size_t, int64_t strip) {
        multiply(plan.head, strip, plan.logit_scale, static_cast<char*>(t_.out) + strip * kBlockSide * size,
                 plan.vocabulary, t_.dtype);
      };
      strips(plan.final_norm, t_.x, one, use, true);
      return;
    }
    member_.run(wanted, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const float* row = t_.x + t_.rows.wanted[i] * plan.width;
        if (plan.final_norm.present) {
          norm(plan.final_norm, row, plan.width, desk_.row);
          row = desk_.row;
        }
        t_.loops.from_floats(row, plan.width, static_cast<char*>(t_.out) + i * plan.width * size, t_.dtype);
      }
    });
  }

  Token& t_;
  const Desk& desk_;
  Crew::Member& member_;
  // The rows that entered last: how many, and which of all; null for all.
  int64_t m_ = 0;
  const int64_t* which_ = nullptr;
};

// Whether all that the tokens name exists.
bool exists(const DecodePlan& plan, const DecodeRows& rows, const DecodeCache& cache) {
  const auto below = [](int64_t index, int64_t count) { return 0 <= index && index < count; };
  for (int64_t r = 0; r < rows.count; ++r) {
    if (!below(rows.ids[r], plan.vocabulary) || !below(rows.sequences[r], cache.sequences)) return false;
    const int64_t slot = rows.slots[r], oldest = slot - rows.pasts[r];
    if (rows.pasts[r] < 0 || oldest < 0 || slot / cache.size >= cache.table_width) return false;
    const int64_t* const table = cache.tables + rows.sequences[r] * cache.table_width;
    for (int64_t i = oldest / cache.size; i <= slot / cache.size; ++i) {
      if (!below(table[i], cache.blocks)) return false;
    }
  }
  for (int64_t i = 0; i < rows.wanted_count; ++i) {
    if (!below(rows.wanted[i], rows.count)) return false;
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

bool decode_rows(int isa, int threads, const DecodePlan& plan, const DecodeRows& rows, const DecodeCache& cache,
                 void* out, Dtype dtype) {
  if (!exists(plan, rows, cache)) return false;
  Token token(isa, plan, rows, cache, out, dtype);
  const int64_t count = rows.count, planes = plan.features / 2;
  if (plan.work() * static_cast<double>(count) < kShortWork) threads = 1;
  const int64_t widths[] = {plan.width, token.all_projected(), token.attended(), plan.hidden, planes, planes};
  float** const places[] = {&token.x, &token.projected, &token.seen, &token.hidden, &token.cos, &token.sin};
  const bool many = count > token.few();
  const int64_t shared_rows = many ? count : 0, shared_panels = many ? token.panel_bytes(count) : 0;
  Desk none;
  size_t bytes = static_cast<size_t>(threads) * Desk::lay_out(token, nullptr, none);
  for (const int64_t width : widths) bytes += Workspace::padded(count * width * 4);
  bytes += Workspace::padded(shared_rows * token.longest) + Workspace::padded(shared_rows * 4) +
           Workspace::padded(shared_panels);

  Workspace& space = workspace();
  space.reserve(bytes);
  for (int i = 0; i < 6; ++i) *places[i] = space.take<float>(count * widths[i]);
  token.shared.q = space.take<int8_t>(shared_rows * token.longest);
  token.shared.scale = space.take<float>(shared_rows);
  token.shared.panels = space.take<char>(shared_panels);
  std::vector<Desk> desks(static_cast<size_t>(threads));
  for (Desk& desk : desks) Desk::lay_out(token, &space, desk);

  Crew crew(threads);
  crew.work([&](Crew::Member& member, int worker) {
    Worker(token, desks[static_cast<size_t>(worker)], member).run();
  });
  space.release();
  return token.fits.load();
}

bool decode_step(int isa, int threads, const DecodePlan& plan, int64_t batch, const int64_t* ids, double position,
                 const DecodeStepCache& cache, void* out, Dtype dtype) {
  const size_t count = static_cast<size_t>(batch);
  std::vector<int64_t> each(count);
  for (size_t i = 0; i < count; ++i) each[i] = static_cast<int64_t>(i);
  const std::vector<int64_t> slots(count, cache.slot), pasts(count, cache.past);
  const std::vector<double> positions(count, position);
  const DecodeRows rows{batch,        ids,   each.data(), slots.data(), pasts.data(), positions.data(),
                        batch, each.data()};
  const DecodeCache blocks{cache.addresses, cache.kept, batch, cache.capacity, each.data(), batch, 1};
  return decode_rows(isa, threads, plan, rows, blocks, out, dtype);
}

}  // namespace arb
