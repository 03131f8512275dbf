"""What refuses configs of latent_wgmma; `test_tables.py` runs it."""

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.named_problems import lookup
from tests.families.latent import H100, NARROW

FAMILY = FAMILIES["latent_wgmma"]
BASE = dict(BLOCK_M=64, BLOCK_N=32, STAGES=2, RESCALE="always", SPLITS=1)


def config(**genes):
    return load_space("latent_wgmma", H100).make_config(BASE | genes)


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
        ({"seqlen_k": 30}, {"BLOCK_N": 32, "OVERLAP": True}, "one tile of keys"),
        ({}, {"WARPGROUPS": 3, "OVERLAP": True}, "other warpgroups multiply"),
        ({"seqlen_k": 1 << 20}, {}, "in 15 bits"),
        ({"seqlen_k": 60}, {"BLOCK_N": 32, "SPLITS": 8}, "SPLITS=8 makes only 2 splits of 32 keys"),
        ({"batch": 600}, {"SPLITS": 4}, "waves"),
        ({}, {"DEPENDENT_LAUNCH": True}, "one split has one"),
        ({"head_dim": 192, "value_dim": 128}, {"Q_STEPS": 16}, "more than the 12 steps of head_dim 192"),
        (
            {"head_dim": 576, "value_dim": 512},
            {"WARPGROUPS": 3, "Q_STEPS": 24, "BLOCK_N": 48, "STAGES": 2},
            "164 registers per thread, which can have 152",
        ),
    )
]
STARTING = [(lookup("mla_decode"), H100, {"WARPGROUPS": warpgroups}) for warpgroups in (2, 3)]
