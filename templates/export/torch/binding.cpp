// The op `torch.ops.EVOATTN_NAME.attention`, compiled by the host compiler.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "attention.cuh"

namespace EVOATTN_NAME {

cudaError_t required_workspace(const Problem& problem, size_t* bytes);
cudaError_t run(const Problem& problem, const Tensors& tensors, void* workspace, cudaStream_t stream);

namespace {

constexpr auto DTYPE = at::EVOATTN_DTYPE;

// Numbers as text: where the C++ library is linked into the extension itself, streams of torch's do not print them.
std::string words(int64_t number) { return std::to_string(number); }

void check(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  TORCH_CHECK(tensor.is_cuda() && tensor.device() == query.device(), name, " must be on query's CUDA device.");
  TORCH_CHECK(tensor.scalar_type() == DTYPE, name, " must be ", DTYPE, ", not ", tensor.scalar_type(), ".");
  TORCH_CHECK(tensor.dim() == 4, name, " must be [batch, heads, seqlen, head_dim], not of ", words(tensor.dim()),
              " dimensions.");
  TORCH_CHECK(tensor.size(3) == HEAD_DIM, name, " must have the head_dim ", words(HEAD_DIM), ", not ",
              words(tensor.size(3)), ".");
  TORCH_CHECK(tensor.stride(3) == 1, name, "'s last dimension must have stride 1, not ", words(tensor.stride(3)), ".");
  for (int64_t size : tensor.sizes())
    TORCH_CHECK(size <= std::numeric_limits<int>::max(), name, " has a size that no int holds.");
}

Strides strides(const at::Tensor& tensor) { return {tensor.stride(0), tensor.stride(1), tensor.stride(2)}; }

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                          std::optional<double> scale) {
  check(query, "query", query), check(key, "key", query), check(value, "value", query);
  TORCH_CHECK(key.sizes() == value.sizes(), "key and value must have one shape.");
  TORCH_CHECK(key.size(0) == query.size(0), "key must have query's batch of ", words(query.size(0)), ", not ",
              words(key.size(0)), ".");
  const c10::cuda::CUDAGuard guard(query.device());
  at::Tensor out = at::empty_like(query), lse;
  if (WRITES_LSE) lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  if (query.numel() == 0) return {out, lse};

  const Problem problem = {int(query.size(0)), int(query.size(1)),
                           int(key.size(1)),   int(query.size(2)),
                           int(key.size(2)),   strides(query),
                           strides(key),       strides(value),
                           strides(out),       scale.value_or(1.0 / std::sqrt(double(HEAD_DIM)))};
  const Tensors tensors = {query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
                           WRITES_LSE ? lse.data_ptr<float>() : nullptr};
  int sm_count;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, query.device().index()));
  const char* reason = why_not(problem, tensors, sm_count);
  TORCH_CHECK(!reason, reason);

  size_t bytes = 0;
  C10_CUDA_CHECK(required_workspace(problem, &bytes));
  at::Tensor workspace;
  if (bytes) workspace = at::empty({int64_t(bytes)}, query.options().dtype(at::kByte));
  C10_CUDA_CHECK(run(problem, tensors, bytes ? workspace.data_ptr() : nullptr, c10::cuda::getCurrentCUDAStream()));
  return {out, lse};
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     std::optional<double> scale) {
  return std::get<0>(attend(query, key, value, scale));
}

std::tuple<at::Tensor, at::Tensor> attention_lse(const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, std::optional<double> scale) {
  TORCH_CHECK(WRITES_LSE, "This kernel was compiled without the log-sum-exp.");
  return attend(query, key, value, scale);
}

// What torch.compile asks of the op: shapes without data.
at::Tensor attention_meta(const at::Tensor& query, const at::Tensor&, const at::Tensor&, std::optional<double>) {
  return at::empty_like(query);
}

std::tuple<at::Tensor, at::Tensor> attention_lse_meta(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                                                      std::optional<double>) {
  const auto sizes = query.sym_sizes();
  return {at::empty_like(query), at::empty_symint({sizes[0], sizes[1], sizes[2]}, query.options().dtype(at::kFloat))};
}

}  // namespace
}  // namespace EVOATTN_NAME

TORCH_LIBRARY(EVOATTN_NAME, m) {
  m.def("attention(Tensor query, Tensor key, Tensor value, float? scale=None) -> Tensor");
  m.def("attention_lse(Tensor query, Tensor key, Tensor value, float? scale=None) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(EVOATTN_NAME, CUDA, m) {
  m.impl("attention", &EVOATTN_NAME::attention);
  m.impl("attention_lse", &EVOATTN_NAME::attention_lse);
}
TORCH_LIBRARY_IMPL(EVOATTN_NAME, Meta, m) {
  m.impl("attention", &EVOATTN_NAME::attention_meta);
  m.impl("attention_lse", &EVOATTN_NAME::attention_lse_meta);
}

// For torch.utils.cpp_extension.load, which imports what it builds.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using pybind11::arg;
  m.def("attention", &EVOATTN_NAME::attention, arg("query"), arg("key"), arg("value"), arg("scale") = std::nullopt);
  m.def("attention_lse", &EVOATTN_NAME::attention_lse, arg("query"), arg("key"), arg("value"),
        arg("scale") = std::nullopt);
}
