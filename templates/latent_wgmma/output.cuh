  // output.cuh, a part of the kernel's body: a warpgroup's half of O to global memory, unfinished where keys are split.
  if (work.splits > 1) {
    float* row_gmem = partial_gmem + (work.result() * 64 + row) * VALUE_DIM + half * HALF + work.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < HALF / 2; i += 4) {
      *reinterpret_cast<float2*>(row_gmem + i * 2) = make_float2(o[i], o[i + 1]);
      *reinterpret_cast<float2*>(row_gmem + 8 * VALUE_DIM + i * 2) = make_float2(o[i + 2], o[i + 3]);
    }
    return;
  }
  // Over rows of Q that only this warp and its neighbour in the first warpgroup have multiplied, all of which is done.
  const int o_offset = half * (HALF / 64) * 64 * 128, warp_row = work.warp % 4 * 16;
  output_to_shared<Element>(o, inverse, work.smem_address + o_offset, work.warp % 4, work.lane);
  __syncwarp();  // all rows of the warp are written
  Element* row_gmem =
      o_gmem + work.batch * o_batch_stride + work.query * o_row_stride + (work.first_head + warp_row) * o_head_stride;
  rows_to_global<HALF>(smem + o_offset, row_gmem + half * HALF, o_head_stride, work.heads - warp_row, work.warp % 4,
                       work.lane);
