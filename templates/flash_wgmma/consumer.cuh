// consumer.cuh: a consumer warpgroup: what it holds, its two products and its softmax, and how it goes through tiles of
// rows and of keys. Needs the constants of flash_wgmma.cu.j2.
#include "device/ptx/cluster.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/copy/tensor_tile.cuh"
#include "flash_wgmma/scores_again.cuh"
#include "flash_wgmma/values_apart.cuh"
#include "device/softmax/wgmma_scores.cuh"
#include "device/softmax/pair_softmax.cuh"
#include "device/softmax/wgmma_softmax.cuh"

struct RangeOfRows : Operands::Range {
  static constexpr bool LACKS_ROWS = FEW_ROWS;
};

// `Sums`: `OutputSums`, or what hands P over to warpgroups that have other columns of O.
struct Consumer : Sums {
  Rows& q;
  float (&s)[BLOCK_N / 2];
  uint32_t (&pairs)[Operands::PAIRS ? BLOCK_N / 4 : 1];
  float (&next)[BLOCK_N / 2];
  uint32_t (&p)[KEY_STEPS][4];
  RowState& state;
  HeadTerms<Element> (&head_terms)[GROUP_ROWS ? 2 : 1];
  BiasPair<Element> (&bias)[Terms::BIASED ? BLOCK_N / 4 : 1];
  KeyScales<Scales::BY_KEY ? BLOCK_N : 1>& key_scales;
  SeenKeys<2, BLOCK_N>& seen;
  const float softmax_scale_log2;
  const float cap_scale;  // SOFTCAP: the softmax scale / cap
  float score_scale;      // Scales::GIVEN, no SOFTCAP: the softmax scale of this tile of rows, log2 units
  uint32_t q_smem;
  uint64_t k_descriptor, v_descriptor;
  int key_tile;       // the next
  int listed_key;     // KeyList::LISTED: its first key, where it is masked or scores have terms
  Ring ring, before;  // places of the next K, and of the V that P is for
  Ring skipped;       // AHEAD: the first place of V that is passed over
  bool keys_came = false, values_came = false;  // FEW_ROWS: the next K, and V that P will be for
  float (&between)[2];
  bool rises_between;  // TWO_TILES: some row of the warp, by `between`
  TileScheduler& work;

  __device__ __forceinline__ Consumer(Rows& q, Fragments& f, TileScheduler& work, const Output& output,
                                      float softmax_scale_log2)
      : Sums(f, work, output),
        q(q),
        s(f.s),
        pairs(f.pairs),
        next(f.next),
        p(f.p),
        state(f.state),
        head_terms(f.head_terms),
        bias(f.bias),
        key_scales(f.key_scales),
        seen(f.seen),
        between(f.between),
        softmax_scale_log2(softmax_scale_log2),
        cap_scale(work.terms.given.score_scale),
        work(work) {}

  __device__ __forceinline__ void run() {
    if (STORE != Store::ROWS && thread == 0 && work.split == 0) prefetch_tensor_map(o_map);
    if constexpr (CLUSTER > 1) cluster_arrive();
    named_barrier_sync<THREADS>(BARRIERS_READY);  // the barriers are initialised
    if constexpr (CONSUMER_REGISTERS > 0) increase_registers<CONSUMER_REGISTERS>();
    q_smem = smem_address + warpgroup * Smem::Q_PLACE_BYTES;
    o_smem = smem_address + Smem::O + warpgroup * Smem::O_BYTES;
    k_descriptor = matrix_descriptor(smem_address + Smem::K, 0);
    v_descriptor = Operands::value_descriptor(smem_address + Smem::V);
    clear_parts();
    if constexpr (FEW_ROWS) lack_probabilities(p, uint32_t(work.seqlen_k) >> 31);  // 0
    if (PING_PONG && warpgroup == WARPGROUPS - 1) pass_turn();  // the first turn is the first warpgroup's
    if constexpr (AHEAD) rows_ahead();
    else rows_in_turn();
    if (STORE != Store::ROWS && thread == 0) tma_store_wait_read();  // shared memory must live until it is read
    KeyList::wait_for_bits();  // this launch does not end before the one that writes them
    // Takes the turn that the last round left, so that the barrier ends as it began.
    if (PING_PONG && warpgroup == 0) wait_for_turn();
  }

private:
  // What Q Kᵀ is added up in, then probabilities before they are rounded.
  __device__ __forceinline__ auto& scores() { return one_of<Operands::PAIRS>(pairs, s); }
  template <class Of> __device__ __forceinline__ void multiply_qk(Of& s, int stage) {  // S = Q Kᵀ
    wgmma_fence();
    const uint64_t k_stage = k_descriptor + descriptor_step(Smem::K_TILE_BYTES) * stage;
    // Of Q that is split K takes part twice.
    auto of_k = [&](int step) {
      return k_stage + descriptor_step(Tiles::step_offset(step % Tiles::DIM_STEPS, BLOCK_N));
    };
    wgmma_qk(s, q, of_k, false);
    wgmma_commit();
  }
  template <int PART = 0> __device__ __forceinline__ void multiply_pv(int stage) {  // O += P V
    wgmma_fence();
    const uint64_t v_stage = v_descriptor + descriptor_step(Smem::V_TILE_BYTES) * stage +
                             descriptor_step(Operands::value_columns(PART * 2 * SUMS));
    wgmma_pv(
        sum_of<PART>(), p, [&](int step) { return v_stage + descriptor_step(Operands::value_step(step)); },
        IN_PARTS ? !fresh : !TWO_LEVELS || (SUM_IN_SHARED && tiles_added > 0));
    wgmma_commit();
    if constexpr (IN_PARTS) fresh = false;
  }
  __device__ __forceinline__ void release(uint32_t barrier_smem) {
    if (lane == 0) mbarrier_arrive(barrier_smem);
  }  // this warp is done with what it guards
  __device__ __forceinline__ void wait_for_turn() {
    if constexpr (PING_PONG) named_barrier_sync<256>(TURN + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (PING_PONG) named_barrier_arrive<256>(TURN + (warpgroup + 1) % WARPGROUPS);
  }
  // The terms of the lane's rows g and g + 8 in the next tile of keys.
  __device__ __forceinline__ RowTerms<Element> row_terms(int row) const {
    const int lane_key = (KeyList::LISTED ? listed_key : key_tile * BLOCK_N) + lane % 4 * 2;
    return work.terms.row(head_terms[GROUP_ROWS ? row / 8 : 0], work.rows.query(lane_row(work.tile) + row), lane_key,
                          work.seqlen_q, work.seqlen_k);
  }
  // What a variant does to S.
  __device__ __forceinline__ void change_scores() { change_tile(s, bias, work.terms, row_terms(0), row_terms(8)); }
  // What lists say of the next tile, asked beside its product; begins to load the bits of a PARTIAL one.
  template <bool MASKED> __device__ __forceinline__ void look_up() {
    const ListedTiles<BLOCK_N> listed = work.listed();
    listed_key = listed.first_key_down(key_tile);
    if (MASKED && listed.is_packed(listed.up(key_tile))) {
      KeyList::wait_for_bits();
      listed.load_seen(seen, lane_row(work.tile), listed.up(key_tile), lane);
    }
  }
  // Of the tile of keys from `first` on.
  template <class Of> __device__ __forceinline__ void load_key_scales(const Of& scales, int first) {
    const auto& given = work.terms.given;
    const int batch = work.tile.batch;
    const KeyPages pages{given.table + batch * int64_t(given.table_pages), given.page_bits, given.kv_rows,
                         work.seqlen_k};
    key_scales.template load<PAGED>(scales.k, scales.v, pages, VARLEN ? 0 : batch, work.kv_head(work.tile),
                                    VARLEN ? work.sequence.first_key : 0, first, thread);
  }
  // Scales::BY_KEY: where the warpgroup has those of two tiles, and of that at hand.
  __device__ __forceinline__ float* scale_places() const {
    return reinterpret_cast<float*>(smem + Smem::KEY_SCALES + warpgroup * 2 * Smem::KEY_SCALES_BYTES);
  }
  __device__ __forceinline__ const float* scales_at_hand() const { return key_scales.at_hand(scale_places()); }
  __device__ __forceinline__ void mask_listed() {
    const int row = lane_row(work.tile);
    const FirstPair first{work.tile.batch, work.rows.head(work.tile, row), row, listed_key + lane % 4 * 2};
    work.listed().mask_tile(s, seen, key_tile, work.mask, work.terms, first);
  }
  // Whether the mask hides keys of the next tile from some row of the warpgroup.
  __device__ __forceinline__ bool hides_keys() const {
    const int end = (key_tile + 1) * BLOCK_N;
    return end > work.seqlen_k ||
           (Mask::ROWS_DIFFER && end > work.mask.last_key(work.rows.query(first_row(work.tile))) + 1) ||
           (Mask::WINDOW && key_tile * BLOCK_N < work.mask.first_key(work.rows.query(first_row(work.tile) + 63)));
  }
  // S = S masked, P = exponentials; returns whether O must be rescaled by `factor` before P V is added. OF_PART: FIRST
  // of a part of the keys behind which others are, so that most rows see the whole tile.
  template <bool FIRST, bool MASKED, bool OF_PART = false> __device__ __forceinline__ bool softmax(int stage) {
    level_scores(q);
    if constexpr (Scales::BY_BLOCK) take_score_scale(running.of_scores());
    if constexpr (Scales::BY_KEY)
      key_scales.template change<true, !Terms::ANY>(s, scales_at_hand(), scale_of_scores(), lane);
    if constexpr (Terms::ANY) change_scores();
    if constexpr (Scales::BY_KEY && Terms::ANY)
      key_scales.template change<false, true>(s, scales_at_hand(), scale_of_scores(), lane);
    const float sums_before[2] = {state.sum[0], state.sum[1]};
    if constexpr (KeyList::LISTED) {
      if constexpr (FIRST || MASKED) mask_listed();
    } else if (MASKED || (FIRST && (Mask::ROWS_DIFFER || (!OF_PART && (key_tile + 1) * BLOCK_N > work.seqlen_k)))) {
      if ((Terms::MAY_HIDE || OF_PART) && !hides_keys()) {  // with MAY_HIDE all tiles are MASKED
      } else if constexpr (GROUP_ROWS) {
        const auto low = work.mask.keys_from(work.rows.query(lane_row(work.tile)), 0),
                   high = work.mask.keys_from(work.rows.query(lane_row(work.tile) + 8), 0);
        mask_scores(scores(), key_tile * BLOCK_N, KeysOfTwo{low, high}, lane);
      } else {
        mask_scores(scores(), key_tile * BLOCK_N, work.mask.keys_from(lane_row(work.tile), 0), lane);
      }
    }
    if constexpr (Operands::PAIRS) {
      static_assert(!Operands::PAIRS || (!Terms::ANY && !KeyList::LISTED), "what changes scores has them in fp32");
      softmax_of_pairs<Operands::LINES, FIRST || MASKED, RangeOfRows>(state, pairs, scale_of_scores(), factor);
      if constexpr (Scales::BY_BLOCK && !FIRST) change_factor();
      return true;
    }
    if constexpr (TWO_TILES && FIRST) {
      softmax_of_two<SHIFT_KEYS / 2, RangeOfRows>(state, s, scale_of_scores(), between, rises_between);
      return false;
    }
    const bool rescale = softmax_tile<RESCALE, LAZY_OCTAVES, POLYNOMIAL_EIGHTHS % 8, FIRST, MASKED, RangeOfRows>(
        state, s, scale_of_scores(), factor, [&] {
          if constexpr (looks_back(RESCALE)) {
            scores_again<Operands, BLOCK_N>(s, q, q_smem, smem_address + Smem::K + stage * Smem::K_TILE_BYTES,
                                            thread / 32, lane);
          }
          if constexpr (Terms::ANY) change_scores();
        });
    if constexpr (Scales::BY_BLOCK && !FIRST) change_factor();
    if constexpr (Scales::BY_KEY) {  // ALWAYS: all sums are multiplied by the factor
#pragma unroll
      for (int row = 0; row < 2; ++row) state.sum[row] = FIRST ? sums_before[row] : sums_before[row] * factor[row];
      key_scales.add(state.sum, s, scales_at_hand(), lane);
    }
    return rescale;
  }
  // O has the unit of V's scale of the tile before, and gets that of this one.
  __device__ __forceinline__ void change_factor() { factor[0] *= running.change, factor[1] *= running.change; }
  // Of scores with their scales; with a SOFTCAP that of what is capped.
  __device__ __forceinline__ void take_score_scale(float scale) {
    if constexpr (Terms::CAPPED) work.terms.given.score_scale = scale;
    else score_scale = scale;
  }
  __device__ __forceinline__ float scale_of_scores() const {
    return Scales::GIVEN && !Terms::CAPPED ? score_scale : softmax_scale_log2;
  }
  // Not all rows of the warpgroup see this tile and the first key of the one before: a row's first visible key may be
  // in this one.
  __device__ __forceinline__ bool crosses_diagonal() const {
    return Mask::ROWS_DIFFER &&
           (key_tile + KEY_STEP) * BLOCK_N > work.mask.last_key(work.rows.query(first_row(work.tile)));
  }
  __device__ __forceinline__ void start_pv() {
    if constexpr (!HAS_COLUMNS) return;
    if (!Operands::VALUES_IN_KEYS && (!FEW_ROWS || !values_came))
      mbarrier_wait(barrier(Smem::V_FULL, before.stage), before.parity);
    multiply_pv(before.stage);
  }
  // P V of the columns of V from PART on. What came of the part before is added to O first, or with two sums beside it.
  template <int PART> __device__ __forceinline__ void rest_of_parts() {
    if constexpr (VALUE_SUMS > 1) multiply_pv<PART>(before.stage);
    wgmma_wait<VALUE_SUMS - 1>();
    pin_registers(sum_of<PART - 1>());
    add_to_output<PART - 1>();
    pin_registers(sum_of<PART - 1>());  // has been read before the next product
    if constexpr (VALUE_SUMS == 1) multiply_pv<PART>(before.stage);
    if constexpr (PART + 1 < VALUE_PARTS) rest_of_parts<PART + 1>();
  }
  template <bool NEWER = false> __device__ __forceinline__ void finish_pv() {
    if constexpr (!HAS_COLUMNS) return;
    if constexpr (VALUE_PARTS > 1) rest_of_parts<1>();
    wgmma_wait<NEWER>();  // O is there, and P may be overwritten
    pin_registers(sum_of<VALUE_PARTS - 1>());
    release(barrier(Smem::V_EMPTY, before.stage));
    if constexpr (TWO_LEVELS) add_up();
  }
  __device__ __forceinline__ void start_qk() {
    if (!FEW_ROWS || !keys_came) mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);
    multiply_qk(scores(), ring.stage);
  }
  // FEW_ROWS, whose few exponentials hide no wait: asks beside them what has come.
  __device__ __forceinline__ void look_ahead() {
    Ring next = ring;
    next.advance();
    values_came = mbarrier_test_wait(barrier(Smem::V_FULL, ring.stage), ring.parity);
    keys_came = mbarrier_test_wait(barrier(Smem::K_FULL, next.stage), next.parity);
  }
  // Waits for S while a newer product, if any, is under way, and returns what its softmax does.
  template <bool FIRST, bool MASKED, bool NEWER, bool OF_PART = false> __device__ __forceinline__ bool finish_qk() {
    // Beside the product.
    if constexpr (Scales::BY_BLOCK) running.take(smem_address + Smem::TOLD + Smem::TOLD_BYTES * ring.stage, lane);
    if constexpr (KeyList::LISTED && (FIRST || MASKED || Terms::ANY)) look_up<FIRST || MASKED>();
    if constexpr (Scales::BY_KEY) {
      key_scales.take(scale_places(), thread, [&] { meet(); });
      load_key_scales(scales, (key_tile - KEY_STEP) * BLOCK_N);
    }
    if constexpr (Terms::BIASED) load_bias(bias, work.terms, row_terms(0), row_terms(8));
    wgmma_wait<NEWER>();  // S is there
    pin_registers(scores());
    if constexpr (FEW_ROWS) look_ahead();
    if constexpr (!OVERLAP) pass_turn();
    if constexpr (!looks_back(RESCALE) && !Operands::VALUES_IN_KEYS) release(barrier(Smem::K_EMPTY, ring.stage));
    // The product has used Q in registers: a load is under way after its instruction, and wgmma of another block can
    // keep it from shared memory for longer than the copy of the next Q takes. The fence orders these reads before the
    // copy's writes.
    if constexpr (FIRST && !OF_PART && PERSISTENT && Q_IN_REGISTERS) {
      fence_proxy_async(), __syncwarp(), release(barrier(Smem::Q_EMPTY, warpgroup));
    }
    const bool rescale = softmax<FIRST, MASKED, OF_PART>(ring.stage);
    key_tile -= KEY_STEP;
    if constexpr (looks_back(RESCALE)) release(barrier(Smem::K_EMPTY, ring.stage));
    return rescale;
  }
  // Q Kᵀ of a tile of keys, then its softmax, with OVERLAP during P V of the one before, else followed by its own P V.
  template <bool FIRST, bool MASKED, bool BESIDE = OVERLAP && !FIRST> __device__ __forceinline__ void step() {
    if constexpr (BESIDE || !OVERLAP) wait_for_turn();
    if constexpr (BESIDE && Operands::VALUES_IN_KEYS) start_pv();
    start_qk();
    // With V in K's tiles their place is free before the softmax.
    if constexpr (BESIDE && Operands::VALUES_IN_KEYS) hand_over(), finish_pv<true>();
    else if constexpr (BESIDE) start_pv(), pass_turn();
    const bool rescale = finish_qk<FIRST, MASKED, BESIDE && !Operands::VALUES_IN_KEYS>();
    if constexpr (BESIDE && !Operands::VALUES_IN_KEYS) finish_pv();
    round_probabilities<FIRST>(p, scores(), rescale);
    if (!FIRST && rescale) rescale_output();
    before = ring;
    ring.advance();
    if constexpr (FIRST) rescale_between();
    if constexpr (!OVERLAP) start_pv(), finish_pv();
  }
  // TWO_TILES, once P of the first tile is rounded and O is 0.
  __device__ __forceinline__ void rescale_between() {
    if constexpr (TWO_TILES) {
      if (!rises_between) return;
      mbarrier_wait(barrier(Smem::V_FULL, before.stage), before.parity);
      values_apart<Operands, BLOCK_N, SHIFT_KEYS / Operands::STEP_KEYS>(
          o, p, smem_address + Smem::V + before.stage * Smem::V_TILE_BYTES, lane);
      scale_rows(o, between);
    }
  }
  // SCORES_AHEAD: Q Kᵀ of the next tile of keys beside the softmax of this one, then its P V. For the last tile,
  // `first`, its own once more, for nothing: ptxas would wait at a branch around a product. No kernel with PAIRS has
  // it: `pairs` stands there so that the types fit.
  template <bool FIRST> __device__ __forceinline__ void step_ahead(int first) {
    Ring behind = ring;
    if (key_tile > first) behind.advance(), mbarrier_wait(barrier(Smem::K_FULL, behind.stage), behind.parity);
    multiply_qk(one_of<Operands::PAIRS>(pairs, next), behind.stage);
    const bool rescale = softmax<FIRST, false>(ring.stage);
    --key_tile;
    round_probabilities<FIRST>(p, s, rescale);
    if (!FIRST && rescale) rescale_output();
    before = ring;
    ring.advance();
    pin_registers(o);  // rescaled before the product's fence
    start_pv();
    finish_pv();
    pin_registers(next);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = next[i];
  }
  __device__ __forceinline__ void keys_ahead() {
    const int first = work.first_key_tile();
    start_qk();
    wgmma_wait<0>();
    pin_registers(s);
    step_ahead<true>(first);
#pragma unroll 1
    while (key_tile >= first) step_ahead<false>(first);
  }
  // The next tile of rows, once Q of this warpgroup has come; false if there is none.
  __device__ __forceinline__ bool take_tile(int round) {
    __syncwarp();  // the thread that stored the last tile is back: wgmma wants whole warps
    mbarrier_wait(barrier(Smem::Q_FULL, warpgroup), round % 2);
    return work.next(round);  // by all lanes, before lane 0 releases Q
  }
  __device__ __forceinline__ void meet() const { named_barrier_sync<128>(O_TILE + warpgroup); }  // of the warpgroup
  // MAKES_ROWS: makes Q what is multiplied; returns the scale of the warp's rows.
  template <class Of> __device__ __forceinline__ float round_rows(Of& rows) const {
    unsigned char* const tile = smem + (q_smem - smem_address);
    if constexpr (Operands::MAKES_ROWS && VARLEN && GROUP_ROWS) clear_others(tile);
    if constexpr (Operands::MAKES_ROWS) return rows.round(tile, q_smem, thread, [&] { meet(); });
    return 1.f;
  }
  template <class Of> __device__ __forceinline__ void level_scores(const Of& rows) {
    if constexpr (Operands::LEVELS) rows.level(s);
  }
  // Rows that are read with the sequence's last ones, of the next sequence or of nobody, have no part in their scale.
  __device__ __forceinline__ void clear_others(unsigned char* tile) const {
    const int row = thread / 2;
    if (!work.rows.exists(first_row(work.tile) + row)) {
#pragma unroll
      for (int i = 0; i < 4 * QueryTiles::CHUNKS; ++i)
        *reinterpret_cast<uint4*>(tile + (i / 4 * 64 + row) * 128 + thread % 2 * 64 + i % 4 * 16) = {};
    }
    __syncwarp();  // lanes read next what others cleared
  }
  __device__ __forceinline__ void begin_rows() {
    state.clear();
    if constexpr (Terms::ADDED) {
#pragma unroll
      for (int i = 0; i < (GROUP_ROWS ? 2 : 1); ++i)
        head_terms[i] = work.terms.head(work.tile.batch, work.rows.head(work.tile, lane_row(work.tile) + 8 * i));
    }
    const float unit = round_rows(q) * (Terms::CAPPED ? cap_scale : softmax_scale_log2);
    if constexpr (Scales::BY_BLOCK) {
      running.begin_rows(scales, work.tile.batch, work.tile.head, min(first_row(work.tile), work.seqlen_q - 1), unit);
    } else if constexpr (Scales::GIVEN) {
      const float scale = not_zero(unit * scales.of_scores(work.tile.batch, work.kv_head(work.tile)));
      take_score_scale(Scales::BY_KEY ? fmaxf(scale, LEAST_DIVISOR) : scale);
    }
    if constexpr (!Operands::MAKES_ROWS) q.load(q_smem, thread / 32, lane);
    // All lanes have read the warp's rows of Q, which its rows of O may overwrite.
    if constexpr (Q_IN_REGISTERS) __syncwarp();
    key_tile = work.last_key_tile();
    if constexpr (CAUSAL_SKIP) {
      if constexpr (AHEAD) skipped = ring;
      const int last = max(0, work.mask.last_key(work.rows.query(first_row(work.tile) + 63))) / BLOCK_N;
      const int first = Mask::WINDOW ? work.first_key_tile(work.tile.row_block) : 0;
      // Not over the last that the producer brings, which `step` waits for: of every KEY_SPLIT-th, that may be behind
      // `first`.
      for (; key_tile > last && key_tile >= first + KEY_SPLIT; key_tile -= KEY_SPLIT) {
        mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);  // released unread, but not before it came
        release(barrier(Smem::K_EMPTY, ring.stage));
        wait_for_turn();
        pass_turn();
        if constexpr (!AHEAD) {
          mbarrier_wait(barrier(Smem::V_FULL, ring.stage), ring.parity);
          release(barrier(Smem::V_EMPTY, ring.stage));
        }
        ring.advance();
      }
    }
    if constexpr (Scales::BY_KEY) load_key_scales(scales, key_tile * BLOCK_N);
  }
  // All tiles of keys but the first.
  __device__ __forceinline__ void rest_of_keys() {
    if constexpr (KeyList::LISTED) {
      const ListedTiles<BLOCK_N> listed = work.listed();
      const bool is_any_cut = listed.has_cut_block<Mask>(work.terms, work.seqlen_k, lane);
#pragma unroll 1
      while (key_tile >= 0) {
        const bool is_cut = is_any_cut && listed.first_key_down(key_tile) + BLOCK_N > work.seqlen_k;
        const bool whole = !listed.may_hide<Mask>(work.terms, key_tile) && !is_cut;
        if (whole && !Terms::MAY_HIDE) step<false, false>();
        else step<false, true>();
      }
      return;
    }
    // From here on it only counts: no other tile is masked. Terms and scales ask which keys are in it.
    constexpr bool ALIKE = SCHEDULE == Schedule::BALANCED && !VARLEN && !IN_PARTS,
                   COUNTS = ALIKE && !Terms::ADDED && !Scales::BY_BLOCK && !Scales::BY_KEY;
    if constexpr (COUNTS) key_tile -= work.range.first();
    if constexpr (ALIKE && !COUNTS) {
#pragma unroll 1
      while (key_tile >= work.range.first()) step<false, Terms::MAY_HIDE>();
      return;
    }
    const int first = SHARES_SEQUENCES || ONE_QUERY || SHARES_PARTS ? work.range.first()
                      : Mask::WINDOW                                ? work.first_key_tile(work.tile.row_block)
                                                                    : 0;
    if constexpr (IN_PARTS) {
#pragma unroll 1
      for (;;) {
        const int part = KeyParts::of(key_tile + 1);
        rest_of_tiles(max(first, KeyParts::first_tile(part)));
        if (CLUSTER > 1 || KeyParts::tile_before(part) < first) return;  // a part each in a cluster
        begin_part(part);
      }
    }
    rest_of_tiles(first);
  }
  // `step` of the first tile of a part, beside the last P V of the one before, `before_it`.
  __device__ __forceinline__ void begin_part(int before_it) {
    constexpr bool BESIDE = OVERLAP && !PARTS_IN_GLOBAL;  // else there are no registers for S beside what is added
    key_tile = KeyParts::tile_before(before_it);
    if constexpr (OVERLAP) wait_for_turn();
    if constexpr (BESIDE) start_qk();
    if constexpr (OVERLAP) start_pv();
    const RowState of_part = state;
    state.clear();
    if constexpr (BESIDE) pass_turn(), finish_qk<true, false, true, true>();
    if constexpr (OVERLAP) finish_pv();
    __syncwarp();  // the lane that released V is back: wgmma wants whole warps
    if constexpr (KEEPS) keep_part(of_part);
    else leave_part(before_it, of_part, o);
    if constexpr (!BESIDE) {
      __syncwarp();
      start_qk();
      if constexpr (OVERLAP) pass_turn();
      finish_qk<true, false, false, true>();
      __syncwarp();
    }
    fresh = true;
    Operands::pack(p, s);
    before = ring;
    ring.advance();
    if constexpr (!OVERLAP) start_pv(), finish_pv(), __syncwarp();  // the lane that released V is back
  }
  // Tiles of keys down to `first`.
  __device__ __forceinline__ void rest_of_tiles(int first) {
    if constexpr (Mask::WINDOW) {
      const int whole = Terms::MAY_HIDE
                            ? key_tile + 1
                            : (work.mask.first_key(work.rows.query(first_row(work.tile) + 63)) + BLOCK_N - 1) / BLOCK_N;
#pragma unroll 1
      for (;;) {  // twice at most: tiles at the upper edge and whole ones, then those at the lower edge
#pragma unroll 1
        while (key_tile >= first && (key_tile < whole || crosses_diagonal())) step<false, true>();
        if (key_tile < first) return;
#pragma unroll 1
        while (key_tile >= max(first, whole)) step<false, false>();
      }
    }
    if constexpr (Mask::ROWS_DIFFER || Terms::MAY_HIDE) {
#pragma unroll 1
      while (key_tile >= first && (Terms::MAY_HIDE || crosses_diagonal())) step<false, true>();
    }
    if constexpr (Terms::MAY_HIDE) return;
#pragma unroll 1
    while (key_tile >= first) step<false, false>();
  }
  // AHEAD: each tile of rows begins beside the end of the one before.
  __device__ __forceinline__ void rows_ahead() {
    if (take_tile(0) || !VARLEN) {  // a block has one at least, but where sequences are packed
      begin_rows();
      start_qk();
      finish_qk<true, false, false>();
      for (int round = 1;; ++round) {
        for (; CAUSAL_SKIP && skipped.stage != ring.stage; skipped.advance()) {  // fewer than STAGES: stages tell
          mbarrier_wait(barrier(Smem::V_FULL, skipped.stage), skipped.parity);
          release(barrier(Smem::V_EMPTY, skipped.stage));
        }
        Operands::pack(p, scores());
        before = ring;
        ring.advance();
        clear_output();
        take_parts(work.range);
        rescale_between();
        rest_of_keys();
        const Tile last_tile = work.tile;
        const KeyRange last_range = work.range;
        const Sequence last_sequence = work.sequence;
        if (!take_tile(round)) {  // no branch around products under way: ptxas would wait for each (C7514)
          start_pv();
          finish_pv();
          complete_output(state);
          add_parts(state);
          finish_rows(last_tile, last_sequence, last_range, state, o);
          break;
        }
        RowState last_state = state;
        begin_rows();
        wait_for_turn();
        start_qk();
        start_pv();
        pass_turn();
        finish_qk<true, false, true>();
        finish_pv();
        complete_output(last_state);
        add_parts(last_state);
        finish_rows(last_tile, last_sequence, last_range, last_state, o);
        __syncwarp();  // the thread that stored these rows is back: wgmma wants whole warps
      }
    }
  }
  // PASSES: all tiles of keys, of which this warpgroup has no rows: they are released as they come.
  __device__ __forceinline__ void pass_keys() {
    if constexpr (PERSISTENT) release(barrier(Smem::Q_EMPTY, warpgroup));
    const int last = work.last_key_tile(), first = work.first_key_tile();
    for (key_tile = last; key_tile >= first; --key_tile, ring.advance()) {
      mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);
      release(barrier(Smem::K_EMPTY, ring.stage));
      if (!OVERLAP || key_tile < last) wait_for_turn(), pass_turn();
      mbarrier_wait(barrier(Smem::V_FULL, ring.stage), ring.parity);
      release(barrier(Smem::V_EMPTY, ring.stage));
    }
  }
  __device__ __forceinline__ void rows_in_turn() {
    for (int round = 0;; ++round) {
      if (!take_tile(round)) break;
      if constexpr (PASSES) {
        if (first_row(work.tile) >= work.rows.count) {
          pass_keys();
          if constexpr (PERSISTENT) continue;
          break;
        }
      }
      begin_rows();
      clear_output();
      take_parts(work.range);
      if constexpr (SCORES_AHEAD) keys_ahead();
      else step<true, false>(), rest_of_keys();
      if constexpr (PERSISTENT && !Q_IN_REGISTERS) release(barrier(Smem::Q_EMPTY, warpgroup));
      if constexpr (OVERLAP) {
        start_pv();
        end_sums(state);
        finish_pv();
      }
      complete_output(state);
      if constexpr (IN_MEMORY) {
        merge_rows(state, o, IN_PARTS ? KeyParts::of(key_tile + 1) : work.split);
        break;
      }
      if constexpr (CLUSTER > 1 && IN_PARTS) {
        merge_columns(state, o);
        break;
      }
      add_parts(state);
      if constexpr (CLUSTER > 1) {
        const int slots = Smem::PARTIALS + warpgroup * Partial::BYTES, full = barrier(Smem::PARTIALS_FULL, 0);
        if (!Partial::gather<CLUSTER>(smem + slots, smem_address + slots, Smem::SLOT_BYTES, full, work.split, o, state,
                                      thread))
          break;
      }
      finish_rows(work.tile, work.sequence, work.range, state, o);
      if constexpr (!PERSISTENT) break;
    }
  }
};
