"""Cases of latent_wgmma, places that matter and what refuses it; `test_latent.py` and `test_tables.py` run them."""

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.named_problems import lookup
from tests.families.latent import H100, NARROW

FAMILY = FAMILIES["latent_wgmma"]
BASE = dict(BLOCK_M=64, BLOCK_N=32, STAGES=2, RESCALE="always", SPLITS=1)


def config(**genes):
    return load_space("latent_wgmma", H100).make_config(BASE | genes)


CASES = {
    "one split": (NARROW, {}),
    "splits, causal, a ring of three": (
        NARROW.with_(mask="causal_lower_right", dtype="fp16"),
        {"SPLITS": 3, "STAGES": 3, "BLOCK_N": 48},
    ),
    "lazy, two chunks of P": (NARROW.with_(mask="causal_upper_left"), {"RESCALE": "lazy_5", "BLOCK_N": 96}),
    "all of V in K": (NARROW.with_(head_dim=256, value_dim=256), {"RESCALE": "lazy_8", "SPLITS": 2}),
    "log-sum-exp": (NARROW.with_(lse=True, mask="causal_upper_left"), {}),
    "log-sum-exp of splits": (NARROW.with_(lse=True), {"SPLITS": 3}),
    "overlapped": (NARROW, {"OVERLAP": True, "STAGES": 3}),
    "overlapped, splits, causal": (
        NARROW.with_(mask="causal_lower_right", dtype="fp16", lse=True),
        {"OVERLAP": True, "STAGES": 4, "SPLITS": 3, "RESCALE": "lazy_8"},
    ),
    "steps of Q in registers": (NARROW, {"Q_STEPS": 4, "OVERLAP": True, "STAGES": 3}),
    "scores alone": (NARROW.with_(lse=True), {"WARPGROUPS": 3, "RESCALE": "lazy_5"}),
    "scores alone, overlapped, causal": (
        NARROW.with_(mask="causal_lower_right", dtype="fp16"),
        {"WARPGROUPS": 3, "OVERLAP": True, "STAGES": 3, "BLOCK_N": 48, "Q_STEPS": 4},
    ),
    "scores alone, splits, pages of 16": (
        NARROW.with_(seqused="0:3000", page=16, layout="bshd"),
        {"WARPGROUPS": 3, "SPLITS": 3, "OVERLAP": True, "DEPENDENT_LAUNCH": True},
    ),
    "scores alone, DeepSeek's widths": (
        lookup("mla_decode"),
        {"WARPGROUPS": 3, "Q_STEPS": 16, "STAGES": 4, "OVERLAP": True, "RESCALE": "lazy_8"},
    ),
    "scores alone, halves of O of 192 columns": (
        NARROW.with_(head_dim=448, value_dim=384),
        {"WARPGROUPS": 3, "RESCALE": "lazy_8"},
    ),
    "overlapped, DeepSeek's widths": (lookup("mla_decode"), {"OVERLAP": True, "STAGES": 4, "RESCALE": "lazy_5"}),
    "keys in use": (NARROW.with_(seqused="0:3000", batch=3, lse=True), {"SPLITS": 3}),
    "rotary columns apart, pages": (
        NARROW.with_(shared_kv=False, rotary_apart=True, seqused="0:3000", page=16, layout="bshd"),
        {"SPLITS": 3},
    ),
    "pages of 16": (NARROW.with_(seqused="0:3000", page=16, layout="bshd"), {"OVERLAP": True, "STAGES": 3}),
    "pages of 64, causal": (
        NARROW.with_(seqused="0:3000", page=64, mask="causal_lower_right"),
        {"SPLITS": 2, "BLOCK_N": 48, "STAGES": 3, "RESCALE": "lazy_8"},
    ),
    "DeepSeek's widths": (lookup("mla_decode"), {"BLOCK_N": 64, "RESCALE": "lazy_8", "SPLITS": 2}),
}


WRONG = {
    "P is overwritten while it is read": ("one split", "named_barrier_sync<CONSUMERS>(P_FREE);", ";"),
    "a merge that does not wait": (
        "scores alone, splits, pages of 16",
        "if constexpr (DEPENDENT_LAUNCH) grid_dependency_wait();",
        "",
    ),
    "scores alone, P is overwritten while it is read": (
        "scores alone",
        "if (turn >= P_TILES) named_barrier_sync<CONSUMERS>(P_FREE + p_tile);",
        "",
    ),
    "scores alone, P is given back before it is read": (
        "scores alone",
        "p.load(p_tile, p_smem, work.warp % 4, work.lane);\n    if constexpr (SCORES_ALONE) free_p();",
        "if constexpr (SCORES_ALONE) free_p();\n    p.load(p_tile, p_smem, work.warp % 4, work.lane);",
    ),
    "scores alone, P is read before it is written": (
        "scores alone",
        "named_barrier_sync<CONSUMERS>(P_READY + p_tile);",
        ";",
    ),
    "scores alone, a factor of the other tile": (
        "scores alone, overlapped, causal",
        "{factors[p_tile * 64 + row],",
        "{factors[row],",
    ),
    "scores alone, the other tile of P": (
        "scores alone",
        "at * KEY_STEPS + i, p_smem",
        "(1 - at) * KEY_STEPS + i, p_smem",
    ),
    "scores alone, K is given back while P V reads it": (
        "scores alone",
        "wgmma_wait<0>();\n    pin_registers(o);\n    if constexpr (!SCORES_ALONE) free_p();\n"
        "    p_tile = (p_tile + 1) % P_TILES;\n    release(ring);",
        "release(ring);\n    wgmma_wait<0>();\n    pin_registers(o);\n    p_tile = (p_tile + 1) % P_TILES;",
    ),
    "scores alone, both halves of O are the first": ("scores alone", "half * (HALF / 64) * BLOCK_N * 128", "0"),
    "scores alone, columns of a product that are another's": (
        "scores alone, DeepSeek's widths",
        "part * (PV_COLUMNS / 64) * BLOCK_N * 128",
        "0",
    ),
    "P is read before it is written": ("one split", "named_barrier_sync<CONSUMERS>(P_READY + p_tile);", ";"),
    "K is given back while P V reads it": (
        "one split",
        "wgmma_wait<1>();\n      pin_registers(o);\n      release(before);",
        "release(before);\n      wgmma_wait<1>();\n      pin_registers(o);",
    ),
    "overlapped, K is given back while P V reads it": (
        "overlapped",
        "wgmma_wait<0>();\n      pin_registers(o), pin_registers(next);\n      release(before);",
        "release(before);\n      wgmma_wait<0>();\n      pin_registers(o), pin_registers(next);",
    ),
    "overlapped, the next tile of K has not come": (
        "overlapped",
        "behind.advance(), mbarrier_wait(work.k_full(behind), behind.parity);",
        "behind.advance();",
    ),
    "overlapped, the same tile of K again": (
        "overlapped",
        "behind.advance(), mbarrier_wait(work.k_full(behind), behind.parity);",
        "mbarrier_wait(work.k_full(behind), behind.parity);",
    ),
    "steps of Q that are another's": (
        "steps of Q in registers",
        "q.fragment(q_frag[step], step, work",
        "q.fragment(q_frag[step], step + 1, work",
    ),
    "overlapped, scores under way": (
        "overlapped",
        "wgmma_wait<0>();\n      pin_registers(o), pin_registers(next);",
        "wgmma_wait<1>();\n      pin_registers(o), pin_registers(next);",
    ),
    "batches of one head": ("keys in use", "work.batch * given.kv_rows;", "work.batch * work.seqlen_k;"),
    "splits without keys are added up": (
        "keys in use",
        "return max(1, min(splits, (tiles + split_tiles - 1) / split_tiles));",
        "return splits;",
    ),
    "a split of one tile is left out": (
        "keys in use",
        "first_tile * BLOCK_N >= keys",
        "(first_tile + 1) * BLOCK_N >= keys",
    ),
    "one table for all sequences": ("pages of 16", "given.table + work.batch *", "given.table + 0 *"),
    "a page of NaN behind the last key": ("pages of 16", "keys - (page << bits));", "page_keys());"),
    "the second half does not follow the shift": ("one split", "scale_rows(o, factor);\n    }", "{}\n    }"),
    "an old factor where nothing rose": (
        "lazy, two chunks of P",
        "if (!rescale) factor[0] = factor[1] = 1.f;",
        "if (!rescale) factor[0] = factor[1] = 0.5f;",
    ),
    "both halves of O are the first": ("one split", "half * (HALF / 64) * BLOCK_N * 128", "0"),
    "the last keys are not hidden": ("one split", "KeysFrom<false>{0, work.keys}", "KeysFrom<false>{0, work.keys + 1}"),
    "keys of the next query": (
        "splits, causal, a ring of three",
        "Mask(seqlen_q, this->seqlen_k).keys_of(query)",
        "Mask(seqlen_q, this->seqlen_k).keys_of(query + 1)",
    ),
    "a split begins a tile late": (
        "splits, causal, a ring of three",
        "first_tile = split * split_tiles;",
        "first_tile = split * split_tiles + (split > 0);",
    ),
    "heads of the next group": (
        "one split",
        "rows_to_global<HALF>(smem + o_offset, row_gmem + half * HALF, o_head_stride, work.heads",
        "rows_to_global<HALF>(smem + o_offset, row_gmem + half * HALF, o_head_stride, 64 + work.heads",
    ),
    "the second tile of heads is the first": (
        "one split",
        "row_block % head_blocks * 64;",
        "row_block % head_blocks * 0;",
    ),
    "a merge of other rows": ("splits, causal, a ring of three", "+ group_head / 64;", "+ 0;"),
    "a sum of another head": (
        "log-sum-exp",
        "lse_gmem[head * work.seqlen_q + work.query] = log_sum(state.shift[i]",
        "lse_gmem[(head ^ 1) * work.seqlen_q + work.query] = log_sum(state.shift[i]",
    ),
    "a maximum of half of a lane's keys behind the first K/V head": (
        "one split",
        "both = greater<KEEP_NAN>(both, other[row]);",
        "if (blockIdx.y == 0) both = greater<KEEP_NAN>(both, other[row]);",
    ),
    "sums are not handed over": ("one split", "named_barrier_sync<CONSUMERS>(ROWS_DONE);", ";"),
}


REFUSED_OF = [
    (NARROW.with_(**changes), *row)
    for changes, *row in (
        ({}, {}, None),
        ({"shared_kv": False}, {}, "first columns of K"),
        ({"head_dim": 200}, {}, "whole 64 columns"),
        ({"value_dim": 64}, {}, "of V of whole 128, not 192 and 64"),
        ({"head_dim": 640, "value_dim": 640}, {}, "at most 512"),
        ({"head_dim": 576, "value_dim": 512}, {"BLOCK_N": 96, "STAGES": 2}, "shared memory"),
        ({"sink": True}, {}, "does not serve sink"),
        ({"seqlen_k": 16}, {"BLOCK_N": 32}, "half of the tile"),
        ({"seqlen_k": 60}, {"BLOCK_N": 32, "STAGES": 3}, "STAGES=3 is more than"),
        ({"seqlen_k": 30}, {"BLOCK_N": 32, "OVERLAP": True}, "nothing runs beside"),
        ({"seqlen_k": 60}, {"BLOCK_N": 32, "SPLITS": 8}, "SPLITS=8 makes only 2 splits of 32 keys"),
        ({"batch": 600}, {"SPLITS": 4}, "waves"),
        ({}, {"DEPENDENT_LAUNCH": True}, "one split has one"),
        ({"head_dim": 192, "value_dim": 128}, {"Q_STEPS": 16}, "more than the 12 steps of head_dim 192"),
        (
            {"head_dim": 576, "value_dim": 512},
            {"WARPGROUPS": 3, "Q_STEPS": 24, "OVERLAP": True, "STAGES": 4},
            "168 registers per thread, which can have 152",
        ),
    )
]
