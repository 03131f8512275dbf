"""Pages of few keys; and kernels of packed queries over pages whose launches have room for more sequences and rows than
there are: they read and write nothing that there is not, and the answer is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoattn.families.registry import load_space, lookup
from evoattn.families.render import render
from evoattn.families.variants import SEQUENCES
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from tests.families.on_interpreter import built, judged, small_faults
from tests.families.test_variants import STRUCTURES

H100 = GPUS["h100"]
PACKED = AttentionProblem(3, 6, 2, 20, 60, 64, "bf16", "causal_lower_right", "bshd", page=16, varlen="3+0+17/30+9+40")


class Roomy:
    """A family whose launches are those of a problem with more sequences and rows, told how many there are."""

    def __init__(self, family):
        self.of = family

    def __getattr__(self, name):
        return getattr(self.of, name)

    @staticmethod
    def more(problem):
        (queries, keys), count = zip(*problem.sequences, strict=True), problem.batch + 2
        rows = sum(queries) + 40
        longest = max(problem.seqlen_q, -(-rows // count))
        return problem.with_(batch=count, seqlen_q=longest, varlen=f"sum:{rows}/sum:{sum(keys)}")

    def launches(self, problem, config, gpu):
        roomy = self.of.launches(self.more(problem), config, gpu)
        return tuple(replace(one, args=tuple(told(arg, problem) for arg in one.args)) for one in roomy)

    def workspace(self, problem, config, gpu):
        return self.of.workspace(self.more(problem), config, gpu)


def told(argument, problem):
    """The argument of a launch with room, with the sizes that there are."""
    if isinstance(argument, Scalar) and argument.name == SEQUENCES:
        return argument._replace(value=problem.batch)
    if isinstance(argument, TensorMap) and argument.rows_at is not None:
        shape = list(argument.shape)
        shape[argument.rows_at] = problem.shape("q")[2]
        return replace(argument, shape=tuple(shape))
    return argument


@pytest.mark.parametrize(
    "family, structure",
    [
        ("split_kv", "mma, a cluster"),
        ("split_kv", "fma"),
        ("flash_mma", "together"),
        ("flash_wgmma", "heads as rows, claimed"),
        ("flash_wgmma", "one warpgroup"),
    ],
)
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_a_launch_may_have_room_for_more_sequences_and_rows(family, structure):
    module, structures = STRUCTURES[family]
    config = load_space(family, H100).make_config(module.BASE | structures[structure])
    kernel = built(module.FAMILY, PACKED, config, H100, machine_code=False)
    result = judged(replace(kernel, family=Roomy(module.FAMILY)), PACKED, repeat=True)
    assert result.passed, result


SMALL = AttentionProblem(1, 2, 1, 512, 512, 64, "bf16", "causal_lower_right")
ONE_KEY = SMALL.with_(varlen="3:512", page=1, window="90:0")
EIGHT_KEYS = SMALL.with_(seqused="0:500", page=8, dtype="fp16", layout="bshd")


@pytest.mark.parametrize(
    "family, structure, problem",
    [
        ("flash_mma", "together", ONE_KEY),
        ("split_kv", "mma, a ring", ONE_KEY),
        ("split_kv", "fma", EIGHT_KEYS),
        ("flash_wgmma", "one warpgroup", EIGHT_KEYS),
    ],
)
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_pages_may_have_few_keys(family, structure, problem):
    module, structures = STRUCTURES[family]
    config = load_space(family, H100).make_config(module.BASE | structures[structure])
    assert not small_faults(built(module.FAMILY, problem, config, H100, machine_code=False), problem)


def test_tensor_maps_take_no_single_keys():
    assert "8 keys of a page at once" in lookup("flash_wgmma").refuse(ONE_KEY, H100)
    config = load_space("split_kv", H100).make_config(STRUCTURES["split_kv"][0].BASE | {"LOAD": "tma", "STAGES": 2})
    assert "one page of 1" in lookup("split_kv").why_not(ONE_KEY, config, H100)


def test_a_source_that_reads_starts_of_keys_in_pages_is_outdated():
    config = load_space("flash_mma", H100).make_config(STRUCTURES["flash_mma"][0].BASE)
    family = lookup("flash_mma")
    for problem, said in ((PACKED, "how many there are"), (PACKED.with_(page=0), None)):
        source = render(family, problem, config, H100).source
        assert family.why_outdated(config, source) is None
        before = family.why_outdated(config, source.replace("keys_used", "key_starts"))
        assert (said in before) if said else before is None
