  // output.cuh, a part of the kernel's body: O / l to global memory. A row that saw no key has l = 0 and the output 0.
  loads_done();
  __syncthreads();  // no warp still reads K, V, P and factors, whose place O and the sums take
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = row_of_pass(pass);
    if (WARP_ROWS % ROWS_A_PASS != 0 && row >= WARP_ROWS) break;
#pragma unroll
    for (int lanes = THREADS_PER_ROW / 2; lanes > 0; lanes /= 2)
      row_sum[pass] += __shfl_xor_sync(ALL_LANES, row_sum[pass], lanes);
    if (lane % THREADS_PER_ROW == 0) rows_smem[first_row + row] = row_sum[pass] == 0.f ? 0.f : 1.f / row_sum[pass];
  }
  if constexpr (!O_IN_SHARED) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int i = 0; i < DIM_TILES_KEPT; ++i) {
        const int d = column_warp + i * COLUMN_WARPS;
        if (d < DIM_TILES) Matrix::store(o_smem + m * 16 * O_ROW_BYTES + d * 64, O_ROW_BYTES, o_frag[m][i]);
      }
  }
  __syncthreads();  // O and the inverse sums of all rows are there
  for (int i = threadIdx.x; i < BLOCK_M * (HEAD_DIM / 8); i += THREADS) {
    const int row = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8);
    if (block_row + row >= seqlen_q) break;
    const float4* o = reinterpret_cast<const float4*>(smem + O_OFFSET + row * O_ROW_BYTES + chunk * 32);
    const float4 low = o[0], high = o[1];
    const float inverse = rows_smem[row];
    *reinterpret_cast<uint4*>(o_gmem + row * o_row_stride + chunk * 8) = make_uint4(
        pack2<Element>(low.x * inverse, low.y * inverse), pack2<Element>(low.z * inverse, low.w * inverse),
        pack2<Element>(high.x * inverse, high.y * inverse), pack2<Element>(high.z * inverse, high.w * inverse));
  }
