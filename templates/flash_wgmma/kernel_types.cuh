// kernel_types.cuh: what the constants of a template, its Operands and its Scales make of the parts of flash_wgmma.
// Needs flash_wgmma.cu.j2 or fp8_wgmma.cu.j2.
#include "device/copy/ring_position.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/mask.cuh"
#include "device/score.cuh"
#include "flash_wgmma/key_scales.cuh"
#include "flash_wgmma/key_split.cuh"
#include "flash_wgmma/shared_layout.cuh"

using Mask = KeyMask<CAUSAL && !ONE_QUERY, CAUSAL_LOWER_RIGHT, WINDOW>;  // ONE_QUERY: keys end with those it sees
using AllKeys = KeyMask<false, false>;                                   // of FULL blocks in a list
using Terms = ScoreTerms<Element, WINDOW, SOFTCAP, ALIBI, BIAS, SINK, OwnScore>;
static_assert(!VARLEN || !GROUP_ROWS || STORE == Store::ROWS, "rows past a sequence are another's");
static_assert(!SEQUSED || SCHEDULE != Schedule::BALANCED, "sequences of one length, or packed ones");
constexpr bool SHARES_SEQUENCES = VARLEN && SCHEDULE == Schedule::BALANCED;
static_assert(!SHARES_SEQUENCES || (STORE == Store::ROWS && !CAUSAL_SKIP && !Scales::GIVEN),
              "blocks add up the columns of one another's rows");
static_assert(!KeyList::LISTED || (KEY_SPLIT == 1 && !GROUP_ROWS && SCHEDULE != Schedule::BALANCED && !CAUSAL_SKIP),
              "a block takes all tiles of a list");
// Warpgroups behind the last row of a sequence compute nothing: single tokens beside prompts have few rows of a tile.
constexpr bool PASSES = VARLEN && BLOCK_M > 64 && KEY_SPLIT == 1 && PART_TILES == 0 && !SHARES_SEQUENCES && !AHEAD &&
                        !KeyList::LISTED && !Scales::GIVEN;
constexpr bool LAST_FIRST = Mask::LAST_FIRST || KeyList::LISTED;  // the longest tiles of rows; most lists grow by rows
constexpr bool IN_PARTS = PART_TILES > 0;
// Tiles of keys by parts.
struct KeyParts {
  static __device__ __forceinline__ int of(int tile) { return tile / (IN_PARTS ? PART_TILES : 1); }
  static __device__ __forceinline__ int first_tile(int part) { return part * PART_TILES; }
  // The last tile of the part that a block with every KEY_SPLIT-th has before this one; negative where there is none.
  static __device__ __forceinline__ int tile_before(int part) { return first_tile(part - KEY_SPLIT + 1) - 1; }
};
static_assert(!IN_PARTS || SCHEDULE != Schedule::BALANCED || (KEY_SPLIT == 1 && !PARTS_IN_GLOBAL && !VARLEN),
              "a block goes on with the sum of another's parts in shared memory");
static_assert(!IN_PARTS || (!KeyList::LISTED && FLUSH_TILES == 0), "parts are added up in turn, by one thread each");
static_assert(!FEW_ROWS || KEY_SPLIT == 1 || IN_PARTS, "what adds up other results takes those of all warps");
constexpr bool KEEPS = IN_PARTS && KEY_SPLIT == 1;                      // a block adds up all parts of its rows
constexpr bool SHARES_PARTS = KEEPS && SCHEDULE == Schedule::BALANCED;  // of the last tiles of rows with another block
constexpr int KEY_STEP = IN_PARTS ? 1 : KEY_SPLIT;                      // from a key tile of a block to its next
constexpr bool SLIDING = VARLEN || SEQUSED;      // sequences have keys of their own, by tensor maps that slide
constexpr int WARPGROUPS = (BLOCK_M + 63) / 64;  // consumers
constexpr int THREADS = 128 * (WARPGROUPS + Operands::HELPERS) + 32 * PRODUCER_WARPS;
constexpr bool PERSISTENT = SCHEDULE != Schedule::SINGLE;
constexpr int KEY_STEPS = BLOCK_N / Operands::STEP_KEYS;  // of P V
constexpr bool TWO_TILES = SHIFT_KEYS < BLOCK_N;          // that have all keys are copied and multiplied as one
static_assert(!TWO_TILES ||
                  (BLOCK_N < 2 * SHIFT_KEYS && !IN_PARTS && RESCALE == Rescale::LAZY_ROWS && POLYNOMIAL_EIGHTHS == 0),
              "between two tiles O is rescaled by a warp alone");
constexpr bool TWO_LEVELS = FLUSH_TILES > 0;                   // O is added up in fp32, of sums that tensor cores make
constexpr int OUT_DIM = VALUE_DIM / Operands::COLUMN_SHARERS;  // columns of O of a warpgroup
constexpr int SUMS = OUT_DIM / VALUE_PARTS / 2;                // accumulators of P V
static_assert(FLUSH_TILES <= 1 || SUM_IN_SHARED, "O in registers takes what comes after every tile");
static_assert(VALUE_PARTS == 1 || (TWO_LEVELS && !SUM_IN_SHARED), "parts are added to O in registers");
static_assert(VALUE_SUMS == 1 || VALUE_PARTS > 1, "a sum for a part");
static_assert(BLOCK_M == (FEW_ROWS ? 8 : 64 * WARPGROUPS) && BLOCK_N == Operands::STEP_KEYS * KEY_STEPS &&
                  HEAD_DIM % 8 == 0 && VALUE_DIM % 8 == 0,
              "whole wgmma tiles");
using Tiles = TensorTile<Operands::ROW_COLUMNS>;         // of K
using QueryTiles = TensorTile<Operands::QUERY_COLUMNS>;  // of Q as it comes
using ValueTiles = typename Operands::LoadedTiles;       // of V
using OutputTiles = TensorTile<VALUE_DIM>;               // of O
using Ring = RingPosition<STAGES>;
using Partial = PartialOutput<OUT_DIM / 2>;
constexpr bool IN_MEMORY = KEY_SPLIT > CLUSTER;  // blocks that share rows merge their results in global memory
// Places for O beside Q, where the next Q takes Q's.
constexpr bool O_IN_SHARED = SUM_IN_SHARED || (KEEPS && !PARTS_IN_GLOBAL);  // some O in fp32, then O in its place
constexpr int O_CHUNKS = !PERSISTENT || O_IN_SHARED ? 0 : STORE == Store::CHUNKS ? 2 : OutputTiles::CHUNKS;
// A cluster: results that a block takes, and pieces of each for each warpgroup. Of parts of the keys every block adds
// up some columns of all; else the first block those of the others.
constexpr int COLUMN_TILES = OUT_DIM / 8, SLOTS = CLUSTER == 1 ? 0 : IN_PARTS ? CLUSTER : CLUSTER - 1;
constexpr int OWN_TILES = (COLUMN_TILES + CLUSTER - 1) / CLUSTER,
              SLOT_PIECES = IN_PARTS ? 1 + OWN_TILES : Partial::PIECES;
// Up to so many batches are taken in the order of their keys.
constexpr int ORDERED_BATCHES = 32;
constexpr bool IN_ORDER = SEQUSED && SCHEDULE == Schedule::CLAIMED;
using Smem = SharedLayout<Operands, VALUE_DIM, WARPGROUPS, BLOCK_N, STAGES, O_CHUNKS, O_IN_SHARED, SLOTS, SLOT_PIECES,
                          SLIDING ? 8 : 4, Scales::Running::WORDS, IN_ORDER ? ORDERED_BATCHES : 0,
                          Scales::BY_KEY ? KeyScales<BLOCK_N>::BYTES : 0>;
static_assert(Smem::BYTES == SMEM_BYTES, "Python and CUDA disagree");

// Named barriers of the block.
constexpr int BARRIERS_READY = 0;
constexpr int TURN = 1;                    // [WARPGROUPS] ping-pong
constexpr int O_TILE = TURN + WARPGROUPS;  // [WARPGROUPS]
