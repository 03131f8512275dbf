// What a caller asks before a launch; needs host.h and, of the kernel, HEAD_DIM, ELEMENT_BYTES, WRITES_LSE, `refusal`
// and `plan`.

constexpr int64_t MAX_GRID_X = 2147483647, MAX_GRID_YZ = 65535;  // CUDA C++ Programming Guide, technical specifications
constexpr int64_t SCRATCH_ALIGNMENT = 256;

// Every address and stride is a multiple of so many bytes: 16, which vector loads and tensor maps ask for, or what a
// row has of it.
constexpr int64_t ALIGNMENT = HEAD_DIM * ELEMENT_BYTES % 16 == 0 ? 16 : HEAD_DIM * ELEMENT_BYTES % 16;

inline bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % ALIGNMENT == 0; }

// Strides of dimensions of one element mean nothing, and tensor maps refuse most of them: they get what the rest spans.
inline Strides meaningful(Strides s, int batch, int heads, int seqlen) {
  int64_t span = HEAD_DIM;
  if (seqlen > 1) span = larger(span, s.row * seqlen);
  if (heads > 1) span = larger(span, s.head * heads);
  if (batch > 1) span = larger(span, s.batch * batch);
  span = ceil_div(span, 16) * 16;
  return {batch > 1 ? s.batch : span, heads > 1 ? s.head : span, seqlen > 1 ? s.row : span};
}

inline Problem meaningful(Problem p) {
  p.q = meaningful(p.q, p.batch, p.heads, p.seqlen_q), p.o = meaningful(p.o, p.batch, p.heads, p.seqlen_q);
  p.k = meaningful(p.k, p.batch, p.kv_heads, p.seqlen_k), p.v = meaningful(p.v, p.batch, p.kv_heads, p.seqlen_k);
  return p;
}

constexpr int ANY_DEVICE = 1024;  // more SMs than a GPU has

// One sentence if this kernel cannot serve the problem on a device of `sm_count` SMs, else null.
inline const char* why_not(const Problem& problem, int sm_count = ANY_DEVICE) {
  for (int n : {problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k})
    if (n < 1) return "Every size must be at least 1.";
  if (problem.heads % problem.kv_heads) return "The query heads do not divide over the K/V heads.";
  if (!(problem.softmax_scale > 0) || !std::isfinite(problem.softmax_scale))
    return "The softmax scale must be positive and finite.";
  const Problem p = meaningful(problem);
  for (const Strides& s : {p.q, p.k, p.v, p.o})
    for (int64_t stride : {s.batch, s.head, s.row})
      if (stride <= 0 || stride * ELEMENT_BYTES % ALIGNMENT)
        return "Every stride must be a positive multiple of 16 bytes, or of a row that is shorter.";
  if (const char* reason = refusal(p, sm_count)) return reason;
  const Plan planned = plan(p, sm_count);
  for (int i = 0; i < planned.launches; i++) {
    const Size& grid = planned.launch[i].grid;
    if (grid.x > MAX_GRID_X || grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ)
      return "There are more batches, heads or queries than a grid of this kernel can have.";
  }
  return nullptr;
}

inline const char* why_not(const Problem& problem, const Tensors& t, int sm_count = ANY_DEVICE) {
  if (const char* reason = why_not(problem, sm_count)) return reason;
  if (!t.q || !t.k || !t.v || !t.o || (WRITES_LSE && !t.lse)) return "A tensor has no address.";
  if (!is_aligned(t.q) || !is_aligned(t.k) || !is_aligned(t.v) || !is_aligned(t.o))
    return "Every tensor must begin at a multiple of 16 bytes, or of a row that is shorter.";
  return nullptr;
}

// Bytes from the start of the workspace to scratch buffer `i`, or to the end of all: those that start zeroed come
// first.
inline int64_t scratch_offset(const Plan& plan, int i) {
  int64_t offset = 0;
  for (bool zeroed : {true, false})
    for (int j = 0; j < plan.scratches; j++) {
      if (plan.scratch[j].starts_zeroed != zeroed) continue;
      if (j == i) return offset;
      offset += ceil_div(plan.scratch[j].bytes, SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT;
    }
  return offset;
}

// Bytes at the start of the workspace that have to be zero before the first launch; the kernels leave zeros there.
inline int64_t zeroed_bytes(const Plan& plan) {
  int64_t bytes = 0;
  for (int j = 0; j < plan.scratches; j++)
    if (plan.scratch[j].starts_zeroed) bytes += ceil_div(plan.scratch[j].bytes, SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT;
  return bytes;
}

// Bytes of the workspace on a device of `sm_count` SMs, for a problem that `why_not` accepts.
inline size_t workspace_bytes(const Problem& problem, int sm_count) {
  const Plan planned = plan(meaningful(problem), sm_count);
  return scratch_offset(planned, planned.scratches);
}
