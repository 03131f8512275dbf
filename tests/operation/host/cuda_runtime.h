// Of the CUDA runtime what an exported check calls, on the host: kernels of seven pointers and an int run thread after
// thread.
#include <cmath>
#include <cstdlib>
#include <cstring>
#define __global__
#define __expf expf
#define __logf logf
enum cudaError_t { cudaSuccess, cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction,
                   cudaErrorUnsupportedPtxVersion };
enum { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaFuncAttributeMaxDynamicSharedMemorySize, cudaMemcpyHostToDevice,
       cudaMemcpyDeviceToHost, cudaStreamCaptureModeGlobal };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 0, unsigned y = 0, unsigned z = 0) : x(x), y(y), z(z) {}
};
struct cudaDeviceProp {
  char name[8];
  int major, minor;
};
struct Launched {
  const void* kernel;
  dim3 grid, block;
  void* values[8];
};
using cudaStream_t = int;
using cudaEvent_t = int;
using cudaGraph_t = int;
using cudaGraphExec_t = int;
static dim3 blockIdx, threadIdx;
static Launched launched;

inline void run_launched() {
  using Kernel = void (*)(void*, void*, void*, void*, void*, void*, void*, int);
  void** v = launched.values;
  for (blockIdx.x = 0; blockIdx.x < launched.grid.x; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < launched.block.x; threadIdx.x++)
      Kernel(launched.kernel)(v[0], v[1], v[2], v[3], v[4], v[5], v[6], int(size_t(v[7])));
}
inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t, cudaStream_t) {
  launched = {kernel, grid, block, {}};
  for (int i = 0; i < 7; i++) launched.values[i] = *(void**)args[i];
  launched.values[7] = (void*)size_t(*(int*)args[7]);
  return run_launched(), cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return run_launched(), cudaSuccess; }
inline cudaError_t cudaMalloc(void** address, size_t bytes) { return *address = std::malloc(bytes), cudaSuccess; }
inline cudaError_t cudaMemset(void* at, int value, size_t bytes) { return std::memset(at, value, bytes), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) { return *found = {"host", 8, 9}, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 1 << 16, cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
template <typename... T> cudaError_t nothing(T...) { return cudaSuccess; }
#define cudaGetDevice(device) nothing(*(device) = 0)
#define cudaFuncSetAttribute nothing
#define cudaDeviceSynchronize nothing
#define cudaEventSynchronize nothing
#define cudaEventCreate(event) nothing(*(event) = 0)
#define cudaEventRecord nothing
#define cudaStreamCreate(stream) nothing(*(stream) = 0)
#define cudaStreamSynchronize nothing
#define cudaStreamBeginCapture nothing
#define cudaStreamEndCapture(stream, graph) nothing(*(graph) = 0)
#define cudaGraphInstantiateWithFlags(replay, graph, flags) nothing(*(replay) = 0)
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline const char* cudaGetErrorName(cudaError_t) { return ""; }
