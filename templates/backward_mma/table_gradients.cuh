// table_gradients.cuh: what the scores of a tile add to the gradients of the tables that an expression loads from.
// Many scores may be of one element: as far as a warp has them, they are added up in registers first.
#include "device/ptx/red.cuh"
#include "device/ptx/warp.cuh"

// Which scores of a head are of the same element. DIAGONAL: those as many keys behind their queries. FEW: what a table
// of pairs says, of a row of elements that all scores of a head share and that may be short.
enum class Sharing { HEAD, KEY, QUERY, DIAGONAL, FEW, PAIR };
constexpr int FEW_ELEMENTS = 16;

// Where a lane's scores of a part of Sᵀ lie: tile m of 16 keys and its half, tile n of 8 queries and one of two.
struct LanePlace {
  int batch, head, query, key, diagonal;  // of its first score
  __device__ __forceinline__ int query_of(int n, int e) const { return query + n * 8 + e; }
  __device__ __forceinline__ int key_of(int half_tile) const { return key + half_tile * 8; }
};

// The sums of element I of `Own`, and of those behind it.
template <class Own, int KEY_TILES, int PART_TILES, int I = 0, bool NONE = I == Own::COUNT> struct TableGradients {
  static constexpr Sharing SHARED = Own::template SHARED<I>;
  static constexpr int HALF_TILES = 2 * KEY_TILES;
  static constexpr int SUMS = SHARED == Sharing::KEY        ? HALF_TILES
                              : SHARED == Sharing::QUERY    ? 2 * PART_TILES
                              : SHARED == Sharing::DIAGONAL ? 2 * (PART_TILES + HALF_TILES - 1)
                              : SHARED == Sharing::FEW      ? FEW_ELEMENTS
                                                            : 1;
  static constexpr bool OF_HEAD =  // until the head's last tile
      SHARED == Sharing::HEAD || SHARED == Sharing::KEY || SHARED == Sharing::FEW;
  float sums[SUMS];
  TableGradients<Own, KEY_TILES, PART_TILES, I + 1> others;

  __device__ __forceinline__ void begin_head() {
    if constexpr (OF_HEAD) clear();
    others.begin_head();
  }
  __device__ __forceinline__ void begin_part() {
    if constexpr (!OF_HEAD) clear();
    others.begin_part();
  }
  // A score, before the expression, and the gradient behind it.
  __device__ __forceinline__ void add(const Own& own, const LanePlace& at, int half_tile, int n, int e, float score,
                                      float gradient) {
    const int query = at.query_of(n, e), key = at.key_of(half_tile);
    const float change = gradient * own.template slope_by<I>(score, at.batch, at.head, query, key, at.diagonal);
    if constexpr (SHARED == Sharing::HEAD) sums[0] += change;
    if constexpr (SHARED == Sharing::KEY) sums[half_tile] += change;
    if constexpr (SHARED == Sharing::QUERY) sums[2 * n + e] += change;
    if constexpr (SHARED == Sharing::DIAGONAL) sums[2 * (half_tile - n + PART_TILES - 1) + e] += change;
    if constexpr (SHARED == Sharing::PAIR) put(own, at, query, key, change);
    if constexpr (SHARED == Sharing::FEW) {
      if (own.template row_length<I>() > FEW_ELEMENTS) {
        put(own, at, query, key, change);
      } else {
        const int element = own.template in_row<I>(at.batch, at.head, query, key, at.diagonal);
#pragma unroll
        for (int i = 0; i < FEW_ELEMENTS; ++i) sums[i] += i == element ? change : 0.f;
      }
    }
    others.add(own, at, half_tile, n, e, score, gradient);
  }
  // By all lanes.
  __device__ __forceinline__ void end_part(const Own& own, const LanePlace& at, int lane) {
    if constexpr (SHARED == Sharing::QUERY) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        const float sum = over_lanes<4, 16>(sums[i]);
        if (lane < 4) put(own, at, at.query_of(i / 2, i % 2), at.key, sum);
      }
    }
    if constexpr (SHARED == Sharing::DIAGONAL && Own::template APART<I>) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {  // the element is that of one of its scores
        const int apart = i / 2 - (PART_TILES - 1), n = apart < 0 ? -apart : 0;
        put(own, at, at.query_of(n, i % 2), at.key_of(n + apart), sums[i]);
      }
    } else if constexpr (SHARED == Sharing::DIAGONAL) {
      float* place = nullptr;  // diagonals side by side may be of one element, as where distances are clamped
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {  // the element is that of one of its scores
        const int apart = i / 2 - (PART_TILES - 1), n = apart < 0 ? -apart : 0;
        const bool any = sums[i] != 0.f;  // what is hidden may have no element
        float* next =
            any ? own.template place<I>(at.batch, at.head, at.query_of(n, i % 2), at.key_of(n + apart), at.diagonal)
                : place;
        if (__any_sync(ALL_LANES, place != nullptr && next != place)) {
          put_together(place, sum, lane);
          place = nullptr, sum = 0.f;
        }
        if (any) place = next, sum += sums[i];
      }
      put_together(place, sum, lane);
    }
    others.end_part(own, at, lane);
  }
  // By all lanes.
  __device__ __forceinline__ void end_head(const Own& own, const LanePlace& at, int lane) {
    if constexpr (SHARED == Sharing::HEAD) {
      const float sum = over_lanes<1, 16>(sums[0]);
      if (lane == 0) put(own, at, at.query, at.key, sum);
    }
    if constexpr (SHARED == Sharing::KEY) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        const float sum = over_lanes<1, 2>(sums[i]);
        if (lane % 4 == 0) put(own, at, at.query, at.key_of(i), sum);
      }
    }
    if constexpr (SHARED == Sharing::FEW) {
#pragma unroll
      for (int i = 0; i < FEW_ELEMENTS; ++i) {
        const float sum = over_lanes<1, 16>(sums[i]);
        if (lane == 0 && sum != 0.f) red_add(own.template row<I>(at.batch, at.head, at.diagonal) + i, sum);
      }
    }
    others.end_head(own, at, lane);
  }

private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
  }
  template <int FIRST, int LAST> static __device__ __forceinline__ float over_lanes(float sum) {
#pragma unroll
    for (int away = FIRST; away <= LAST; away *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, away);
    return sum;
  }
  static __device__ __forceinline__ void put(const Own& own, const LanePlace& at, int query, int key, float sum) {
    if (sum != 0.f) red_add(own.template place<I>(at.batch, at.head, query, key, at.diagonal), sum);
  }
  // By all lanes, of which some may have no place: one sum where all have the same.
  static __device__ __forceinline__ void put_together(float* place, float sum, int lane) {
    const uint32_t having = __ballot_sync(ALL_LANES, place != nullptr);
    if (having == 0) return;
    const uint64_t last = __shfl_sync(ALL_LANES, uint64_t(place), 31 - __clz(having));
    if (__all_sync(ALL_LANES, place == nullptr || uint64_t(place) == last)) {
      sum = over_lanes<1, 16>(sum);
      if (lane == 0) red_add(reinterpret_cast<float*>(last), sum);
    } else if (place != nullptr) {
      red_add(place, sum);
    }
  }
};
template <class Own, int KEY_TILES, int PART_TILES, int I> struct TableGradients<Own, KEY_TILES, PART_TILES, I, true> {
  __device__ __forceinline__ void begin_head() {}
  __device__ __forceinline__ void begin_part() {}
  __device__ __forceinline__ void add(const Own&, const LanePlace&, int, int, int, float, float) {}
  __device__ __forceinline__ void end_part(const Own&, const LanePlace&, int) {}
  __device__ __forceinline__ void end_head(const Own&, const LanePlace&, int) {}
};
