// timing.cuh: how long a call takes.
#include "export/check/device.cuh"

constexpr int SAMPLES = 51, MAX_CALLS = 200;
constexpr float REPLAY_US = 1000;  // work in one replayed graph

inline float elapsed_us(cudaEvent_t begin, cudaEvent_t end) {
  float ms;
  EVOATTN_CUDA(cudaEventSynchronize(end));
  EVOATTN_CUDA(cudaEventElapsedTime(&ms, begin, end));
  return ms * 1e3f;
}

// Sorted µs per call, each the mean over one replay of a CUDA graph of many calls; inputs warm in L2.
inline std::vector<float> time_calls(Device& device) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  EVOATTN_CUDA(cudaStreamCreate(&stream));
  EVOATTN_CUDA(cudaEventCreate(&begin));
  EVOATTN_CUDA(cudaEventCreate(&end));
  float once = 0;
  for (int warm_up = 0; warm_up < 3; warm_up++) {
    EVOATTN_CUDA(cudaEventRecord(begin, stream));
    launch(device.buffer, stream);
    EVOATTN_CUDA(cudaEventRecord(end, stream));
    once = elapsed_us(begin, end);
  }
  const int calls = std::max(1, std::min(MAX_CALLS, int(REPLAY_US / std::max(once, 1.0f))));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  EVOATTN_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < calls; i++) launch(device.buffer, stream);
  EVOATTN_CUDA(cudaStreamEndCapture(stream, &graph));
  EVOATTN_CUDA(cudaGraphInstantiateWithFlags(&replay, graph, 0));
  for (int warm_up = 0; warm_up < 10; warm_up++) EVOATTN_CUDA(cudaGraphLaunch(replay, stream));
  std::vector<float> samples;
  for (int i = 0; i < SAMPLES; i++) {
    EVOATTN_CUDA(cudaEventRecord(begin, stream));
    EVOATTN_CUDA(cudaGraphLaunch(replay, stream));
    EVOATTN_CUDA(cudaEventRecord(end, stream));
    samples.push_back(elapsed_us(begin, end) / float(calls));
  }
  device.poison_outputs();  // so that the check after the timing sees what the timed graph writes
  EVOATTN_CUDA(cudaGraphLaunch(replay, stream));
  EVOATTN_CUDA(cudaStreamSynchronize(stream));
  std::sort(samples.begin(), samples.end());
  return samples;
}
