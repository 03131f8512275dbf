"""scripts/gangs.py: which recorded kernels it compares, and how they are launched."""

from __future__ import annotations

from gangs import ALL_HELD, compared, gang_of, reads_of_keys, variants

from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig, load_space
from scripts.cost.row import Row

H100 = GPUS["h100"]
FEW_ROWS = parse_shape("B=5,H=12,Sq=494,Sk=6272,D=96,dtype=bf16")
START = next(c.params for c in load_space("flash_wgmma", H100).starting_configs() if c.params["SCHEDULE"] == "balanced")


def row(problem, us, **genes):
    config = KernelConfig("flash_wgmma", START | {"BLOCK_N": 64, "STAGES": 3, "Q_IN_REGISTERS": False} | genes)
    return Row(H100, problem, config, 128, 0, us, "campaign")


def test_kernels_with_gangs_are_held_against_the_best_other():
    rows = [
        row(FEW_ROWS, 160.0),
        row(FEW_ROWS, 170.0, STAGES=2),
        row(FEW_ROWS, 200.0, BLOCK_M=128),
        row(FEW_ROWS, 120.0, SCHEDULE="claimed"),
        row(FEW_ROWS.with_(seqlen_k=100), 10.0),
        row(FEW_ROWS.with_(seqlen_q=1), 90.0),
    ]
    (one,) = compared(rows, H100, 5, 32)
    assert [r.us for r in one.balanced] == [200.0, 160.0] and one.best.us == 120.0
    grids = [FAMILIES["flash_wgmma"].launches(FEW_ROWS, c, gpu)[0].grid for _, c, gpu in variants(one, H100)]
    assert grids[1:3] == [(4, 33, 1), (1, 132, 1)]
    assert gang_of(FEW_ROWS.with_(mask="causal_upper_left"), one.balanced[0].config, H100) == 0


def test_a_gang_reads_keys_once():
    config = row(FEW_ROWS, 1.0, BLOCK_M=128).config
    assert reads_of_keys(FEW_ROWS, config, H100) == 1
    without = H100.with_limits({"l2_bytes": ALL_HELD})
    assert 3.5 < reads_of_keys(FEW_ROWS, config, without) <= 4
    assert reads_of_keys(FEW_ROWS, config, without, held=ALL_HELD) == 1
