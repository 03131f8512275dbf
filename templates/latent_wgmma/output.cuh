  // output.cuh, a part of the kernel's body: a warpgroup's half of O to global memory, unfinished where keys are split.
  if (splits > 1) {
    const int64_t tile = (int64_t(batch) * kv_heads + kv_head) * row_blocks + row_block;
    float* row_gmem = partial_gmem + ((tile * splits + split) * 64 + row) * VALUE_DIM + half * HALF + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < HALF / 2; i += 4) {
      *reinterpret_cast<float2*>(row_gmem + i * 2) = make_float2(o[i], o[i + 1]);
      *reinterpret_cast<float2*>(row_gmem + 8 * VALUE_DIM + i * 2) = make_float2(o[i + 2], o[i + 3]);
    }
    return;
  }
  // Over rows of Q that only this warp and its neighbour in the first warpgroup have multiplied, all of which is done.
  const int o_offset = half * (HALF / 64) * 64 * 128, warp_row = warp % 4 * 16;
  output_to_shared<Element>(o, inverse, smem_address + o_offset, warp % 4, lane);
  __syncwarp();  // all rows of the warp are written
  Element* row_gmem = o_gmem + batch * o_batch_stride + query * o_row_stride + (first_head + warp_row) * o_head_stride;
  rows_to_global<HALF>(smem + o_offset, row_gmem + half * HALF, o_head_stride, heads - warp_row, warp % 4, lane);
