// What the threads share that compute the tokens of a step, and where each of them works.
#pragma once

#include <atomic>
#include <type_traits>

#include "decode.h"
#include "product_plan.h"
#include "workspace.h"

namespace arb {

// Rows of a head that a thread keeps: a query or a key, and spare sums of attention.
constexpr int64_t kHeadRows = 2;
// Tokens, as a multiple of those that few_int8 takes, up to which it is faster to decode a weight for each than to
// store it; for a matrix unit, one time that many.
constexpr int64_t kFewTokenPanels = 2;

// Rows that enter products, as they enter: panels of int8, and the scale of each row.
struct Operand {
  int8_t* q;       // [row][terms]
  float* scale;    // [row]
  int32_t* sums;   // [row][group]; of few rows only
  char* panels;
};

// What all threads share.
struct Token {
  const ProductKernels& products;
  const DecodeKernels& loops;
  const DecodePlan& plan;
  const DecodeRows& rows;
  const DecodeCache& cache;
  void* out;
  Dtype dtype;
  int64_t longest = 0;  // of the rows that enter products, whole blocks
  int64_t groups = 0;   // most exponents of a row of a weight
  int64_t most_past = 0;
  // Rows: [count][width], queries then keys then values, [count][H * C], [count][F], [count][C / 2].
  float *x = nullptr, *projected = nullptr, *seen = nullptr, *hidden = nullptr, *cos = nullptr, *sin = nullptr;
  Operand shared = {};
  std::atomic<bool> fits{true};

  int64_t attended() const { return plan.heads * plan.features; }
  int64_t keyed() const { return plan.key_heads * plan.features; }
  int64_t all_projected() const { return attended() + 2 * keyed(); }

  // The loops of products of many rows, and from how many on they are taken.
  const Int8Loops& many_loops() const { return products.int8_unit.rows != 0 ? products.int8_unit : products.int8; }
  int64_t few() const { return products.few_rows * (products.int8_unit.rows != 0 ? 1 : kFewTokenPanels); }
  // Rows that a thread has to have room for by itself.
  int64_t own_rows() const { return least(rows.count, few()); }
  int64_t group_strips(int64_t m) const { return m > few() ? products.strips : 1; }

  // Bytes of the panels of `m` rows.
  int64_t panel_bytes(int64_t m) const {
    if (m <= few()) return m * longest;
    const MatrixUnit& unit = many_loops().unit;
    return round_up(m, unit.rows) * round_up(longest / kBlockSide, unit.blocks) * kBlockSide;
  }

  Token(int isa, const DecodePlan& decoder, const DecodeRows& tokens, const DecodeCache& keys, void* result,
        Dtype result_dtype)
      : products(product_kernels(isa)),
        loops(decode_kernels(isa)),
        plan(decoder),
        rows(tokens),
        cache(keys),
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
    for (int64_t r = 0; r < rows.count; ++r) most_past = most(most_past, rows.pasts[r]);
  }
};

// Where one thread works.
struct Desk {
  float *row, *gain, *head, *scores, *update, *gate;
  Operand own;
  uint8_t* exponents;
  int8_t* weights;
  int32_t* acc;

  // Takes the stretches from `space`, or, where that is null, adds up what they use.
  static size_t lay_out(const Token& t, Workspace* space, Desk& desk) {
    size_t used = 0;
    const auto take = [&](auto*& place, int64_t count) {
      using T = std::remove_reference_t<decltype(*place)>;
      used += Workspace::padded(count * static_cast<int64_t>(sizeof(T)));
      if (space != nullptr) place = space->take<T>(count);
    };
    const int64_t own = t.own_rows(), lanes = t.group_strips(t.rows.count) * kBlockSide;
    take(desk.row, t.longest);
    take(desk.gain, most(t.longest, t.plan.features));
    take(desk.head, kHeadRows * t.plan.features);
    take(desk.scores, t.most_past + 1 + kBlockSide);
    take(desk.update, t.rows.count * lanes);
    take(desk.gate, t.rows.count * lanes);
    take(desk.own.q, own * t.longest);
    take(desk.own.scale, own);
    take(desk.own.sums, own * t.groups);
    take(desk.own.panels, own * t.longest);
    take(desk.exponents, kMaxStrips * exponent_bytes(t.groups));
    const bool many = t.rows.count > t.few();
    take(desk.weights, many ? kChunkBytes + kMaxLanes * kBlockSide * t.many_loops().unit.blocks : 0);
    take(desk.acc, round_up(t.rows.count, kMaxPanelRows) * kMaxLanes);
    return used;
  }
};

}  // namespace arb
