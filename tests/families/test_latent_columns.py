"""Cases of latent_columns, places that matter and what refuses it; `test_latent.py` and `test_tables.py` run them."""

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.named_problems import lookup
from tests.families.latent import H100, NARROW

EIGHT = NARROW.with_(shared_kv=False, rotary_apart=True, kv="e4m3", scales="columns")
FAMILY = FAMILIES["latent_columns"]
BASE = dict(BLOCK_M=16, QUERIES=1, BLOCK_N=64, STAGES=2)


def config(**genes):
    return load_space("latent_columns", H100).make_config(BASE | genes)


CASES = {
    "alone": (NARROW.with_(lse=True), {}),
    "causal": (NARROW.with_(mask="causal_lower_right", dtype="fp16"), {"STAGES": 3}),
    "32 heads, pages of 16": (
        NARROW.with_(seqused="0:3000", page=16, layout="bshd", lse=True),
        {"BLOCK_M": 32, "STAGES": 3},
    ),
    "queries, causal": (
        NARROW.with_(seqlen_q=5, mask="causal_lower_right", lse=True, seqused="0:3000"),
        {"BLOCK_M": 32, "QUERIES": 4},
    ),
    "keys in use": (NARROW.with_(seqused="0:3000", batch=3, mask="causal_upper_left", lse=True), {}),
    "rotary columns apart": (NARROW.with_(shared_kv=False, rotary_apart=True, lse=True), {}),
    "rotary columns apart, pages": (
        NARROW.with_(shared_kv=False, rotary_apart=True, seqused="0:3000", page=16, layout="bshd"),
        {"STAGES": 3},
    ),
    "8 bits": (EIGHT.with_(lse=True), {"STAGES": 1}),
    "8 bits, 32 keys at a time": (EIGHT.with_(seqused="0:3000", batch=3), {"LOAD_KEYS": 32, "LOADED": 2}),
    "8 bits, pages": (EIGHT.with_(seqused="0:3000", page=16, layout="bshd"), {"LOADED": 2}),
    "8 bits, pages of 8, two queries": (
        EIGHT.with_(seqlen_q=2, mask="causal_lower_right", seqused="0:3000", page=8, lse=True),
        {"BLOCK_M": 32, "QUERIES": 2, "LOADED": 3},
    ),
    "DeepSeek's cache of 8 bits": (
        lookup("mla_decode").with_(
            heads=16,
            shared_kv=False,
            rotary_apart=True,
            kv="e4m3",
            scales="columns",
            seqused="0:2000",
            page=64,
            layout="bshd",
            name="",
        ),
        {"LOADED": 4},
    ),
    "DeepSeek's widths": (lookup("mla_decode").with_(seqused="0:2000", page=64, layout="bshd"), {}),
}


WRONG = {
    "P is read before it is written": (
        "alone",
        "sum[column_of(i)] += s[i];\n    named_barrier_sync<CONSUMERS>(P_READY);",
        "sum[column_of(i)] += s[i];",
    ),
    "maxima of other warps before they are there": ("alone", "named_barrier_sync<CONSUMERS>(WARPS_DONE);", ";"),
    "K is given back while P V reads it": (
        "alone",
        "multiply_vp();\n      wgmma_wait<0>();\n",
        "multiply_vp();\n",
    ),
    "groups that are not waited for": ("alone", "__syncthreads();  // the sums of all groups", "// the sums"),
    "O is stored before all of it is there": (
        "alone",
        "named_barrier_sync<CONSUMERS>(P_READY);\n    constexpr int PIECES",
        "constexpr int PIECES",
    ),
    "two results in one place": ("alone", "leave(2 * blockIdx.x + (sharers > 0));", "leave(2 * blockIdx.x);"),
    "a block too few adds up": ("alone", "- int(blockIdx.x) + 1; }", "- int(blockIdx.x); }"),
    "a merge that does not wait": (
        "keys in use",
        "grid_dependency_wait();  // for the results",
        ";  // for the results",
    ),
    "the last keys are not hidden": ("causal", ">= seen) s[i]", "> seen) s[i]"),
    "keys of the first query": ("queries, causal", "first_keys + row_of(column_of(i)) / HEADS", "first_keys"),
    "a merge of other rows": (
        "queries, causal",
        "query % QUERIES * HEADS + group_head % HEADS;",
        "group_head % HEADS;",
    ),
    "batches of one head": ("keys in use", "tile.batch * given.kv_rows;", "tile.batch * used;"),
    "one table for all sequences": ("32 heads, pages of 16", "given.table + tile.batch *", "given.table + 0 *"),
    "K is used before V is there": ("rotary columns apart", "COPIES = APART ? 2 : 1;", "COPIES = 1;"),
    "O does not follow the shift": ("alone", "o[chunk][i] *= factor[column_of(i)];", "{}"),
    "a tile that is not converted yet": (
        "8 bits",
        "EIGHT_BITS ? CONVERTERS / 32 : COPIES)",
        "EIGHT_BITS ? 7 : COPIES)",
    ),
    "a place that is still converted": (
        "8 bits, pages",
        "mbarrier_init(smem_address + LOADED_EMPTY + 8 * i, CONVERTERS / 32)",
        "mbarrier_init(smem_address + LOADED_EMPTY + 8 * i, 7)",
    ),
    "scales behind the last key": ("8 bits, pages", "|| key >= pages.keys) continue;", ") continue;"),
    "scales of the first page": ("8 bits, pages", "page_of(head_gmem, key, ", "page_of(head_gmem, 0, "),
    "scales of the tile before": (
        "8 bits",
        "scale[part][i] = ahead[part][i];",
        "(void)ahead;",
    ),
    "a wait for what multiplies": (
        "8 bits",
        "Smem::K_EMPTY, k_place.stage), k_place.parity ^ 1",
        "Smem::K_EMPTY, k_place.stage), 1",
    ),
    "the other eight rows": ("8 bits", "row = first_row + i % EIGHTS", "row = i % EIGHTS"),
    "sequences of the next 32 lanes": ("keys in use", " begin += before_it;", " begin += before_it + 1;"),
}


REFUSED_OF = [
    (NARROW.with_(**changes), *row)
    for changes, *row in (
        ({}, {}, None),
        ({"shared_kv": False}, {}, "first columns of K"),
        ({"value_dim": 96}, {}, "of V of whole 64, not 192 and 96"),
        ({"head_dim": 640, "value_dim": 640}, {}, "at most 512"),
        ({"head_dim": 576, "value_dim": 512}, {"STAGES": 3}, "shared memory"),
        ({}, {"STAGES": 1}, "no key comes while others are used"),
        ({}, {"LOADED": 2}, "keys of 16 bits are loaded where they are used"),
        ({}, {"BLOCK_M": 32}, "BLOCK_M=32 and QUERIES=1 have 32 heads"),
        ({"seqlen_k": 100}, {"STAGES": 4}, "STAGES=4 is more than the 2 tiles"),
    )
]
REFUSED_OF += [
    (EIGHT.with_(**changes), *row)
    for changes, *row in (
        ({}, {"STAGES": 1, "LOADED": 4}, None),
        ({"kv": "e5m2"}, {}, "of 16 bits or of e4m3, not of e5m2"),
        ({"heads": 32, "head_dim": 576, "value_dim": 512}, {"BLOCK_M": 32, "STAGES": 1}, "shared memory"),
    )
]
