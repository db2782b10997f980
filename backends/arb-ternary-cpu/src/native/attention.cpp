#include "attention.h"

#include <cmath>
#include <cstring>

#include "threads.h"
#include "workspace.h"

namespace arb {

namespace {

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t multiple(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

const void* at(const void* x, Dtype dtype, int64_t index) {
  return static_cast<const char*>(x) + index * dtype_size(dtype);
}
void* at(void* x, Dtype dtype, int64_t index) { return static_cast<char*>(x) + index * dtype_size(dtype); }

uint32_t* words_of(float* x) { return reinterpret_cast<uint32_t*>(x); }

// Queries of a tile, whose scores are computed together. Sums over the queries of a block pass through memory once; a
// block is a tall tile or, where words are pairs, two tiles.
constexpr int64_t kTile = 32, kBlock = 64, kTallFrom = 512;
// Words beyond a row of keys, so that rows below one another fall into different sets of a cache.
constexpr int64_t kGap = 16;

struct Sizes {
  int64_t terms, length, keys, features, padded, words, tile, block;
  int64_t row, short_row;  // words of a row of all keys, one key or `terms` keys to a word

  Sizes(const AttentionKernels& kernels, const Attended& of)
      : terms(kernels.terms),
        length(of.length),
        keys(multiple(of.length, kTile)),
        features(of.features),
        padded(multiple(of.features, 16 * kernels.terms)),
        words(padded / kernels.terms),
        tile(terms == 1 && length >= kTallFrom ? kBlock : kTile),
        block(terms == 1 ? tile : kBlock),
        row(keys + kGap),
        short_row(keys / kernels.terms + kGap) {}
};

// The working memory of a thread, or its size in bytes where there is no memory.
class Room {
 public:
  explicit Room(char* memory) : memory_(memory) {}
  float* floats(int64_t count) { return reinterpret_cast<float*>(take(4 * count)); }
  Words words(int64_t rows, int64_t stride) { return {reinterpret_cast<uint32_t*>(take(4 * rows * stride)), stride}; }
  int64_t used() const { return used_; }

 private:
  char* take(int64_t bytes) {
    char* const found = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += static_cast<int64_t>(Workspace::padded(bytes));
    return found;
  }
  char* memory_;
  int64_t used_ = 0;
};

// Keys, values and a tile of queries; `across` are transposed, `along` has words along the keys.
struct Forward {
  Words keys, keys_across, values, values_along, queries;
  float* scores;
  Words p;
  float *seen, *most, *sums, *spare;

  Forward(Room& room, const Sizes& n)
      : keys(room.words(n.keys, n.words)),
        keys_across(room.words(n.words, n.row)),
        values(room.words(n.keys, n.words)),
        values_along(n.terms == 1 ? values : room.words(n.keys / n.terms, n.padded)),
        queries(room.words(n.tile, n.words)),
        scores(room.floats(n.tile * n.row)),
        p(n.terms == 1 ? Words{words_of(scores), n.row} : room.words(n.tile, n.short_row)),
        seen(room.floats(n.tile * n.padded)),
        most(room.floats(n.tile)),
        sums(room.floats(n.tile)),
        spare(room.floats(n.padded + kRowSlack)) {}
};

struct Backward {
  Words keys, keys_across, keys_along, values, values_across, queries, queries_across, given, given_across, pairs;
  float *scores, *slopes;
  Words p, by_key, by_row;
  float *grad_queries, *grad_keys, *grad_values, *key_factors, *query_factors, *dots, *spare, *work;

  Backward(Room& room, const Sizes& n)
      : keys(room.words(n.keys, n.words)),
        keys_across(room.words(n.words, n.row)),
        keys_along(n.terms == 1 ? keys : room.words(n.keys / n.terms, n.padded)),
        values(room.words(n.keys, n.words)),
        values_across(room.words(n.words, n.row)),
        queries(room.words(n.tile, n.words)),
        queries_across(room.words(n.padded, n.block / n.terms)),
        given(room.words(n.tile, n.words)),
        given_across(room.words(n.padded, n.block / n.terms)),
        pairs(room.words(n.tile / n.terms, n.padded)),
        scores(room.floats(n.tile * n.row)),
        slopes(room.floats(n.tile * n.row)),
        p(n.terms == 1 ? Words{words_of(scores), n.row} : room.words(n.block / n.terms, n.row)),
        by_key(n.terms == 1 ? Words{words_of(slopes), n.row} : room.words(n.tile, n.short_row)),
        by_row(n.terms == 1 ? by_key : room.words(n.block / n.terms, n.row)),
        grad_queries(room.floats(n.tile * n.padded)),
        grad_keys(room.floats(n.padded * n.row)),
        grad_values(room.floats(n.padded * n.row)),
        key_factors(room.floats(n.keys)),
        query_factors(room.floats(n.tile)),
        dots(room.floats(n.tile)),
        spare(room.floats(n.padded + kRowSlack)),
        work(room.floats(n.padded + kRowSlack)) {}
};

// Some heads of the rows: of queries, keys or values, or of gradients of such.
struct Heads {
  int64_t heads;
  float eps = -1.0f;
  bool turns = false;
  Gain gain = {};

  bool plain() const { return !turns && eps < 0.0f && gain.values == nullptr; }
};

struct Task {
  const BlockCall& call;
  const AttentionKernels& kernels;
  const Attended& of;
  const Sizes& n;
  int64_t sequence;

  int64_t place(const Heads& x, int64_t head, int64_t position) const {
    return ((sequence * n.length + position) * x.heads + head) * n.features;
  }
  int64_t stride(const Heads& x) const { return x.heads * n.features; }
  Rotation rotation(const Heads& x, int64_t position) const {
    const int64_t planes = n.features / 2;
    if (!x.turns || of.cos == nullptr) return {};
    return {of.cos + position * planes, of.sin + position * planes, planes};
  }

  // Rows of an operand from elements of a head, normalised and turned; zeros beyond the last position and feature.
  void fill(const void* from, const Heads& x, int64_t head, int64_t first, int64_t rows, Words to, float* factors,
            float* spare) const {
    const bool direct = of.dtype == (n.terms == 2 ? Dtype::bfloat16 : Dtype::float32);
    const int64_t there = least(rows, n.length - first), own = place(x, head, first), row_stride = stride(x);
    const auto row_bytes = static_cast<size_t>(4 * n.words);
    const size_t used = static_cast<size_t>(n.features) * 4 / static_cast<size_t>(n.terms);
    const auto row = [&](int64_t i) { return reinterpret_cast<char*>(to.first + i * to.stride); };
    const auto turn = [&](int64_t i, int64_t count, void* turned) {
      call.block.turn(count, at(from, of.dtype, own + i * row_stride), row_stride, of.dtype, n.features / 2,
                      rotation(x, first + i), x.eps, x.gain.values, turned, n.terms * to.stride,
                      factors == nullptr ? nullptr : factors + i);
    };
    if (direct && !x.plain()) turn(0, there, to.first);
    for (int64_t i = 0; i < there; ++i) {
      const void* const source = at(from, of.dtype, own + i * row_stride);
      if (direct && x.plain()) {
        std::memcpy(row(i), source, used);
      } else if (!direct) {
        if (!x.plain()) turn(i, 1, spare);
        call.block.widen(x.plain() ? source : spare, of.dtype, n.features, reinterpret_cast<float*>(row(i)));
      }
      std::memset(row(i) + used, 0, row_bytes - used);
    }
    for (int64_t i = there; i < rows; ++i) std::memset(row(i), 0, row_bytes);
  }

  // Words along the rows of an operand, which are the operand itself where a word is one element.
  void along(int64_t rows, Words from, Words to) const {
    if (n.terms > 1) kernels.interleave(rows, n.padded, from, to);
  }

  // A tile's operand with words along its rows, transposed.
  void across(Words from, Words pairs, Words to) const {
    along(n.tile, from, pairs);
    kernels.transpose(n.tile / n.terms, n.padded, n.terms > 1 ? pairs : from, to);
  }

  // The gradients of rows, times `by`, before they were turned and normalised.
  void give_back(int64_t rows, const float* grad, float by, const void* x, const Heads& heads, int64_t head,
                 int64_t first, const float* factors, Backward& b, void* out) const {
    const int64_t own = place(heads, head, first);
    call.block.turn_back(rows, grad, n.padded, by, at(x, of.dtype, own), stride(heads), of.dtype, n.features / 2,
                         rotation(heads, first), heads.eps >= 0.0f ? factors : nullptr, heads.gain, b.work,
                         at(out, of.dtype, own));
  }
};

float scale_of(const Attended& of) { return 1.0f / std::sqrt(static_cast<float>(of.features)); }

void forward_task(const Task& task, int64_t key_head, Forward f, void* out, float* logs) {
  const Sizes& n = task.n;
  const Attended& of = task.of;
  const AttentionKernels& k = task.kernels;
  const Heads queries{of.heads, of.query_eps, true, {of.query_gain}}, values{of.key_heads};
  const Heads keys{of.key_heads, of.key_eps, true, {of.key_gain}};
  const int64_t shared = of.heads / of.key_heads;
  const float scale = scale_of(of);
  task.fill(of.key, keys, key_head, 0, n.keys, f.keys, nullptr, f.spare);
  k.transpose(n.keys, n.words, f.keys, f.keys_across);
  task.fill(of.value, values, key_head, 0, n.keys, f.values, nullptr, f.spare);
  task.along(n.keys, f.values, f.values_along);
  for (int64_t h = key_head * shared; h < (key_head + 1) * shared; ++h) {
    float* const own_logs = logs + (task.sequence * of.heads + h) * n.length;
    for (int64_t first = 0; first < n.length; first += n.tile) {
      const int64_t rows = least(n.tile, n.length - first), seen = least(n.keys, first + n.tile);
      task.fill(of.query, queries, h, first, n.tile, f.queries, nullptr, f.spare);
      k.multiply(n.tile, seen, n.words, f.queries, f.keys_across, f.scores, n.row, false);
      k.soften(f.scores, n.row, first, rows, seen, scale, f.p, f.most, f.sums);
      k.multiply(n.tile, n.padded, seen / n.terms, f.p, f.values_along, f.seen, n.padded, false);
      for (int64_t i = 0; i < rows; ++i) {
        own_logs[first + i] = scale * f.most[i] + std::log(f.sums[i]);
        f.sums[i] = 1.0f / f.sums[i];
      }
      k.finish(rows, f.seen, n.padded, n.features, f.sums, of.dtype,
               at(out, of.dtype, task.place(queries, h, first)), task.stride(queries));
    }
  }
}

struct Gradients {
  const void *seen, *given;
  const float* logs;
  void *query, *key, *value;
};

// `gains`: sums of a task for the gradients of its gains, of queries and then of keys; or null.
void backward_task(const Task& task, int64_t key_head, Backward b, const Gradients& to, float* gains) {
  const Sizes& n = task.n;
  const Attended& of = task.of;
  const AttentionKernels& k = task.kernels;
  const Heads queries{of.heads, of.query_eps, true, {of.query_gain, gains}}, plain{of.heads}, values{of.key_heads};
  float* const key_gains = gains == nullptr ? nullptr : gains + n.features;
  const Heads keys{of.key_heads, of.key_eps, true, {of.key_gain, key_gains}};
  const int64_t shared = of.heads / of.key_heads;
  const float scale = scale_of(of);
  task.fill(of.key, keys, key_head, 0, n.keys, b.keys, b.key_factors, b.spare);
  k.transpose(n.keys, n.words, b.keys, b.keys_across);
  task.along(n.keys, b.keys, b.keys_along);
  task.fill(of.value, values, key_head, 0, n.keys, b.values, nullptr, b.spare);
  k.transpose(n.keys, n.words, b.values, b.values_across);
  // The tile of queries from `first` on, of a block that begins at `start`.
  const auto tile_back = [&](int64_t h, int64_t start, int64_t first) {
    const int64_t rows = least(n.tile, n.length - first), seen = least(n.keys, first + n.tile);
    const int64_t own = task.place(queries, h, first), words = (first - start) / n.terms;
    const auto from = [](Words x, int64_t row, int64_t column) {
      return Words{x.first + row * x.stride + column, x.stride};
    };
    task.fill(of.query, queries, h, first, n.tile, b.queries, b.query_factors, b.spare);
    task.fill(to.given, plain, h, first, n.tile, b.given, nullptr, b.spare);
    k.dots(rows, at(to.given, of.dtype, own), at(to.seen, of.dtype, own), task.stride(queries), of.dtype, n.features,
           b.dots);
    task.across(b.queries, b.pairs, from(b.queries_across, 0, words));
    task.across(b.given, b.pairs, from(b.given_across, 0, words));
    k.multiply(n.tile, seen, n.words, b.queries, b.keys_across, b.scores, n.row, false);
    k.multiply(n.tile, seen, n.words, b.given, b.values_across, b.slopes, n.row, false);
    const float* const logs = to.logs + (task.sequence * of.heads + h) * n.length + first;
    k.soften_back(b.scores, b.slopes, n.row, first, rows, n.tile, seen, scale, logs, b.dots, from(b.p, words, 0),
                  b.by_key, from(b.by_row, words, 0));
    k.multiply(n.tile, n.padded, seen / n.terms, b.by_key, b.keys_along, b.grad_queries, n.padded, false);
    task.give_back(rows, b.grad_queries, scale, of.query, queries, h, first, b.query_factors, b, to.query);
  };
  for (int64_t h = key_head * shared; h < (key_head + 1) * shared; ++h) {
    for (int64_t start = 0; start < n.length; start += n.block) {
      const int64_t end = least(n.keys, start + n.block);
      for (int64_t first = start; first < end; first += n.tile) tile_back(h, start, first);
      // Sums over the queries of the block for keys before it, and, 32 at a time, for its own, which only later queries
      // see. The first sums of a key are those of its own block and the first head.
      const auto add_up = [&](int64_t key, int64_t count, int64_t query, bool adds) {
        const int64_t skipped = (query - start) / n.terms, words = (end - query) / n.terms;
        const auto product = [&](Words across, Words by, float* sums) {
          k.multiply(n.padded, count, words, {across.first + skipped, across.stride},
                     {by.first + skipped * by.stride + key, by.stride}, sums + key, n.row, adds);
        };
        product(b.queries_across, b.by_row, b.grad_keys);
        product(b.given_across, b.p, b.grad_values);
      };
      add_up(0, start, start, true);
      for (int64_t key = start; key < end; key += kTile) add_up(key, kTile, key, h > key_head * shared);
    }
  }
  const auto rows_back = [&](float* grads, float by, const void* x, const Heads& heads, void* out) {
    for (int64_t first = 0; first < n.length; first += 16) {
      k.transpose(n.padded, 16, {words_of(grads + first), n.row}, {words_of(b.grad_queries), n.padded});
      task.give_back(least(16, n.length - first), b.grad_queries, by, x, heads, key_head, first, b.key_factors + first,
                     b, out);
    }
  };
  rows_back(b.grad_keys, scale, of.key, keys, to.key);
  rows_back(b.grad_values, 1.0f, of.value, values, to.value);
}

// Calls f(task, key_head, memory, sums) for every sequence and key head. `sums` are a task's own, `summed` floats that
// begin at zero; afterwards finish(sums) gets those of one task after the other.
template <class Memory, class F, class Finish>
void for_heads(const BlockCall& call, const AttentionKernels& kernels, const Attended& of, int64_t summed, F f,
               Finish finish) {
  const Sizes sizes(kernels, of);
  Room counted(nullptr);
  const Memory unused(counted, sizes);
  static_cast<void>(unused);
  const int64_t tasks = of.batch * of.key_heads, each = counted.used();
  const int threads = static_cast<int>(least(call.threads, tasks));
  const int64_t apart = static_cast<int64_t>(Workspace::padded(4 * summed));
  Workspace& space = workspace();
  space.reserve(static_cast<size_t>(threads * each + tasks * apart));
  char* const memory = space.take<char>(threads * each);
  char* const parts = space.take<char>(tasks * apart);
  std::memset(parts, 0, static_cast<size_t>(tasks * apart));
  const auto part = [&](int64_t index) {
    return summed == 0 ? nullptr : reinterpret_cast<float*>(parts + index * apart);
  };
  auto task = [&](int64_t index, int worker) {
    Room room(memory + worker * each);
    if (kernels.begin != nullptr) kernels.begin();
    f(Task{call, kernels, of, sizes, index / of.key_heads}, index % of.key_heads, Memory(room, sizes), part(index));
    if (kernels.end != nullptr) kernels.end();
  };
  parallel_tasks(tasks, threads, task);
  for (int64_t index = 0; summed > 0 && index < tasks; ++index) finish(part(index));
  space.release();
}

}  // namespace

const AttentionKernels& attention_kernels(int isa, [[maybe_unused]] Dtype dtype) {
  switch (static_cast<Isa>(isa)) {
#if defined(ARB_HAVE_AMX)
    case Isa::amx:
      return dtype == Dtype::bfloat16 ? attention_amx() : attention_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX512BF16)
    case Isa::avx512bf16:
      return dtype == Dtype::bfloat16 ? attention_avx512bf16() : attention_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
    case Isa::avx512vnni:
      return attention_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX2)
    case Isa::avx2:
    case Isa::avxvnni:
      return attention_avx2();
#endif
#if defined(ARB_HAVE_NEON)
    case Isa::neon:
      return attention_neon();
#endif
    default:
      return attention_scalar();
  }
}

void attend(const BlockCall& call, const AttentionKernels& kernels, const Attended& of, void* seen, float* logs) {
  const auto task_of = [&](const Task& task, int64_t key_head, const Forward& memory, float*) {
    forward_task(task, key_head, memory, seen, logs);
  };
  for_heads<Forward>(call, kernels, of, 0, task_of, [](const float*) {});
}

void attend_back(const BlockCall& call, const AttentionKernels& kernels, const Attended& of, const void* seen,
                 const float* logs, const void* grad, void* grad_query, void* grad_key, void* grad_value,
                 float* grad_query_gain, float* grad_key_gain) {
  const Gradients to{seen, grad, logs, grad_query, grad_key, grad_value};
  const auto task_of = [&](const Task& task, int64_t key_head, const Backward& memory, float* gains) {
    backward_task(task, key_head, memory, to, gains);
  };
  const auto finish = [&](const float* gains) {
    const float* const parts[] = {gains, gains + of.features};
    float* const sums[] = {grad_query_gain, grad_key_gain};
    for (int i = 0; i < 2; ++i) {
      if (sums[i] != nullptr) call.block.add(parts[i], Dtype::float32, of.features, sums[i]);
    }
  };
  const bool gained = grad_query_gain != nullptr || grad_key_gain != nullptr;
  for_heads<Backward>(call, kernels, of, gained ? 2 * of.features : 0, task_of, finish);
}

}  // namespace arb
