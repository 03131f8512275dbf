// shared_layout.cuh: the shared memory of both kernels of large_head. Needs the constants of large_head.cu.j2.
//
// Q, the stages of K, of V, where scores are added up: each warp's, a partial tile and what ClusterSum
// needs; scores that become probabilities, two factors per row. For tensor cores rows are padded to strides at which
// the 8 lanes of a phase of a load meet all 32 banks: rows g and g + 1 of Q and K in quarters of 64 bytes, rows 2t of V
// in pairs of 16, rows g of P in 32.
constexpr bool PADDED = MATH != Math::FMA, SPREAD = MATH == Math::TF32X3_SPREAD, K_IN_SHARED = STAGES > 0 && !SPREAD;
constexpr int QK_STRIDE = SLICE + (PADDED ? 16 : 0), V_STRIDE = SLICE + (PADDED ? 4 : 0),
              SCORE_STRIDE = BLOCK_N + (PADDED ? 8 : 0);
constexpr int Q_ELEMENTS = Q_IN_SHARED ? BLOCK_M * QK_STRIDE : 0;
constexpr int K_TILE = BLOCK_N * QK_STRIDE, V_TILE = BLOCK_N * V_STRIDE,
              SCORE_TILE = BLOCK_M * SCORE_STRIDE;  // elements, the last floats
constexpr int K_STAGES = FUSED && K_IN_SHARED ? STAGES : 0;
constexpr int SHARED_ELEMENTS = (FUSED ? Q_ELEMENTS : 0) + K_STAGES * K_TILE + STAGES * V_TILE;
constexpr int SUMS_FLOATS = SPREAD ? WARPS * SCORE_ROWS * SCORE_KEYS : 0;
using ClusterScores = ClusterSum<DIM_SPLIT, SCORES / 4, THREADS>;
constexpr int PARTIAL_FLOATS = IN_CLUSTER ? SCORE_TILE + ClusterScores::BYTES / 4 : 0;
// The partial scores in global memory are added up in SUM_GROUPS tiles, that all threads have some, and these by the
// softmax.
constexpr int SUM_GROUPS = FUSED || SCORES >= 4 * THREADS     ? 1
                           : DIM_SPLIT < 4 * THREADS / SCORES ? DIM_SPLIT
                                                              : 4 * THREADS / SCORES;
constexpr int PARTIALS = (DIM_SPLIT + SUM_GROUPS - 1) / SUM_GROUPS;  // of a tile in a group
constexpr int FLOATS = (FUSED ? SUMS_FLOATS : 0) + PARTIAL_FLOATS + SUM_GROUPS * SCORE_TILE + 2 * BLOCK_M;
static_assert(SHARED_ELEMENTS * int(sizeof(Element)) + FLOATS * 4 == SMEM_BYTES, "Python and CUDA disagree");
constexpr int SCORES_ELEMENTS = Q_ELEMENTS + (K_IN_SHARED ? K_TILE : 0);
static_assert(SCORES_ELEMENTS * int(sizeof(Element)) + SUMS_FLOATS * 4 == SCORES_SMEM_BYTES,
              "Python and CUDA disagree");
