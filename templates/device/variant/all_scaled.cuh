// all_scaled.cuh: the arguments of a kernel whose Q, K and V are of 8 bits: where their scales are, and strides in
// elements, 0 where a scale is the same (evoattn/model/scales.py).
#define SCALE_PARAMETERS                                                                                \
  , const float *__restrict__ q_scale_gmem, int64_t q_scale_batch_stride, int64_t q_scale_head_stride,  \
      int64_t q_scale_row_stride, const float *__restrict__ k_scale_gmem, int64_t k_scale_batch_stride, \
      int64_t k_scale_head_stride, int64_t k_scale_row_stride, const float *__restrict__ v_scale_gmem,  \
      int64_t v_scale_batch_stride, int64_t v_scale_head_stride, int64_t v_scale_row_stride
#define QUERY_SCALE_ARGUMENTS {q_scale_gmem, q_scale_batch_stride, q_scale_head_stride, q_scale_row_stride}
#define SCALE_ARGUMENTS                                                            \
  {k_scale_gmem, k_scale_batch_stride, k_scale_head_stride, k_scale_row_stride}, { \
    v_scale_gmem, v_scale_batch_stride, v_scale_head_stride, v_scale_row_stride    \
  }
