"""flash_wmma: what `why_invalid` promises."""

from evoattn.families.flash_wmma.family import FlashWmma
from evoattn.families.flash_wmma.resources import FlashWmmaGenes, smem_bytes, smem_parts
from evoattn.model.gpu import GPUS
from tests.families.on_interpreter import configs, problem

FAMILY, L4 = FlashWmma(), GPUS["l4"]
BASE = dict(
    BLOCK_M=32, BLOCK_N=32, ROW_WARPS=2, COLUMN_WARPS=1, THREADS_PER_ROW=4, STAGES=1, COPY="async", PADDING_BYTES=16,
    Q_PLACE="shared", O_PLACE="fragments", BLOCKS_PER_SM=1,
)  # fmt: skip


config = configs("flash_wmma", L4, BASE)


REFUSED = [
    ({"COLUMN_WARPS": 4, "BLOCK_M": 128, "ROW_WARPS": 8, "BLOCKS_PER_SM": 2}, "1536"),
]


def test_64_rows_fit_past_the_48_kib_of_static_shared_memory():
    """The L4 notes stopped at 32 rows: 64 with the output tile took 56.75 KB.

    Dynamic shared memory opens them, and 128 rows too."""
    p = problem()
    assert (
        48 * 1024
        < smem_bytes(p, FlashWmmaGenes.of(config(BLOCK_M=64, ROW_WARPS=4, BLOCK_N=64, O_PLACE="shared")))
        < 99 * 1024
    )
    for genes in (
        {"BLOCK_M": 64, "ROW_WARPS": 4, "BLOCK_N": 64, "O_PLACE": "shared"},
        {"BLOCK_M": 128, "ROW_WARPS": 8, "BLOCK_N": 64},
    ):
        assert (
            smem_bytes(p, FlashWmmaGenes.of(config(**genes))) > 48 * 1024
            and FAMILY.why_invalid(p, config(**genes), L4) is None
        )
    assert sum(smem_parts(p, FlashWmmaGenes.of(config())).values()) == smem_bytes(p, FlashWmmaGenes.of(config()))


STARTING = [(problem(head_dim=head_dim), L4, which) for head_dim, which in ((64, 0), (64, 3), (128, 2), (256, 1))]
