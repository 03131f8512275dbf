"""Kernels of packed queries over pages whose launches have room for more sequences and rows than there are: they read
and write nothing that there is not, and the answer is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoattn.families.variants import SEQUENCES
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import load_space
from tests.families.on_interpreter import built, judged
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
def test_a_launch_may_have_room_for_more_sequences_and_rows(family, structure):
    module, structures = STRUCTURES[family]
    config = load_space(family, H100).make_config(module.BASE | structures[structure])
    kernel = built(module.FAMILY, PACKED, config, H100, machine_code=False)
    result = judged(replace(kernel, family=Roomy(module.FAMILY)), PACKED, repeat=True)
    assert result.passed, result
