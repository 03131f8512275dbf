"""flash_mma: what `why_invalid` promises."""

from evoattn.families.flash_mma.family import FlashMma
from evoattn.families.flash_mma.resources import FlashMmaGenes, registers_needed
from evoattn.model.gpu import GPUS
from tests.families.on_interpreter import configs, problem

FAMILY, L4, H100 = FlashMma(), GPUS["l4"], GPUS["h100"]
BASE = dict(
    BLOCK_M=32, BLOCK_N=32, WARPS=2, KEY_WARPS=1, STAGES=2, SCHEDULE="together", SMEM_LAYOUT="swizzled",
    Q_PLACE="shared", RESCALE="always", ROW_SUM="add", O_STORE="direct", BLOCK_ORDER="rows", BLOCKS_PER_SM=1,
)  # fmt: skip


config = configs("flash_mma", L4, BASE)


REFUSED_OF = [
    (problem(1 << 22, 1024), {"BLOCK_ORDER": "heads"}, "grid z"),
]


STARTING = [
    (problem(head_dim=head_dim), gpu, which)
    for gpu, head_dim, which in ((L4, 32, 0), (H100, 64, 1), (L4, 128, 0), (H100, 256, 1))
]


def test_register_estimate_bounds_a_big_kernel():
    p, c = problem(head_dim=128), config(BLOCK_M=128, BLOCK_N=64, WARPS=4)
    assert 220 <= registers_needed(p, FlashMmaGenes.of(c)) <= 255
