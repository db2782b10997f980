// What the threads share that compute one token, and where each of them works.
#pragma once

#include <atomic>
#include <type_traits>

#include "decode.h"
#include "product_plan.h"
#include "workspace.h"

namespace arb {

// Rows of a head that a thread keeps: a query, its key, and the key and the value as they are kept.
constexpr int64_t kHeadRows = 4;

// What all threads share.
struct Token {
  const ProductKernels& products;
  const DecodeKernels& loops;
  const DecodePlan& plan;
  const DecodeCache& cache;
  int64_t batch;
  void* out;
  Dtype dtype;
  int64_t longest = 0;  // of the rows that enter products, whole blocks
  int64_t groups = 0;   // most exponents of a row of a weight
  // Rows: [batch][width], queries then keys then values, [batch][H * C], [batch][F].
  float *x = nullptr, *projected = nullptr, *seen = nullptr, *hidden = nullptr;
  float *cos = nullptr, *sin = nullptr;
  std::atomic<bool> fits{true};

  int64_t attended() const { return plan.heads * plan.features; }
  int64_t keyed() const { return plan.key_heads * plan.features; }
  int64_t all_projected() const { return attended() + 2 * keyed(); }

  Token(int isa, const DecodePlan& decoder, const DecodeCache& keys, int64_t rows, void* result, Dtype result_dtype)
      : products(product_kernels(isa)),
        loops(decode_kernels(isa)),
        plan(decoder),
        cache(keys),
        batch(rows),
        out(result),
        dtype(result_dtype) {
    const auto meet = [&](const Projection& p) {
      if (!p.present()) return;
      longest = most(longest, blocks_of(p.weight.columns) * kBlockSide);
      groups = most(groups, p.weight.groups);
    };
    for (const DecodeLayer& layer : plan.layers) {
      for (const Projection* p : {&layer.query, &layer.output, &layer.up, &layer.down}) meet(*p);
    }
    meet(plan.head);
    longest = most(longest, blocks_of(plan.width) * kBlockSide);
  }
};

// Where one thread works.
struct Desk {
  float *row, *gain, *scale, *head, *kept_scales, *scores;
  int8_t* q;
  uint8_t *panels, *exponents;
  int32_t* sums;

  // Takes the stretches from `space`, or, where that is null, adds up what they use.
  static size_t lay_out(const Token& t, Workspace* space, Desk& desk) {
    size_t used = 0;
    const auto take = [&](auto*& place, int64_t count) {
      using T = std::remove_reference_t<decltype(*place)>;
      used += Workspace::padded(count * static_cast<int64_t>(sizeof(T)));
      if (space != nullptr) place = space->take<T>(count);
    };
    take(desk.row, t.longest);
    take(desk.gain, most(t.longest, t.plan.features));
    take(desk.scale, t.batch);
    take(desk.head, kHeadRows * t.plan.features);
    take(desk.kept_scales, 2);
    take(desk.scores, t.cache.past + 1 + kBlockSide);
    take(desk.q, t.batch * t.longest);
    take(desk.panels, t.batch * t.longest);
    take(desk.exponents, exponent_bytes(t.groups));
    take(desk.sums, t.batch * t.groups);
    return used;
  }
};

}  // namespace arb
