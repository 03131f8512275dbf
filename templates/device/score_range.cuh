// score_range.cuh: between what whole numbers an expression lies while its query and key go through ranges of their own
// (evoattn/model/score_lines.py). A condition is 0 or 1. Whatever may pass the bounds of an int is anything: kernels
// wrap around there.
#include "device/ptx/warp.cuh"
#include "device/score.cuh"

struct Range {
  int low, high;  // both may be
  static __device__ __forceinline__ Range anything() { return {-0x7fffffff - 1, 0x7fffffff}; }
  static __device__ __forceinline__ Range of(long long low, long long high) {
    return low < -0x80000000LL || high > 0x7fffffffLL ? anything() : Range{int(low), int(high)};
  }
  static __device__ __forceinline__ Range one(int number) { return {number, number}; }
  __device__ __forceinline__ bool is_one() const { return low == high; }
};

__device__ __forceinline__ Range lesser_of(Range x, Range y) { return {min(x.low, y.low), min(x.high, y.high)}; }
__device__ __forceinline__ Range greater_of(Range x, Range y) { return {max(x.low, y.low), max(x.high, y.high)}; }
__device__ __forceinline__ Range sum_of(Range x, Range y) {
  return Range::of(int64_t(x.low) + y.low, int64_t(x.high) + y.high);
}
__device__ __forceinline__ Range difference_of(Range x, Range y) {
  return Range::of(int64_t(x.low) - y.high, int64_t(x.high) - y.low);
}
__device__ __forceinline__ Range negative_of(Range x) { return Range::of(-int64_t(x.high), -int64_t(x.low)); }
__device__ __forceinline__ Range size_of(Range x) {
  if (x.low >= 0) return x;
  const Range turned = negative_of(x);
  return turned.low == -0x7fffffff - 1 || x.high <= 0 ? turned : Range{0, max(x.high, turned.high)};
}
__device__ __forceinline__ Range product_of(Range x, Range y) {
  const int64_t a = int64_t(x.low) * y.low, b = int64_t(x.low) * y.high, c = int64_t(x.high) * y.low,
                d = int64_t(x.high) * y.high;
  return Range::of(min(min(a, b), min(c, d)), max(max(a, b), max(c, d)));
}
__device__ __forceinline__ Range quotient_of(Range x, Range y) {
  if (!y.is_one() || y.low <= 0) return Range::anything();
  return {floor_divide(x.low, y.low), floor_divide(x.high, y.low)};
}
__device__ __forceinline__ Range remainder_of(Range x, Range y) {
  if (!y.is_one() || y.low <= 0) return Range::anything();
  const bool same = floor_divide(x.low, y.low) == floor_divide(x.high, y.low);  // in between it begins anew
  return same ? Range{floor_remainder(x.low, y.low), floor_remainder(x.high, y.low)} : Range{0, y.low - 1};
}
__device__ __forceinline__ Range shifted(Range x, Range y) {
  return y.is_one() && y.low >= 0 && y.low < 32 ? Range{x.low >> y.low, x.high >> y.low} : Range::anything();
}
__device__ __forceinline__ Range common_bits(Range x, Range y) {
  if (x.is_one() && y.is_one()) return {x.low & y.low, x.low & y.low};
  if (x.low >= 0 && y.low >= 0) return {0, min(x.high, y.high)};
  return Range::anything();
}
__device__ __forceinline__ Range is_not(Range x) { return {1 - x.high, 1 - x.low}; }
__device__ __forceinline__ Range is_less(Range x, Range y) { return {x.high < y.low, x.low < y.high}; }
__device__ __forceinline__ Range is_at_most(Range x, Range y) { return {x.high <= y.low, x.low <= y.high}; }
__device__ __forceinline__ Range is_equal(Range x, Range y) {
  return {x.is_one() && y.is_one() && x.low == y.low, x.low <= y.high && y.low <= x.high};
}
__device__ __forceinline__ Range either_of(Range condition, Range yes, Range no) {
  if (condition.is_one()) return condition.low ? yes : no;
  return {min(yes.low, no.low), max(yes.high, no.high)};
}

// Indices as tables are read by: those outside are the nearest inside, and those below 0 may count from the end.
__device__ __forceinline__ Range inside(Range index, int size, bool wraps) {
  if (wraps && index.low < 0) index = index.high < 0 ? sum_of(index, {size, size}) : Range{0, size - 1};
  return {inside(index.low, size), inside(index.high, size)};
}

// Elements of a table along one or two of its dimensions.
struct Line {
  int64_t first = 0, step = 0;
  int count = 1;  // 0: along more
  int64_t far = 0;
  int rows = 1;  // of `count` elements each, `far` from one to the next
  // One dimension more, of that size.
  __device__ __forceinline__ Line of(Range index, int size) const {
    const int more = index.high - index.low + 1;
    const int64_t at = first * size + index.low;
    if (more == 1) return {at, step * size, count, far * size, rows};
    if (count == 1) return {at, 1, more};
    return {at, 1, rows == 1 ? more : 0, step * size, count};
  }
};

constexpr int MOST_ELEMENTS = 4096;  // that are looked at where they are no flags
__device__ __forceinline__ int as_int(long long x) { return to_int(x); }
__device__ __forceinline__ int as_int(int x) { return x; }
__device__ __forceinline__ int as_int(bool x) { return x; }

// Flags in words of one or of 16, until both kinds were met: the time of a table as large as the mask goes here. Lanes
// share rows where these have few words; those without a row or a word of their own look at the last.
template <typename Word>
__device__ __forceinline__ Range flags_of(const Word* __restrict__ words, Line line, int lane) {
  constexpr int TOGETHER = 4;
  const int across = min(line.count, 32), rows = 32 / across;
  uint32_t some = 0, none = 0;
  auto look = [&](uint32_t four) { some |= four, none |= four ^ 0x01010101; };
  for (int from = 0; from < line.count; from += across) {
    const Word* column = words + min(from + lane % across, line.count - 1) * line.step;
    for (int row = lane / across; row - lane / across < line.rows; row += TOGETHER * rows) {
      Word found[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) found[i] = column[min(row + i * rows, line.rows - 1) * line.far];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if constexpr (sizeof(Word) == 1) {
          look(found[i] ? 0x01010101 : 0);
        } else {
          look(found[i].x), look(found[i].y), look(found[i].z), look(found[i].w);
        }
      }
      if (__any_sync(ALL_LANES, some != 0) && __any_sync(ALL_LANES, none != 0)) return {0, 1};
    }
  }
  return {!__any_sync(ALL_LANES, none != 0), __any_sync(ALL_LANES, some != 0) != 0};
}
__device__ __forceinline__ Range flags_of(const bool* table, Line line, int lane) {
  constexpr int EACH = sizeof(uint4);
  const bool* flags = table + line.first;
  if (line.step != 1 || (reinterpret_cast<uint64_t>(flags) | line.far | line.count) % EACH)
    return flags_of(reinterpret_cast<const uint8_t*>(flags), line, lane);
  const Line words{0, 1, line.count / EACH, line.far / EACH, line.rows};
  return flags_of(reinterpret_cast<const uint4*>(flags), words, lane);
}

// What all lanes of a warp ask: elements of the same line, as they do where they ask ALIKE, or one for each lane; of
// other lines it says nothing. Lanes with a key each can have such lines, where numbers of some pass the bounds of an
// int.
template <bool ALIKE, typename Element>
__device__ __forceinline__ Range elements_of(const Element* table, Line line, int lane) {
  constexpr bool IS_FLAG = sizeof(Element) == 1;
  const int64_t elements = int64_t(line.count) * line.rows;
  if (ALIKE ? elements == 1 : __all_sync(ALL_LANES, elements == 1)) {
    const int value = as_int(table[line.first]);
    return {value, value};
  }
  bool is_one = true;
  if constexpr (!ALIKE) {  // of all lanes each: && between them would keep some from the next one
    const int64_t first = __shfl_sync(ALL_LANES, line.first, 0), step = __shfl_sync(ALL_LANES, line.step, 0);
    const int count = __shfl_sync(ALL_LANES, line.count, 0);
    is_one = line.first == first && line.step == step && line.count == count && line.rows == 1;
    is_one = __all_sync(ALL_LANES, is_one);
  }
  if (!is_one || elements < 1 || (!IS_FLAG && elements > MOST_ELEMENTS))
    return IS_FLAG ? Range{0, 1} : Range::anything();
  if constexpr (IS_FLAG) {
    return flags_of(table, line, lane);
  } else {
    Range found{0x7fffffff, -0x7fffffff - 1};
    for (int row = 0; row < line.rows; ++row)
      for (int i = lane; i < line.count; i += 32) {
        const int value = as_int(table[line.first + row * line.far + i * line.step]);
        found = {min(found.low, value), max(found.high, value)};
      }
#pragma unroll
    for (int away = 1; away <= 16; away *= 2) {
      found.low = min(found.low, __shfl_xor_sync(ALL_LANES, found.low, away));
      found.high = max(found.high, __shfl_xor_sync(ALL_LANES, found.high, away));
    }
    return found;
  }
}
