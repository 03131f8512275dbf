// What a launch needs, worked out from the shapes of a call in plain C++: no CUDA, so that tests run it anywhere.
// A text of evoattn that is put into a namespace of its own; needs <cmath>, <cstddef>, <cstdint> and
// <initializer_list>.

struct Strides {
  int64_t batch, head, row;  // elements; the last dimension is contiguous
};

// One call of O = softmax(Q K^T * softmax_scale + mask) V. Q and O are [batch, heads, seqlen_q, HEAD_DIM], K and V
// [batch, kv_heads, seqlen_k, HEAD_DIM]; query head h reads K/V head h / (heads / kv_heads).
struct Problem {
  int batch, heads, kv_heads, seqlen_q, seqlen_k;
  Strides q, k, v, o;
  double softmax_scale;
};

// Where the tensors lie on the device. `lse` (float, [batch, heads, seqlen_q], contiguous) only where WRITES_LSE.
struct Tensors {
  const void *q, *k, *v;
  void* o;
  float* lse;
};

// What every kernel is compiled for; each family adds its own to it.
struct Compiled {
  int head_dim, element_bytes;
  int map_dtype;  // CUtensorMapDataType
  bool writes_lse;
};

enum BufferId { Q, K, V, O, LSE, SCRATCH };  // SCRATCH + i is the plan's scratch buffer i

// Boxes that the tensor copy engine moves: sizes and box in elements, strides in bytes of all dimensions but the
// innermost, all innermost first; 128-byte swizzle.
struct TensorMap {
  int buffer, dtype, rank;
  uint64_t shape[5], strides_bytes[4];
  uint32_t box[5];
};

struct Argument {
  enum Kind { INT32, INT64, FLOAT32, BUFFER, TENSOR_MAP } kind;
  int64_t integer;  // or the BufferId
  float real;
  TensorMap map;
};

struct Size {
  int64_t x, y, z;
};

struct Launch {
  const char* kernel;
  Size grid, block, cluster;  // the cluster is compiled into the kernel
  int smem_bytes;
  bool overlaps;  // may begin before the launch before it has ended
  int count;
  Argument args[32];

  void add(const Argument& a) { args[count++] = a; }
  void int32(int64_t value) { add({Argument::INT32, value, 0, {}}); }
  void int64(int64_t value) { add({Argument::INT64, value, 0, {}}); }
  void float32(double value) { add({Argument::FLOAT32, 0, float(value), {}}); }
  void buffer(int id) { add({Argument::BUFFER, id, 0, {}}); }
  void map(const TensorMap& value) { add({Argument::TENSOR_MAP, 0, 0, value}); }
  void strides(const Strides& s) { int64(s.batch), int64(s.head), int64(s.row); }
};

struct Scratch {
  const char* name;
  int64_t bytes;
  bool starts_zeroed;  // holds zeros before the first launch; the kernels leave zeros in it
};

struct Plan {
  const char* refusal;  // a sentence, if the family's kernels cannot serve the problem
  int launches, scratches;
  Launch launch[3];
  Scratch scratch[4];

  Launch& add(const char* kernel, Size grid, int64_t threads, int smem_bytes) {
    Launch& added = launch[launches++];
    added.kernel = kernel, added.grid = grid, added.block = {threads, 1, 1}, added.cluster = {1, 1, 1};
    added.smem_bytes = smem_bytes;
    return added;
  }
  int add_scratch(const char* name, int64_t bytes, bool starts_zeroed = false) {
    scratch[scratches] = {name, bytes, starts_zeroed};
    return SCRATCH + scratches++;
  }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// Kernels take exponentials base 2.
inline double softmax_scale_log2(const Problem& p) { return p.softmax_scale * 1.4426950408889634; }

// The arguments that fused kernels begin with.
inline void attention_args(Launch& launch, const Problem& p) {
  for (int id : {Q, K, V, O}) launch.buffer(id);
  for (int n : {p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k}) launch.int32(n);
  for (const Strides& s : {p.q, p.k, p.v, p.o}) launch.strides(s);
  launch.float32(softmax_scale_log2(p));
}

constexpr int CHUNK_BYTES = 128;  // a row of a box under the swizzle
constexpr int CHUNK_COLUMNS = 64;

// The map of tiles of `rows` rows of a tensor: all 128-byte chunks of a row in one box if the row is whole chunks,
// else, or `by_chunks`, a box a chunk. Columns are of 16 bits: an element of fp32 is two of them.
inline TensorMap tile_map(const Problem& p, const Compiled& c, int id, int rows, bool by_chunks = false) {
  const bool of_queries = id == Q || id == O;
  const Strides& s = id == Q ? p.q : id == K ? p.k : id == V ? p.v : p.o;
  const uint64_t seqlen = of_queries ? p.seqlen_q : p.seqlen_k, heads = of_queries ? p.heads : p.kv_heads;
  const uint64_t batch = p.batch, columns = c.head_dim * c.element_bytes / 2;
  const uint64_t row = s.row * c.element_bytes, head = s.head * c.element_bytes, entry = s.batch * c.element_bytes;
  const uint32_t tile = rows;
  if (columns % CHUNK_COLUMNS)
    return {id, c.map_dtype, 4, {columns, seqlen, heads, batch}, {row, head, entry}, {CHUNK_COLUMNS, tile, 1, 1}};
  const uint64_t chunks = columns / CHUNK_COLUMNS;
  const uint32_t boxed = by_chunks ? 1 : chunks;
  return {id,
          c.map_dtype,
          5,
          {CHUNK_COLUMNS, seqlen, chunks, heads, batch},
          {row, CHUNK_BYTES, head, entry},
          {CHUNK_COLUMNS, tile, boxed, 1, 1}};
}

// Rows of a query where the query heads of a K/V head are rows: their number up to a power of two.
inline int64_t group_slots(const Problem& p) {
  int64_t slots = 1;
  while (slots < p.heads / p.kv_heads) slots *= 2;
  return slots;
}
// The map of tiles of `rows` such rows of Q or O, a box for each 64 columns.
inline TensorMap group_map(const Problem& p, const Compiled& c, int id, int rows) {
  const Strides& s = id == Q ? p.q : p.o;
  const uint64_t group = p.heads / p.kv_heads, head = s.head * c.element_bytes;
  const uint32_t heads = smaller(rows, group_slots(p)), queries = rows / heads;
  return {id,
          c.map_dtype,
          5,
          {uint64_t(c.head_dim), group, uint64_t(p.seqlen_q), uint64_t(p.kv_heads), uint64_t(p.batch)},
          {head, uint64_t(s.row * c.element_bytes), group * head, uint64_t(s.batch * c.element_bytes)},
          {CHUNK_COLUMNS, heads, queries, 1, 1}};
}
