"""What refuses configs of latent_wgmma; `test_tables.py` runs it."""

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.shape_text import lookup
from tests.families.on_interpreter import H100, NARROW

FAMILY = FAMILIES["latent_wgmma"]
BASE = dict(BLOCK_M=64, BLOCK_N=32, STAGES=2, RESCALE="always", SPLITS=1)


def config(**genes):
    return load_space("latent_wgmma", H100).make_config(BASE | genes)


REFUSED_OF = [(NARROW.with_(seqlen_k=1 << 20), {}, "in 15 bits")]
STARTING = [(lookup("mla_decode"), H100, {"WARPGROUPS": warpgroups}) for warpgroups in (2, 3)]
