// status.cuh: what becomes of a CUDA call that fails: the program ends with a sentence.
#define EVOATTN_CUDA(call) ::evoattn_check::require((call), #call, __LINE__)
inline void require(cudaError_t status, const char* call, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s: %s (%s)\n", line, call, cudaGetErrorString(status), cudaGetErrorName(status));
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion)
    std::fprintf(stderr, "This file was built for another architecture: build it with the -arch of this device.\n");
  std::exit(1);
}
