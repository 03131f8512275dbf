// tensor_map.cuh: tensor maps for the launches below, encoded by the driver without linking to it.
using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

inline TensorMapEncoder tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "tensor map encoder", __LINE__);
#else
  require(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found), "tensor map encoder",
          __LINE__);
#endif
  if (found != cudaDriverEntryPointSuccess) {
    std::fprintf(stderr, "This driver has no tensor maps; they need CUDA 12.\n");
    std::exit(1);
  }
  return (TensorMapEncoder)function;
}

// Sizes and box in elements, strides in bytes of every dimension but the innermost, all innermost first. What lies
// outside reads zero.
template <int RANK>
CUtensorMap tensor_map(void* address, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                       const cuuint64_t (&sizes)[RANK], const cuuint64_t (&strides)[RANK - 1],
                       const cuuint32_t (&box)[RANK]) {
  static const TensorMapEncoder encode = tensor_map_encoder();
  cuuint32_t element_strides[RANK];
  std::fill(element_strides, element_strides + RANK, 1);
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, RANK, address, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::fprintf(stderr, "The driver refused a tensor map (CUDA error %d).\n", int(status));
    std::exit(1);
  }
  return map;
}
