// varied.cuh: the arguments of a kernel that computes a variant of attention, in the order of `VariantArguments`. Those
// of variants that were not asked for are 0. Those of an expression of scores come last.
#define VARIANT_PARAMETERS                                                                               \
  , int window_past, int window_ahead, int diagonal, float score_scale, float term_unit,                 \
      const Element *__restrict__ sinks_gmem, const float *__restrict__ slopes_gmem,                     \
      const Element *__restrict__ bias_gmem, int64_t bias_batch_stride, int64_t bias_head_stride,        \
      int64_t bias_row_stride, const int *__restrict__ seqused_gmem, const int *__restrict__ table_gmem, \
      int page_bits, int table_pages, int kv_rows, const int *__restrict__ cu_seqlens_q,                 \
      const int *__restrict__ cu_seqlens_k, int total_queries, int sequences OWN_SCORE_PARAMETERS
#define VARIANT_ARGUMENTS                                                                                             \
  window_past, window_ahead, diagonal, score_scale, term_unit, sinks_gmem, slopes_gmem, bias_gmem, bias_batch_stride, \
      bias_head_stride, bias_row_stride, seqused_gmem, table_gmem, page_bits, table_pages, kv_rows, cu_seqlens_q,     \
      cu_seqlens_k, total_queries, sequences OWN_SCORE_ARGUMENTS
