"""What the trees of the cost model may ask of a problem and a config."""

import math

import pytest

from evoattn.cost.cost import physical_part
from evoattn.cost.features import features
from evoattn.cost.fitted import load
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig

H100 = GPUS["h100"]
GIVEN = load_space("flash_wgmma", H100).starting_configs()[0].params | {"BLOCK_M": 64, "BLOCK_N": 64, "KEY_SPLIT": 1}


def asked(shape, **genes):
    problem, config = parse_shape(shape), KernelConfig("flash_wgmma", GIVEN | genes)
    return features(problem, config, physical_part(problem, config, H100, 128, load()), H100)


def test_lengths_are_those_of_the_sequences_not_their_bounds():
    plain = asked("B=4,H=8,Sq=1,Sk=1024,D=128,dtype=bf16,layout=bshd")
    cached = asked("B=4,H=8,Sq=1,Sk=32768,D=128,dtype=bf16,layout=bshd,seqused=1024:1024")
    assert cached["log keys"] == plain["log keys"] == 10 and cached["full keys"] == plain["full keys"] == 1
    assert (cached["longest keys"], plain["longest keys"]) == (32, 1)
    packed = asked("B=3,H=8,S=300,D=128,dtype=bf16,layout=bshd,varlen=100:300")
    assert packed["log queries"] == pytest.approx(math.log2(200)) and packed["longest keys"] == pytest.approx(1.5)
    assert packed["full rows"] == pytest.approx((100 + 200 + 300) / (128 + 256 + 320))


def test_rows_of_a_tile_that_are_filled_are_heads_too():
    shape = "B=4,H=32,Hkv=8,Sq=8,Sk=1024,D=128,dtype=bf16"
    alone, together = asked(shape, GROUP_ROWS=False), asked(shape, GROUP_ROWS=True)
    assert (alone["grouped rows"], alone["filled rows"]) == (0, 8 / 64)
    assert (together["grouped rows"], together["filled rows"]) == (1, 32 / 64)


def test_packed_sequences_have_keys_of_their_own():
    work = {}
    for shape in ("B=400,H=16,S=256,D=64,dtype=bf16,layout=bshd", "B=400,H=16,S=256,D=64,dtype=bf16,varlen=256:256"):
        problem, config = parse_shape(shape), KernelConfig("flash_wgmma", GIVEN | {"TILE_ORDER": "all_heads"})
        (one,) = physical_part(problem, config, H100, 128, load()).works
        work[bool(problem.varlen)] = one
    packed, plain = work[True], work[False]
    assert packed.blocks == plain.blocks and packed.visits == plain.visits == 4 and packed.sweepers == plain.sweepers
    assert packed.heads_in_turn == 16 and plain.heads_in_turn == 16 * 400  # of one sequence; of all batches
