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

enum BufferId { Q, K, V, O, LSE, SCRATCH };  // SCRATCH + i is the plan's scratch buffer i

// Boxes that the tensor copy engine moves: sizes and box in elements, strides in bytes of all dimensions but the
// innermost, all innermost first; 128-byte swizzle.
struct TensorMap {
  int buffer, dtype, rank;  // dtype: CUtensorMapDataType
  int64_t shape[5], strides_bytes[4], box[5];
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

  using Values = std::initializer_list<int64_t>;
  void add(const Argument& a) { args[count++] = a; }
  void int32(Values values) {
    for (int64_t value : values) add({Argument::INT32, value, 0, {}});
  }
  void int64(Values values) {
    for (int64_t value : values) add({Argument::INT64, value, 0, {}});
  }
  void float32(double value) { add({Argument::FLOAT32, 0, float(value), {}}); }
  void buffer(Values ids) {
    for (int64_t id : ids) add({Argument::BUFFER, id, 0, {}});
  }
  void map(const TensorMap& value) { add({Argument::TENSOR_MAP, 0, 0, value}); }
};

struct Scratch {
  const char* name;
  int64_t bytes;
  bool starts_zeroed;  // holds zeros before the first launch; the kernels leave zeros in it
};

struct Plan {
  int launches, scratches;
  Launch launch[3];
  Scratch scratch[4];

  void add(const char* kernel, Size grid, Size block, Size cluster, int smem_bytes, bool overlaps) {
    launch[launches++] = {kernel, grid, block, cluster, smem_bytes, overlaps, 0, {}};
  }
  Launch& last() { return launch[launches - 1]; }
  void add_scratch(const char* name, int64_t bytes, bool starts_zeroed) {
    scratch[scratches++] = {name, bytes, starts_zeroed};
  }
};

// Of integers of either sign, towards minus infinity, as in Python; b > 0.
inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
inline int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// Bits that a number of 0 or more has.
inline int bit_length(int64_t a) {
  int bits = 0;
  for (; a; a >>= 1) bits++;
  return bits;
}

// The first number from `begin` on, in steps, for which `holds` is true, or `otherwise`; the end is no such number.
template <typename Holds> int64_t first(int64_t begin, int64_t end, int64_t step, Holds holds, int64_t otherwise) {
  for (int64_t n = begin; step > 0 ? n < end : n > end; n += step)
    if (holds(n)) return n;
  return otherwise;
}
