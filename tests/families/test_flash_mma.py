"""flash_mma: what `why_invalid` promises."""

from evoattn.families.flash_mma.family import FlashMma
from evoattn.families.flash_mma.resources import FlashMmaGenes, registers_needed
from evoattn.model.gpu import GPUS
from tests.families.made import configs, problem

FAMILY, L4, H100 = FlashMma(), GPUS["l4"], GPUS["h100"]
BASE = dict(
    BLOCK_M=32, BLOCK_N=32, WARPS=2, KEY_WARPS=1, STAGES=2, SCHEDULE="together", SMEM_LAYOUT="swizzled",
    Q_PLACE="shared", RESCALE="always", ROW_SUM="add", O_STORE="direct", BLOCK_ORDER="rows", BLOCKS_PER_SM=1,
)  # fmt: skip


config = configs("flash_mma", L4, BASE)


REFUSED = [
    ({"BLOCK_M": 48}, "BLOCK_M=48"),
    ({"BLOCK_N": 48, "KEY_WARPS": 2}, "BLOCK_N=48"),
    ({"STAGES": 1}, "STAGES of at least 2"),
    ({"BLOCK_M": 128, "WARPS": 8, "BLOCK_N": 128, "KEY_WARPS": 4}, "over 16 warps"),
    ({"BLOCK_ORDER": "rows_reversed"}, "causal"),
    ({"BLOCK_M": 256, "WARPS": 2}, "registers"),
    ({"BLOCK_N": 256, "KEY_WARPS": 4}, "101376"),
    ({"BLOCK_N": 256}, "128 keys per warp"),
    ({"BLOCK_N": 128, "BLOCKS_PER_SM": 3}, "102400"),
    ({"BLOCKS_PER_SM": 2}, "the same code"),
    ({"KEY_SPLIT": 2}, "fill the SMs"),
]


REFUSED_OF = [
    (problem(dtype="fp32"), {}, "fp32"),
    (problem(head_dim=264), {}, "264"),
    (problem(head_dim=8), {}, "not 8"),
    (problem(16, 1024), {}, "16 queries"),
    (problem(1024, 16), {}, "16 keys"),
    (problem(1024, 20), {}, "split and always"),
    (problem(1024, 60), {"STAGES": 3}, "2 tiles"),
    (problem(64, 1024), {"KEY_SPLIT": 12}, "without work"),
    (problem(1024, 17), {"KEY_WARPS": 2, "STAGES": 1, "SCHEDULE": "split"}, None),
    (problem(1024, 40), {"BLOCK_N": 64, "KEY_WARPS": 4, "STAGES": 1, "SCHEDULE": "split"}, "never sees"),
    (problem(30, 1024), {"BLOCK_ORDER": "heads"}, "same order"),
    (problem(1 << 22, 1024), {"BLOCK_ORDER": "heads"}, "grid z"),
]


STARTING = [
    (problem(head_dim=head_dim), gpu, which)
    for gpu, head_dim, which in ((L4, 32, 0), (H100, 64, 1), (L4, 128, 0), (H100, 256, 1))
]


def test_register_estimate_bounds_a_big_kernel():
    p, c = problem(head_dim=128), config(BLOCK_M=128, BLOCK_N=64, WARPS=4)
    assert 220 <= registers_needed(p, FlashMmaGenes.of(c)) <= 255
