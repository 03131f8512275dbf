// block_states_none.cuh: no block list: a key is seen by the queries that the mask shows.
#include "device/ptx/element.cuh"
// What `block_states_blocks.cuh` says, never asked.
struct BlockStates {
  static constexpr bool LISTED = false;
  static constexpr int row_blocks = 0;
  struct Kinds {
    uint32_t seen, partial;
  };
  __device__ __forceinline__ const uint8_t* column(int, int, int) const { return nullptr; }
  __device__ __forceinline__ Kinds kinds(const uint8_t*, int, int) const { return {0, 0}; }
  template <int BLOCK_M> __device__ __forceinline__ int tiles_of_block() const { return 1; }
  __device__ __forceinline__ bool packed() const { return false; }
  template <class Seen> __device__ __forceinline__ void load_seen(Seen&, int, int, int, int, int) const {}
  template <int BLOCK_M> __device__ __forceinline__ void write(int, int, int) const {}
  template <int BLOCK_M> __device__ __forceinline__ int count(int, int, int, int, int, int) const { return 0; }
  template <int BLOCK_N> __device__ __forceinline__ int behind(int, int, int, int, int, int) const { return 0; }
  template <int BLOCK_M> __device__ __forceinline__ void find(int, int&, int&, int, int) const {}
  __device__ __forceinline__ int block_of(int) const { return 0; }
  __device__ __forceinline__ bool is_partial(int, int, int, int) const { return false; }
  template <class Terms> static __device__ __forceinline__ bool shows(const Terms&, int, int, int, int) { return true; }
};
