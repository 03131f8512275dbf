// none.cuh: no block list; tiles of keys follow one another from the first to the last that the mask shows.
#define PACK_MASK_KERNEL(TERMS, BY_KEYS)
struct KeyList {
  static constexpr bool LISTED = false;
  static __device__ __forceinline__ void wait_for_bits() {}
};
// What `blocks.cuh` says of tiles, never asked.
template <int ROWS, int BLOCK_N> struct SeenKeys {};
template <int BLOCK_N> struct ListedTiles {
  static constexpr int partial_tiles = 0, tiles = 0;
  __device__ __forceinline__ ListedTiles(const KeyList&, int, int, int) {}
  __device__ __forceinline__ bool is_partial(int) const { return false; }
  __device__ __forceinline__ bool is_packed(int) const { return false; }
  template <class Mask, class Terms> __device__ __forceinline__ bool may_hide(const Terms&, int) const { return false; }
  template <class Terms> __device__ __forceinline__ bool ask_predicate(Terms&, int) const { return false; }
  __device__ __forceinline__ int first_key(int) const { return 0; }
  __device__ __forceinline__ int first_key_down(int) const { return 0; }
  __device__ __forceinline__ int up(int tile) const { return tile; }
  template <class Mask, class Terms> __device__ __forceinline__ bool has_cut_block(const Terms&, int, int) const {
    return false;
  }
  template <class Seen> __device__ __forceinline__ void load_seen(Seen&, int, int, int) const {}
  template <class Scores, class Seen> static __device__ __forceinline__ void mask_unseen(Scores&, const Seen&) {}
  template <class... Given> __device__ __forceinline__ void mask_tile(Given&&...) const {}
  template <bool BY_KEYS = false, class Scores, class Terms>
  static __device__ __forceinline__ void mask_partial(Scores&, const Terms&, int, int, int, int) {}
};
