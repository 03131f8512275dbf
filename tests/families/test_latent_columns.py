"""What refuses configs of latent_columns; `test_tables.py` runs it."""

from evoattn.families.registry import FAMILIES, load_space
from tests.families.latent import H100, NARROW

EIGHT = NARROW.with_(shared_kv=False, rotary_apart=True, kv="e4m3", scales="columns")
FAMILY = FAMILIES["latent_columns"]
BASE = dict(BLOCK_M=16, QUERIES=1, BLOCK_N=64, STAGES=2)


def config(**genes):
    return load_space("latent_columns", H100).make_config(BASE | genes)


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
        ({"heads": 32, "head_dim": 576, "value_dim": 512}, {"BLOCK_M": 32, "STAGES": 2}, "shared memory"),
    )
]
