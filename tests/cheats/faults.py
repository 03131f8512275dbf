"""Kernels that cheat in ways that fooled others. Each is an honest flash_scalar source with one fault planted in it.

A cheat enters the real pipeline where a rendered candidate does: `pipeline` gives the search a renderer that plants the
fault of the config at hand. Everything behind it (compile pool, interpreter or GPU worker, storage, leaderboard) is the
product's own."""

from dataclasses import dataclass, replace

from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, TrialState
from tests.support.source_edits import find_all

PROBLEM = AttentionProblem(1, 4, 4, 512, 512, 64, "fp16", "causal_upper_left")
GENES = dict(
    BLOCK_M=32,
    BLOCK_N=32,
    THREADS_PER_ROW=4,
    ROWS_PER_THREAD=1,
    VECTOR_WIDTH=8,
    KV_STAGES=1,
    Q_IN_REGISTERS=False,
    P_IN_SHARED=True,
)
FREE = {"PADDING": (8, 0), "BLOCKS_PER_SM": (1, 3, 4), "BLOCK_ORDER": ("tiles", "heads"), "UNROLL": (1, 2, 4)}
"""Parameters in which the configs of the cheats differ: each is honest, and each cheat has its own."""
WRONG, REFUSED = TrialState.WRONG_RESULT, TrialState.LAUNCH_ERROR

KERNEL = 'extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_scalar('
BODY = "  extern __shared__ __align__(16) unsigned char shared_memory[];\n"
STORE = "      store_floats(o_gmem + row * o_row_stride + column[c], chunk);"
K_COPY = "k_gmem + int64_t(tile) * BLOCK_N * k_row_stride, k_row_stride, seqlen_k - tile * BLOCK_N);"
V_COPY = "v_gmem + int64_t(tile) * BLOCK_N * v_row_stride, v_row_stride, seqlen_k - tile * BLOCK_N);"
TILES = "const int kv_tiles = keys_end > 0 ? (keys_end + BLOCK_N - 1) / BLOCK_N : 0;"
RESCALE = "      for (int c = 0; c < OUTPUTS_PER_THREAD; c++) output[i][c] *= rescale;"
FINITE = "const float finite_max = new_max == NEGATIVE_INFINITY ? 0.f : new_max;"
FACTOR = "const float rescale = exp2_approx((row_max[i] - finite_max) * softmax_scale_log2);"
BARRIER = "__syncthreads();  // all threads' copies of V have arrived"
MASKED = "score[i][j] = NEGATIVE_INFINITY;"
END = "      store_floats(o_gmem + row * o_row_stride + column[c], chunk);\n    }\n  }\n}"
COUNTER = "__device__ unsigned int launches_done, blocks_done;\n"
COUNTED_END = (
    END[:-1]
    + """  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&blocks_done, 1u) + 1 == gridDim.x) { blocks_done = 0; launches_done++; }
}"""
)
"""The last block of a launch counts it, so that every block of one launch reads the same count at its start."""


@dataclass(frozen=True)
class Cheat:
    """A fault: text of the honest source and what stands in its place.

    `states` and `words` (any of them) say what the device's verdict is to be; `offline_states` and `offline_words` what
    the interpreter's is, which stops at an instruction outside its whitelist where it cannot judge."""

    name: str
    edits: tuple[tuple[str, str], ...]
    states: tuple[TrialState, ...]
    words: tuple[str, ...]
    offline_states: tuple[TrialState, ...]
    offline_words: tuple[str, ...]
    sanitizer: bool = False
    """Harmless to every answer on a device: only compute-sanitizer or the interpreter sees it."""


def _wrong(name: str, *edits: tuple[str, str], words: tuple[str, ...], offline: tuple[str, ...] | None = None) -> Cheat:
    return Cheat(name, edits, (WRONG,), words, (WRONG,), offline or words)


def _counted(name: str, when_to_work: str, words: tuple[str, ...]) -> Cheat:
    """It counts its launches in device memory, which the interpreter does not take: never called right there."""
    body = BODY + f"  const unsigned int earlier = launches_done;\n  const bool works = {when_to_work};\n"
    store = "      if (works) " + STORE.strip()
    edits = (KERNEL, COUNTER + KERNEL), (BODY, body), (END, COUNTED_END.replace(STORE, store))
    return Cheat(name, edits, (WRONG,), words, (TrialState.COMPILE_ERROR,), ("Not interpreted",))


CHECKED = 20
"""Launches before the timing: two of each of the eight small cases, two that say what a call takes, two of the
problem's own shape. `tests/cheats/test_timed_path.py` counts them."""

HONEST = Cheat(
    "an honest control", (), (TrialState.COMPLETE,), ("",), (TrialState.ESTIMATED,), ("Right on the interpreter",)
)
CHEATS = (
    _wrong("writes nothing", (STORE, ""), words=("never written",)),
    Cheat(
        "fails to launch",
        ((KERNEL, KERNEL.replace("flash_scalar(", "flash_scalar_renamed(")),),
        (REFUSED,),
        ("refused the kernel",),
        (REFUSED,),
        ("has no kernel flash_scalar",),
    ),
    _wrong(
        "skips the last tile of keys",
        (TILES, TILES.replace("(keys_end + BLOCK_N - 1) / BLOCK_N : 0", "max(1, keys_end / BLOCK_N) : 0")),
        words=("error is",),
    ),
    Cheat(
        "reads past K",
        ((K_COPY, K_COPY.replace("seqlen_k - tile * BLOCK_N", "BLOCK_N")),),
        (WRONG, REFUSED),
        ("",),
        (WRONG,),
        ('of buffer "k"',),
        sanitizer=True,
    ),
    _wrong(
        "reads past V",
        (V_COPY, V_COPY.replace("seqlen_k - tile * BLOCK_N", "BLOCK_N")),
        words=("reads out of bounds", "NaN"),
        offline=('of buffer "v"',),
    ),
    _wrong(
        "writes past O",
        ("if (row >= q_rows) continue;", ""),
        words=("wrote outside its buffers", "remembers its launches", "error is", "two runs"),
        offline=('of buffer "o"', "race"),
    ),
    _wrong(
        "is right for the timed shape alone",
        (BODY, BODY + f"  if (seqlen_q != {PROBLEM.seqlen_q} || seqlen_k != {PROBLEM.seqlen_k}) return;\n"),
        words=("never written",),
    ),
    _wrong(
        "is right for the inputs of the past alone (a known seed)",
        (BODY, BODY + "  const bool known = *reinterpret_cast<const uint16_t*>(q_gmem) == 0x3929;\n"),
        (STORE, "      if (known) " + STORE.strip()),
        words=("never written",),
    ),
    _counted("is right on the first call alone", "earlier == 0", ("remembers its launches", "never written")),
    _wrong(
        "races: a barrier is missing",
        (BARRIER, "//" + BARRIER),
        words=("two runs", "error is", "NaN", "remembers"),
        offline=("race", "read", "barrier"),
    ),
    _wrong("ignores the mask", (MASKED, ";"), words=("error is", "reads out of bounds"), offline=("error is",)),
    _wrong(
        "is NaN on large logits",
        (FINITE, "const float finite_max = 0.f;"),
        (FACTOR, "const float rescale = 1.f;"),
        words=("NaN",),
    ),
    _wrong(
        "forgets to rescale at a late outlier",
        (RESCALE, RESCALE.replace("*= rescale", "*= rescale < 1e-6f ? 1.f : rescale")),
        words=("error is",),
    ),
    _wrong(
        "keeps what an earlier candidate left in its output",
        (STORE, "      if (to_float(o_gmem[row * o_row_stride + column[c]]) == 0.f) " + STORE.strip()),
        words=("never written",),
    ),
    _wrong(
        "changes its inputs",
        (STORE, STORE + "\n      if (c == 0) const_cast<Element*>(q_gmem)[row * q_row_stride] = Element{0};"),
        words=("changed",),
        offline=("changed", "race", "error is"),
    ),
    _counted(
        "does the work of a launch on the next one", "earlier % 2 == 1", ("remembers its launches", "never written")
    ),
    _counted(
        "rests while it is timed",
        f"earlier < {CHECKED + 4} || earlier > 2000",
        ("timed replays left outputs unwritten",),
    ),
    _counted(
        "works on every third launch once it is checked",
        f"earlier < {CHECKED} || earlier % 3 == 0",
        ("timed replays left", "launches back to back", "fresh inputs"),
    ),
    Cheat(
        "loops for ever",
        ((BODY, BODY + "  while (*reinterpret_cast<const uint16_t*>(q_gmem) != 0x7fff) __syncwarp();\n"),),
        (TrialState.TIMEOUT,),
        ("ran past its limit",),
        (WRONG, TrialState.TIMEOUT),
        ("may never end", "ran past its limit"),
    ),
    Cheat(
        "waits for ever for a clock",
        ((BODY, BODY + "  while (clock64() != 0) {}\n"),),
        (TrialState.TIMEOUT,),
        ("ran past its limit",),
        (TrialState.COMPILE_ERROR,),
        ("Not interpreted",),
    ),
    Cheat(
        "reads an address that is not there",
        ((BODY, BODY + "  q_gmem += int64_t(1) << 44;\n"),),
        (REFUSED,),
        ("CUDA context", "failed"),
        (WRONG,),
        ("far from every buffer", "global memory"),
    ),
    Cheat(
        "corrupts memory of others",
        (
            (
                END,
                END[:-1] + "  for (int64_t at = 0; at < (4 << 20); at += 4096)\n"
                "    if (threadIdx.x == 0)\n"
                "      reinterpret_cast<volatile unsigned char*>(o_gmem)[(1 << 20) + at] = 0x11;\n}",
            ),
        ),
        (WRONG, REFUSED),
        ("never given", "CUDA context", "wrote outside", "changed"),
        (WRONG,),
        ("global memory",),
    ),
)
"""`words` of a device verdict that depends on chance (a race, what lies beyond a band) name each way in which it may
show."""


def plant_fault(candidate: Candidate, cheat: Cheat) -> Candidate:
    """The candidate with the fault planted. Raises `ValueError` where the honest source has changed under it."""
    source = candidate.source
    for text, fault in cheat.edits:
        places = find_all(source, text)
        if not places:
            raise ValueError(f"The cheat {cheat.name!r} finds no {text!r} in the source.")
        first, end = places[0]
        source = source[:first] + fault + source[end:]
    return replace(candidate, source=source)
