  // softmax.cuh, a part of the kernel's body: the online softmax of a tile of keys: m' = max(m, max_j S),
  // P = 2^((S - m') scale), l' = l 2^((m - m') scale) + Σ_j P; the factor 2^((m - m') scale) is for O.
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = row_of_pass(pass), in_row = lane % THREADS_PER_ROW;
    if (WARP_ROWS % ROWS_A_PASS != 0 && row >= WARP_ROWS) break;  // the same in all lanes of the warp
    float2 s[PAIRS];
    float maximum = row_max[pass];
    const int keys = mask.keys_of(block_row + first_row + row) - tile * BLOCK_N;  // it sees
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int key = 2 * (in_row + i * THREADS_PER_ROW);
      s[i] = *reinterpret_cast<const float2*>(s_smem + row * S_ROW_BYTES + key * 4);
      if ((tile + 1) * BLOCK_N > unmasked_keys) {
        if (key >= keys) s[i].x = NEGATIVE_INFINITY;
        if (key + 1 >= keys) s[i].y = NEGATIVE_INFINITY;
      }
      maximum = fmaxf(maximum, fmaxf(s[i].x, s[i].y));
    }
#pragma unroll
    for (int lanes = THREADS_PER_ROW / 2; lanes > 0; lanes /= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, lanes));
    const float finite = maximum == NEGATIVE_INFINITY ? 0.f : maximum;  // no key seen yet: -inf - 0, not -inf + inf
    const float shift = finite * softmax_scale_log2,
                factor = exp2_approx((row_max[pass] - finite) * softmax_scale_log2);
    row_max[pass] = maximum;
    row_sum[pass] *= factor;
    __syncwarp();  // all lanes have read their scores, which P overwrites
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int key = 2 * (in_row + i * THREADS_PER_ROW);
      const float even = exp2_approx(fmaf(s[i].x, softmax_scale_log2, -shift));
      const float odd = exp2_approx(fmaf(s[i].y, softmax_scale_log2, -shift));
      row_sum[pass] += even + odd;
      *reinterpret_cast<uint32_t*>(s_smem + row * S_ROW_BYTES + key * 2) = pack2<Element>(even, odd);
    }
    if constexpr (O_IN_SHARED) {
      if (factor != 1.f) {
        for (int i = in_row; i < DIM_TILES * 4; i += THREADS_PER_ROW) {
          float4& o = *reinterpret_cast<float4*>(o_smem + row * O_ROW_BYTES + i * 16);
          o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor;
        }
      }
    } else {
      if (in_row == 0) rows_smem[first_row + row] = factor;
    }
  }
