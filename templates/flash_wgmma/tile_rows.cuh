// tile_rows.cuh: what the rows of a tile are: the queries of one head; or, GROUPED, the query heads of one K/V head
// below one another, query by query. Heads are then counted up to a power of two, so that no row costs a division. Rows
// of heads that there are not read zero, as do rows past the last query, and neither is stored. Needs VARLEN.
#include "device/ptx/element.cuh"
#include "device/schedule/tile_order.cuh"
#include "device/ptx/tma.cuh"

template <bool GROUPED> struct TileRows;

template <> struct TileRows<false> {
  int heads, count;  // heads that have rows of their own; rows of each

  __device__ __forceinline__ TileRows(int heads, int kv_heads, int seqlen_q) : heads(heads), count(seqlen_q) {}
  __device__ __forceinline__ int query(int row) const { return row; }
  __device__ __forceinline__ int queries_before(int end_row) const { return end_row; }
  __device__ __forceinline__ int head(const Tile& tile, int row) const { return tile.head; }
  __device__ __forceinline__ bool exists(int row) const { return row < count; }
  __device__ __forceinline__ bool exists(int row, int queries) const { return row < queries; }
  __device__ __forceinline__ int row_bits() const { return 0; }
  __device__ __forceinline__ void set_queries(int queries) { count = queries; }

  template <class Tiles>
  __device__ __forceinline__ void load(uint32_t tile_smem, const TensorMap& map, uint32_t barrier_smem, int first_row,
                                       const Tile& tile, int first_query = 0) const {
    Tiles::template load<64>(tile_smem, map, barrier_smem, first_row, tile.head, tile.batch);
  }
  template <class Tiles>
  __device__ __forceinline__ void store(const TensorMap& map, uint32_t tile_smem, int first_row,
                                        const Tile& tile) const {
    Tiles::template store<64>(map, tile_smem, first_row, tile.head, tile.batch);
  }
  template <class Tiles>
  __device__ __forceinline__ void store_chunk(const TensorMap& map, uint32_t chunk_smem, int chunk, int first_row,
                                              const Tile& tile) const {
    Tiles::store_chunk(map, chunk_smem, chunk, first_row, tile.head, tile.batch);
  }
};

template <> struct TileRows<true> {
  int heads, count, group, bits, queries;  // group: query heads of a K/V head, of 2^bits rows a query

  __device__ __forceinline__ TileRows(int all_heads, int kv_heads, int seqlen_q)
      : heads(kv_heads), group(all_heads / kv_heads), queries(seqlen_q) {
    bits = 32 - __clz(group - 1);  // not above: nvcc shows initializers to the host's compiler, which lacks __clz
    count = seqlen_q << bits;
  }
  __device__ __forceinline__ int query(int row) const { return row >> bits; }
  __device__ __forceinline__ int queries_before(int end_row) const { return (end_row + (1 << bits) - 1) >> bits; }
  __device__ __forceinline__ int head_in_group(int row) const { return row & ((1 << bits) - 1); }
  // Of rows of heads that there are not, the last one.
  __device__ __forceinline__ int head(const Tile& tile, int row) const {
    return tile.head * group + min(head_in_group(row), group - 1);
  }
  __device__ __forceinline__ bool exists(int row, int queries) const {
    return head_in_group(row) < group && query(row) < queries;
  }
  __device__ __forceinline__ bool exists(int row) const { return exists(row, queries); }
  __device__ __forceinline__ int row_bits() const { return bits; }
  __device__ __forceinline__ void set_queries(int of_sequence) { queries = of_sequence, count = of_sequence << bits; }

  // Through a map [batch, kv_heads, seqlen_q, group, HEAD_DIM], a box of 64 rows for each chunk of 64 columns. Of
  // packed sequences, which are one batch, the first query of this one counts; rows past its last read those of the
  // next.
  template <class Tiles>
  __device__ __forceinline__ void load(uint32_t tile_smem, const TensorMap& map, uint32_t barrier_smem, int first_row,
                                       const Tile& tile, int first_query = 0) const {
    mbarrier_arrive_expect_tx(barrier_smem, Tiles::bytes(64));
#pragma unroll
    for (int i = 0; i < Tiles::CHUNKS; ++i) {
      tma_load_5d(tile_smem + i * 64 * 128, map, barrier_smem, 64 * i, head_in_group(first_row),
                  first_query + query(first_row), tile.head, VARLEN ? 0 : tile.batch);
    }
  }
  template <class Tiles>
  __device__ __forceinline__ void store(const TensorMap& map, uint32_t tile_smem, int first_row,
                                        const Tile& tile) const {
#pragma unroll
    for (int i = 0; i < Tiles::CHUNKS; ++i) {
      tma_store_5d(map, tile_smem + i * 64 * 128, 64 * i, head_in_group(first_row), query(first_row), tile.head,
                   tile.batch);
    }
    tma_store_commit();
  }
  template <class Tiles>
  __device__ __forceinline__ void store_chunk(const TensorMap& map, uint32_t chunk_smem, int chunk, int first_row,
                                              const Tile& tile) const {
    tma_store_5d(map, chunk_smem, 64 * chunk, head_in_group(first_row), query(first_row), tile.head, tile.batch);
    tma_store_commit();
  }
};
