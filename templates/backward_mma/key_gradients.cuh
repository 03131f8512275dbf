  // key_gradients.cuh, a part of the kernel's body: dK and dV of the block to global memory.
  if constexpr (QUERIES_SPLIT) {
    const int64_t number = tile_number(batch, kv_heads, kv_head, key_tiles, key_slot) * BLOCK_N;
    const int row_tile = key_warp * KEY_TILES;
    add_to_sums<VECTORS_ADDED, 2 * DIM_STEPS, 1, QUERY_WARPS>(dk, sums_gmem + dk_begin + number * (16 * DIM_STEPS),
                                                              row_tile, query_warp, dim_blocks, lane);
    add_to_sums<VECTORS_ADDED, 2 * VALUE_STEPS, 1, QUERY_WARPS>(dv, sums_gmem + dv_begin + number * (16 * VALUE_STEPS),
                                                                row_tile, query_warp, value_blocks, lane);
  } else {
    cp_async_wait<0>();  // without a query K and V are still on their way
    __syncthreads();     // no warp still reads what dK and dV overwrite
    store_rows<Element, Layout, QUERY_WARPS>(dk, softmax_scale, smem, warp_key, query_warp, dim_blocks, lane);
    store_rows<Element, ValueLayout, QUERY_WARPS>(dv, 1.f, smem + K_TILE_BYTES, warp_key, query_warp, value_blocks,
                                                  lane);
    __syncthreads();  // all of dK and dV is there
    copy_out<Layout, BLOCK_N, DIM_TILES, THREADS>(smem, dk_gmem, dk_row_stride, stored_keys);
    copy_out<ValueLayout, BLOCK_N, VALUE_TILES, THREADS>(smem + K_TILE_BYTES, dv_gmem, dv_row_stride, stored_keys);
  }
