  // scores.cuh, a part of the kernel's body: S = Q Kᵀ of a tile of keys; in a cluster each block's share is added up.
  float s[ROW_TILES][KEY_TILES][4];
  clear(s);
#pragma unroll 1
  for (int step = 0; step < K_STEPS; ++step) {
    const uint32_t k_smem = next_chunk(),
                   q_smem = Q_STREAMED ? k_smem + K_CHUNK_BYTES : smem_address + Q_OFFSET + step * Q_CHUNK_BYTES;
    add_rows<Element, QKLayout, DIM_CHUNK / 16>(s, SharedRows<QKLayout>{q_smem + q_lane}, k_smem + k_lane);
  }
  if constexpr (IN_CLUSTER) {
    // A fragment every THREADS · 16 bytes.
    const int partials = PARTIALS_OFFSET + tile % 2 * PARTIALS_BYTES + threadIdx.x * 16;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        *reinterpret_cast<float4*>(smem + partials + (m * KEY_TILES + n) * THREADS * 16) =
            make_float4(s[m][n][0], s[m][n][1], s[m][n][2], s[m][n][3]);
      }
    cluster_sync();  // all blocks' partial scores are visible to all; those of tile - 2 were read before
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
#pragma unroll 1  // unrolled, the loads of all blocks at once would take more registers than there are
    for (int rank = 0; rank < DV_SPLIT; ++rank) {  // in the same order in every block
      const uint32_t address = cluster_address(smem_address + partials, rank);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
          const float4 part = load_cluster_16(address + (m * KEY_TILES + n) * THREADS * 16);
          s[m][n][0] += part.x, s[m][n][1] += part.y, s[m][n][2] += part.z, s[m][n][3] += part.w;
        }
    }
  }
