// The kernel and its launches, compiled by nvcc; nothing of torch.
#include "attention.cuh"

namespace EVOATTN_NAME {

cudaError_t required_workspace(const Problem& problem, size_t* bytes) { return workspace_size(problem, bytes); }

cudaError_t run(const Problem& problem, const Tensors& tensors, void* workspace, cudaStream_t stream) {
  if (cudaError_t error = clear_workspace(problem, workspace, stream)) return error;
  return launch(problem, tensors, workspace, stream);
}

}  // namespace EVOATTN_NAME
