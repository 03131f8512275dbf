  // scores.cuh, a part of the kernel's body: a warp's rows of Q, and the scores of a tile of keys.
  Rows work(lane);
  KeyScales<SCALES, Rows, PAGED, BLOCK_N, WARP_KEYS, SMALL_PAGES> key_scales(KvScales{SCALE_ARGUMENTS}, keys, work,
                                                                             index);
  auto load_q = [&] {
    work.load_q(
        [&](int row) -> const Element* {
          return row < rows ? q_gmem + packed.offset(first_row + row, q_head_stride, q_row_stride) : nullptr;
        },
        Terms::ANY ? 1.f : softmax_scale_log2);
    key_scales.begin(keys);
  };
  auto scores = [&](const typename Rows::K& k, int tile) {
    const int place = warp_key + tile * BLOCK_N, key = KeyList::LISTED ? keys.listed_key(place) : place;
    const bool asked = listed.ask_predicate(terms, place / LIST_GRANULE);  // of PARTIAL blocks
    const bool by_mask = Mask::ROWS_DIFFER && (asked || !KeyList::LISTED);
    const int end = KeyList::LISTED ? seqlen_k : end_key;
    bool masked = KeyList::LISTED ? by_mask || key + WARP_KEYS > seqlen_k : key + WARP_KEYS > unmasked_keys;
    if constexpr (Mask::WINDOW) masked |= key < hidden_keys;
    key_scales.take(work);
    if (tile + 1 < keys.tiles) key_scales.load(keys, tile + 1);
    work.scores(
        k, softmax_scale_log2, masked,
        [&](int row) { return (by_mask ? mask.keys_of(packed.query(first_row + row), end) : end) - key; },
        [&](int row) { return Mask::WINDOW ? mask.first_key(packed.query(first_row + row)) - key : 0; }, terms,
        [&](int row, int step) {
          const int row_of_all = min(first_row + row, packed.heads * seqlen_q - 1);
          return terms.row(terms.head(index, first_head + packed.head(row_of_all)), packed.query(row_of_all),
                           key + step, seqlen_q, seqlen_k);
        },
        key_scales);
  };
