// Launches by the CUDA runtime. Needs api.h and KERNELS, the addresses of the kernels by their names.

inline cudaError_t current_sm_count(int* count) {
  int device;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// cuTensorMapEncodeTiled out of the driver, without linking to it; null if the driver is older than CUDA 12.
using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);
inline TensorMapEncoder find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? (TensorMapEncoder)function : nullptr;
}

inline cudaError_t encode(const TensorMap& map, void* address, CUtensorMap* encoded) {
  static const TensorMapEncoder encoder = find_tensor_map_encoder();
  if (!encoder) return cudaErrorNotSupported;
  cuuint64_t shape[5], strides[4];
  cuuint32_t box[5], element_strides[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < map.rank; i++) shape[i] = map.shape[i], box[i] = map.box[i];
  for (int i = 0; i < map.rank - 1; i++) strides[i] = map.strides_bytes[i];
  const CUresult status = encoder(encoded, CUtensorMapDataType(map.dtype), map.rank, address, shape, strides, box,
                                  element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

struct Addresses {
  void* buffer[SCRATCH + 4];

  Addresses(const Plan& plan, const Tensors& t, void* workspace)
      : buffer{(void*)t.q, (void*)t.k, (void*)t.v, t.o, t.lse} {
    for (int i = 0; i < plan.scratches; i++) buffer[SCRATCH + i] = (char*)workspace + scratch_offset(plan, i);
  }
};

// An argument as the kernel takes it.
union Value {
  int int32;
  long long int64;
  float float32;
  void* pointer;
  CUtensorMap map;
};

inline cudaError_t set(Value* value, const Argument& argument, const Addresses& addresses) {
  switch (argument.kind) {
    case Argument::INT32:
      value->int32 = int(argument.integer);
      break;
    case Argument::INT64:
      value->int64 = argument.integer;
      break;
    case Argument::FLOAT32:
      value->float32 = argument.real;
      break;
    case Argument::BUFFER:
      value->pointer = addresses.buffer[argument.integer];
      break;
    case Argument::TENSOR_MAP:
      return encode(argument.map, addresses.buffer[argument.map.buffer], &value->map);
  }
  return cudaSuccess;
}

struct Kernel {
  const char* name;
  const void* function;
};

template <int COUNT>
cudaError_t run(const Launch& launch, const Addresses& addresses, const Kernel (&kernels)[COUNT], cudaStream_t stream) {
  const void* function = nullptr;
  for (const Kernel& kernel : kernels)
    if (!std::strcmp(kernel.name, launch.kernel)) function = kernel.function;
  if (!function) return cudaErrorInvalidDeviceFunction;
  const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaError_t error = cudaFuncSetAttribute(function, most, launch.smem_bytes)) return error;

  Value values[32];
  void* arguments[32];
  for (int i = 0; i < launch.count; i++) {
    if (cudaError_t error = set(&values[i], launch.args[i], addresses)) return error;
    arguments[i] = &values[i];
  }
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.grid.x, launch.grid.y, launch.grid.z);
  config.blockDim = dim3(launch.block.x, launch.block.y, launch.block.z);
  config.dynamicSmemBytes = launch.smem_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = launch.overlaps ? 1 : 0;
  return cudaLaunchKernelExC(&config, function, arguments);
}

template <int COUNT>
cudaError_t run_all(const Problem& problem, const Tensors& tensors, void* workspace, const Kernel (&kernels)[COUNT],
                    cudaStream_t stream) {
  int sm_count;
  if (cudaError_t error = current_sm_count(&sm_count)) return error;
  if (why_not(problem, tensors, sm_count)) return cudaErrorInvalidValue;
  const Plan planned = plan(meaningful(problem), sm_count);
  if (planned.scratches && !workspace) return cudaErrorInvalidValue;
  const Addresses addresses(planned, tensors, workspace);
  for (int i = 0; i < planned.launches; i++)
    if (cudaError_t error = run(planned.launch[i], addresses, kernels, stream)) return error;
  return cudaSuccess;
}

// Bytes that `launch` needs as `workspace` on the current device; 0 for most kernels.
inline cudaError_t workspace_size(const Problem& problem, size_t* bytes) {
  int sm_count;
  if (cudaError_t error = current_sm_count(&sm_count)) return error;
  if (why_not(problem, sm_count)) return cudaErrorInvalidValue;
  *bytes = workspace_bytes(problem, sm_count);
  return cudaSuccess;
}

// Before the first launch of a problem with a workspace, and after a launch that failed. Launches of one problem may
// follow one another without it.
inline cudaError_t clear_workspace(const Problem& problem, void* workspace, cudaStream_t stream) {
  int sm_count;
  if (cudaError_t error = current_sm_count(&sm_count)) return error;
  if (why_not(problem, sm_count)) return cudaErrorInvalidValue;
  const int64_t bytes = zeroed_bytes(plan(meaningful(problem), sm_count));
  return bytes ? cudaMemsetAsync(workspace, 0, bytes, stream) : cudaSuccess;
}
