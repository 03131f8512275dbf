// wmma_m16n16k16.cuh: the fragments of nvcuda::wmma, 16×16×16, 16-bit in and fp32 accumulation (sm_80 and newer). Which
// element of a matrix a lane holds where is left open by CUDA. Matrices are 32-byte aligned, their rows a multiple of
// 16 bytes apart.
#include "device/ptx/element.cuh"

#include <mma.h>

template <typename Element> struct WmmaElement;
template <> struct WmmaElement<Fp16> {
  using Type = __half;
};
template <> struct WmmaElement<Bf16> {
  using Type = __nv_bfloat16;
};

template <typename Element> struct Wmma {
  using Type = typename WmmaElement<Element>::Type;
  using A = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, Type, nvcuda::wmma::row_major>;
  using B = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, Type, nvcuda::wmma::row_major>;
  using TransposedB = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, Type, nvcuda::wmma::col_major>;
  using C = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

  // A, B, or B from a matrix that lies transposed, at `tile_smem` with rows `row_bytes` apart.
  template <typename Fragment>
  static __device__ __forceinline__ void load(Fragment& fragment, const unsigned char* tile_smem, int row_bytes) {
    nvcuda::wmma::load_matrix_sync(fragment, reinterpret_cast<const Type*>(tile_smem), row_bytes / 2);
  }
  static __device__ __forceinline__ void load(C& fragment, const unsigned char* tile_smem, int row_bytes) {
    nvcuda::wmma::load_matrix_sync(fragment, reinterpret_cast<const float*>(tile_smem), row_bytes / 4,
                                   nvcuda::wmma::mem_row_major);
  }
  static __device__ __forceinline__ void store(unsigned char* tile_smem, int row_bytes, const C& fragment) {
    nvcuda::wmma::store_matrix_sync(reinterpret_cast<float*>(tile_smem), fragment, row_bytes / 4,
                                    nvcuda::wmma::mem_row_major);
  }
  static __device__ __forceinline__ void clear(C& c) { nvcuda::wmma::fill_fragment(c, 0.f); }
  template <typename FragmentB> static __device__ __forceinline__ void multiply(C& c, const A& a, const FragmentB& b) {
    nvcuda::wmma::mma_sync(c, a, b, c);
  }
};
