// warp_keys.cuh: the keys that one warp of split_kv takes, in tiles. What brings their K and V to the warp is the
// struct `KeyTiles` of one of the headers kv_registers, kv_cp_async, kv_tma.
#include "device/ptx/element.cuh"

struct KvStrides {
  int64_t batch, head, row;
};  // elements

struct WarpKeys {
  int batch, kv_head;
  KvStrides k_strides, v_strides;
  int first, count;  // key `first` begins the first tile; those from `first + count` on are not seen
  int tiles;

  // Where column `column` of row `row` of the first tile lies.
  template <typename Element>
  __device__ __forceinline__ const Element* place(const Element* kv_gmem, const KvStrides& strides, int row,
                                                  int column) const {
    return kv_gmem + batch * strides.batch + kv_head * strides.head + (first + row) * strides.row + column;
  }
};
