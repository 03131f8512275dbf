"""Pages of few keys; and kernels of packed queries over pages whose launches have room for more sequences and rows than
there are: they read and write nothing that there is not, and the answer is right."""

from dataclasses import replace

import pytest

from evoattn.families.registry import load_space, lookup
from evoattn.families.render import render
from evoattn.families.variants import SEQUENCES
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from tests.families import test_flash_mma, test_flash_wgmma, test_split_kv
from tests.families.on_interpreter import built, judged, small_faults

H100, FMA = GPUS["h100"], {**test_split_kv.FMA, "MERGE": "kernel"}
PACKED = AttentionProblem(3, 6, 2, 20, 60, 64, "bf16", "causal_lower_right", "bshd", page=16, varlen="3+0+17/30+9+40")


def config_of(module, **genes):
    return load_space(module.FAMILY.name, H100).make_config(module.BASE | genes)


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
    "module, genes",
    [
        (test_split_kv, {"MERGE": "cluster", "SPLITS": 4}),
        (test_split_kv, FMA),
        (test_flash_mma, {}),
        (test_flash_wgmma, {**test_flash_wgmma.TWO, "GROUP_ROWS": True, "SCHEDULE": "claimed", "STORE": "rows"}),
        (test_flash_wgmma, {"BLOCK_N": 64}),
    ],
)
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_a_launch_may_have_room_for_more_sequences_and_rows(module, genes):
    kernel = built(module.FAMILY, PACKED, config_of(module, **genes), H100)
    result = judged(replace(kernel, family=Roomy(module.FAMILY)), PACKED, repeat=True)
    assert result.passed, result


SMALL = AttentionProblem(1, 2, 1, 512, 512, 64, "bf16", "causal_lower_right")
ONE_KEY = SMALL.with_(varlen="3:512", page=1, window="90:0")
EIGHT_KEYS = SMALL.with_(seqused="0:500", page=8, dtype="fp16", layout="bshd")


@pytest.mark.parametrize(
    "module, genes, problem",
    [
        (test_flash_mma, {}, ONE_KEY),
        (test_split_kv, test_split_kv.RING | {"BLOCK_N": 32}, ONE_KEY),
        (test_split_kv, FMA, EIGHT_KEYS),
        (test_flash_wgmma, test_flash_wgmma.TWO | {"BLOCK_N": 128, "SCHEDULE": "fixed"}, EIGHT_KEYS),
    ],
)
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_pages_may_have_few_keys(module, genes, problem):
    assert not small_faults(built(module.FAMILY, problem, config_of(module, **genes), H100), problem)


def test_tensor_maps_take_no_single_keys():
    assert "8 keys of a page at once" in lookup("flash_wgmma").refuse(ONE_KEY, H100)
    config = config_of(test_split_kv, LOAD="tma", STAGES=2)
    assert "one page of 1" in lookup("split_kv").why_not(ONE_KEY, config, H100)


def test_a_source_that_reads_starts_of_keys_in_pages_is_outdated():
    config = config_of(test_flash_mma)
    family = lookup("flash_mma")
    for problem, said in ((PACKED, "how many there are"), (PACKED.with_(page=0), None)):
        source = render(family, problem, config, H100).source
        assert family.why_outdated(config, source) is None
        before = family.why_outdated(config, source.replace("keys_used", "key_starts"))
        assert (said in before) if said else before is None
