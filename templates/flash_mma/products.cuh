  // products.cuh, a part of the kernel's body: the two products of a tile of keys, and the softmax between them.
  RowState<ROW_TILES, VALUE_TILES> state;
  state.clear();
  LaneScales<SCALES, KEY_TILES, PAGED> key_scales(KvScales{SCALE_ARGUMENTS}, sequence_number, VARLEN ? 0 : batch,
                                                  kv_head, first_sequence_key, 1.f / softmax_scale_log2);
  auto first_key = [&](int tile) {  // of this warp
    return KeyList::LISTED ? key_tiles.first_key(tile) : first_block_key + tile * BLOCK_N + key_warp * WARP_KEYS;
  };
  // False once, false ever after.
  auto visible = [&](int tile) {
    return KeyList::LISTED || (!Mask::ROWS_DIFFER && KEY_WARPS == 1) || first_key(tile) < warp_keys;
  };
  SeenKeys<2 * ROW_TILES, BLOCK_N> seen;  // of the tile whose scores were computed last, if it is PARTIAL
  KeyList::wait_for_bits();
  auto scores = [&](Scores& s, int tile) {  // S = Q Kᵀ
    if (key_tiles.is_packed(tile)) key_tiles.load_seen(seen, warp_row + lane / 4, tile, lane);
    if constexpr (EIGHT_BITS) {
      key_scales.load_k(pages, first_key(tile) + lane % 4 * 2, seqlen_k);
      const uint32_t k_smem = k_ring_smem + tile % K_STAGES * K_TILE_BYTES;
      if constexpr (ALL_EIGHT) multiply_qk_all_eight<QueryElement, KeyLayout>(s, q_frag, k_smem);
      else multiply_qk_eight<KvElement, KeyLayout>(s, q_frag, k_smem);
      key_scales.scale(s, unit);
    } else {
      const uint32_t k_smem = k_ring_smem + tile % K_STAGES * K_TILE_BYTES;
      const KeptRows<ROW_TILES, Q_STEPS_KEPT> kept{q_frag};
      if constexpr (Q_PLACE == QPlace::SHARED)
        multiply_rows<Element, KeyLayout, DIM_STEPS>(s, SharedRows<KeyLayout>{q_smem}, k_smem);
      else multiply_rows<Element, KeyLayout, DIM_STEPS>(s, kept, k_smem);
    }
  };
  // s = s · scale - shift, masked where the tile crosses the diagonal or the last key.
  auto exponents = [&](Scores& s, int tile) {
    if constexpr (Terms::ANY) {
      const int lane_key = first_key(tile) + lane % 4 * 2;
      change_scores(s, terms, [&](int row) {
        return terms.row(head_terms, warp_row + lane / 4 + row, lane_key, seqlen_q, seqlen_k);
      });
    }
    const bool listed_partial = KeyList::LISTED && key_tiles.is_partial(tile);
    const bool masked = KeyList::LISTED ? listed_partial || first_key(tile) + WARP_KEYS > seqlen_k
                                        : first_key(tile) + WARP_KEYS > unmasked_keys ||
                                              (Mask::WINDOW && first_key(tile) < hidden_keys);
    if (key_tiles.is_packed(tile)) {
      key_tiles.mask_unseen(s, seen);
    } else if (masked) {
      const int lane_key = first_key(tile) + lane % 4 * 2;
      if (KeyList::LISTED && !listed_partial) {
        mask_scores(s, AllKeys(seqlen_q, seqlen_k).keys_from(warp_row + lane / 4, lane_key));
      } else {
        mask_scores(s, mask.keys_from(warp_row + lane / 4, lane_key));
      }
      if (listed_partial) key_tiles.mask_partial(s, terms, batch, head, warp_row + lane / 4, lane_key);
    }
    if constexpr (EIGHT_BITS) {
      key_scales.load_v(pages, first_key(tile) + lane % 4 * 2, seqlen_k);
      key_scales.weigh(s);
    }
    // The first key that a row sees may be in the tile behind those at the edge of a window, or in the first FULL one.
    const bool raise = masked || tile == 0 || Terms::MAY_HIDE ||
                       (Mask::WINDOW && first_key(tile) < hidden_keys + BLOCK_N) ||
                       (KeyList::LISTED && tile == key_tiles.partial_tiles);
    shift_scores<RESCALE>(state, s, softmax_scale_log2, raise);
  };
  auto accumulate = [&](Scores& s, int tile) {  // O += 2^s V
    const uint32_t v_smem = v_ring_smem + tile % V_STAGES * V_TILE_BYTES;
    if constexpr (EIGHT_BIT_WEIGHTS) {
      multiply_pv_all_eight<ValueLayout>(state, s, v_smem);
    } else if constexpr (EIGHT_BITS) {
      multiply_pv_eight<KvElement, ValueLayout, SUM_BY_MMA>(
          state, s, v_smem, [&](float p, int n, int e) { return key_scales.summed(p, n, e); });
    } else {
      multiply_pv<Element, ValueLayout, SUM_BY_MMA>(state, s, v_smem);
    }
  };
