#include "product_plan.h"

namespace arb {

namespace {

// Tasks a thread at least, where there is enough to share out, and rows that make decoding a weight worth while.
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kRowsPerTask = 32;
// Bytes of rows that a second-level cache keeps from one group of strips to the next.
constexpr int64_t kCachedRows = 384 << 10;
// Below so many multiply-accumulates (a row counting for itself and for decoding 8) one thread is done before another
// has woken up.
constexpr double kShortWork = 6e7;
// Blocks of so many bytes are mapped anew by malloc each time: thousands of pages to be asked for, and a fifth of the
// time of a product of 2048 rows.
constexpr size_t kMappedBytes = size_t{32} << 20;

}  // namespace

bool Result::prepare(int64_t rows) const {
  const size_t width = static_cast<size_t>(stride * dtype_size(dtype)), bytes = static_cast<size_t>(rows) * width;
  if (bytes >= kMappedBytes) advise_huge_pages(out, bytes);
  // What is as large as the second-level cache has left it before it is read. To write it the usual way, each line of
  // it is read first, which took a third of the time of a product of 512 rows with AMX.
  return bytes >= second_level_cache() && reinterpret_cast<uintptr_t>(out) % 64 == 0 && width % 64 == 0;
}

Shape::Shape(const Weight& w, bool along, int64_t rows)
    : along_rows(along),
      m(rows),
      outputs(along ? w.columns : w.rows),
      terms(along ? w.rows : w.columns),
      strips(blocks_of(outputs)),
      blocks(blocks_of(terms)),
      blocks_per_group(w.groups == 1 ? blocks_of(w.columns) : w.group_size / kBlockSide) {}

int Shape::threads(int wanted) const {
  const double work = static_cast<double>(outputs) * static_cast<double>(terms) * static_cast<double>(m + 8);
  return work < kShortWork ? 1 : wanted;
}

Cut::Cut(const Shape& shape, const ProductKernels& kernels, const Panels& panels, int64_t term_bytes, int threads)
    : group_strips(kernels.strips),
      groups(ceil_of(shape.strips, group_strips)),
      groups_per_task(1),
      splits(1),
      panels_per_split(panels.count) {
  const int64_t wanted = threads > 1 ? kTasksPerThread * threads : 1;
  // Columns of the packed weight lie 128 bytes a group apart, and what is below a page or more away: groups that are
  // read side by side take half of the time of single ones, where rows are few.
  if (shape.along_rows || shape.m * shape.terms * term_bytes > kCachedRows) {
    groups_per_task = most(1, least(kKeptGroups, groups / wanted));
  }
  if (groups < wanted) {
    splits = least(ceil_of(wanted, groups), most(1, panels.count / panels.among(kRowsPerTask)));
    panels_per_split = ceil_of(panels.count, splits);
    splits = ceil_of(panels.count, panels_per_split);
  }
}

void gather_all(const ProductKernels& kernels, Crew::Member& member, const Weight& w, const GroupExponents& into) {
  const int64_t stride = exponent_bytes(w.groups);
  member.each(blocks_of(w.rows), [&](int64_t strip) {
    const int64_t row = strip * kBlockSide;
    kernels.gather_exponents(w.exponent + row * w.groups, least(kBlockSide, w.rows - row), w.groups,
                             into.gathered + strip * stride);
  });
  member.each(1, [&](int64_t) {
    kernels.group_range(into.gathered, blocks_of(w.rows), w.groups, into.lowest, into.highest);
  });
}

int set_up(const ProductKernels& kernels, const Weight& w, const Shape& shape, const GroupExponents& all,
           int64_t first_strip, int64_t strips, uint8_t* exponents, int32_t* floors, DecodeSource& source) {
  const int64_t stride = exponent_bytes(w.groups);
  strips = least(strips, shape.strips - first_strip);
  source.strips = strips;
  source.count = shape.blocks;
  source.first_block = 0;
  source.floors = floors;
  int spread = 0;
  if (shape.along_rows) {
    source.blocks = w.packed + first_strip * kBlockBytes;
    source.block_stride = blocks_of(w.columns) * kBlockBytes;
    source.strip_stride = kBlockBytes;
    source.exponent_stride = stride;
    source.blocks_per_group = shape.blocks + 1;  // along the sum the group never changes
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t group = (first_strip + s) / shape.blocks_per_group;
      source.exponents[s] = all.gathered;
      source.group[s] = group;
      for (int64_t r = 0; r < kBlockSide; ++r) floors[s * kBlockSide + r] = all.lowest[group];
      const int difference = all.highest[group] - all.lowest[group];
      spread = difference > spread ? difference : spread;
    }
    return spread;
  }
  source.strip_stride = shape.blocks * kBlockBytes;
  source.blocks = w.packed + first_strip * source.strip_stride;
  source.block_stride = kBlockBytes;
  source.exponent_stride = 0;
  source.blocks_per_group = shape.blocks_per_group;
  for (int64_t s = 0; s < strips; ++s) {
    const int64_t row = (first_strip + s) * kBlockSide;
    uint8_t* const gathered = exponents + s * stride;
    kernels.gather_exponents(w.exponent + row * w.groups, least(kBlockSide, w.rows - row), w.groups, gathered);
    const int difference = kernels.row_floors(gathered, w.groups, floors + s * kBlockSide);
    source.exponents[s] = gathered;
    source.group[s] = 0;
    spread = difference > spread ? difference : spread;
  }
  return spread;
}

// `source` cut down to a stretch of its blocks.
DecodeSource chunk_of(const DecodeSource& source, int64_t first, int64_t count) {
  DecodeSource chunk = source;
  chunk.blocks += first * source.block_stride;
  chunk.first_block = first;
  chunk.count = count;
  for (int64_t s = 0; s < source.strips; ++s) chunk.exponents[s] += first * source.exponent_stride;
  return chunk;
}

Benches::Benches(int threads, const Weight& w, int64_t groups, int64_t weight_bytes, int64_t wide_rows)
    : threads_(threads),
      exponent_size_(exponent_bytes(w.groups) * kMaxStrips),
      exponents_(Workspace::padded(exponent_size_ * groups)),
      weights_(Workspace::padded(weight_bytes)),
      sums_(Workspace::padded(groups * kKeptSums * 4)),
      wide_(Workspace::padded(wide_rows * kMaxLanes * 8)),
      bytes_each_(exponents_ + weights_ + sums_ + wide_) {}

Bench Benches::of(int worker) const {
  char* const at = memory_ + static_cast<size_t>(worker) * bytes_each_;
  return {reinterpret_cast<uint8_t*>(at), exponent_size_, at + exponents_, at + exponents_ + weights_,
          reinterpret_cast<int64_t*>(at + exponents_ + weights_ + sums_)};
}

}  // namespace arb
