// check.cuh: checks the kernel above against a reference and times it. The constants and launches above it are
// generated.
#include "export/check/PROOF.cuh"
#include "export/check/timing.cuh"

inline int run() {
  cudaDeviceProp properties;
  int device_index, optin_bytes;
  EVOATTN_CUDA(cudaGetDevice(&device_index));
  EVOATTN_CUDA(cudaGetDeviceProperties(&properties, device_index));
  EVOATTN_CUDA(cudaDeviceGetAttribute(&optin_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index));
  std::printf("%s on %s (sm_%d%d)\n", PROBLEM, properties.name, properties.major, properties.minor);
  if (properties.major * 10 + properties.minor < MINIMUM_SM) {
    std::fprintf(stderr, "This kernel needs sm_%d or newer.\n", MINIMUM_SM);
    return 1;
  }
  if (LARGEST_SMEM > optin_bytes) {
    std::fprintf(stderr, "This kernel needs %d bytes of shared memory per block; this device allows %d.\n",
                 LARGEST_SMEM, optin_bytes);
    return 1;
  }
  allow_shared_memory();

  Device device;
  const Proof proof;
  for (const auto& [i, bytes] : proof.inputs)
    EVOATTN_CUDA(cudaMemcpy(device.buffer[i], bytes.data(), BUFFER_BYTES[i], cudaMemcpyHostToDevice));
  launch(device.buffer, 0);
  bool right = proof.right("before timing", device);
  const std::vector<float> samples = time_calls(device);
  right = proof.right("after timing", device) && right;
  for (const auto& [i, bytes] : proof.inputs)
    if (device.read(i, 0, BUFFER_BYTES[i]) != bytes) {
      std::printf("FAIL: the kernel changed input %d\n", i);
      right = false;
    }

  const double median = samples[SAMPLES / 2];
  std::printf("%.3f us per call (p10 %.3f, p90 %.3f; %d graph replays), %.2f TFLOP/s\n", median, samples[SAMPLES / 10],
              samples[SAMPLES * 9 / 10], SAMPLES, FLOPS / median / 1e6);
  std::printf(right ? "RIGHT\n" : "WRONG\n");
  return right ? 0 : 1;
}
