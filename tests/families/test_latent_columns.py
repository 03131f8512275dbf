"""What refuses configs of latent_columns, which `test_tables.py` runs; its second launch."""

import pytest

from evoattn.families.latent_columns.resources import IN_FLIGHT
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.paths import TEMPLATES
from evoattn.model.space import KernelConfig
from tests.families.on_interpreter import H100, NARROW, built, configs, small_faults

EIGHT = NARROW.with_(shared_kv=False, rotary_apart=True, kv="e4m3", scales="columns")
FAMILY = FAMILIES["latent_columns"]
BASE = dict(BLOCK_M=16, QUERIES=1, BLOCK_N=64, STAGES=2)


config = configs("latent_columns", H100, BASE)


REFUSED_OF = [(EIGHT.with_(kv="e5m2"), {}, "of e4m3 with scales=columns, not of e5m2")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "genes"),
    [
        (NARROW.with_(head_dim=256, value_dim=192, seqlen_k=300, lse=True), {}),
        (EIGHT.with_(head_dim=448, value_dim=384, seqlen_k=200, seqused="0:200", page=16), {"LOADED": 2, "STAGES": 1}),
    ],
)
def test_threads_that_merge_may_be_more_than_columns(problem, genes):
    few = H100.with_limits({"sm_count": 5})  # blocks share keys
    assert small_faults(built(FAMILY, problem, config(**genes), few), problem, slice(3)) == []


SCALES = """reinterpret_cast<float4*>(shares.smem + Smem::SCALES)[place.stage * LOAD_KEYS + shares.lane] =
            make_float4(scale[0], scale[1], scale[2], scale[3]);"""
WRITTEN = "mbarrier_arrive(shares.barrier(Smem::LOADED_FULL, place.stage));"
READ = "mbarrier_arrive(shares.barrier(Smem::LOADED_EMPTY, place.stage));"
READING = "const float* scales = "


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits",
    [((SCALES, ""), (WRITTEN, WRITTEN + SCALES)), ((READ, ""), (READING, READ + READING))],
    ids=["written", "read"],
)
def test_scales_are_written_before_they_are_read_and_read_before_the_next_ones_are_written(edits):
    problem = EIGHT.with_(head_dim=448, value_dim=384, seqlen_k=200, seqused="0:200", page=16)
    few = H100.with_limits({"sm_count": 5})  # a block has keys for more than a round of the ring
    kernel = built(FAMILY, problem, config(LOADED=2), few, *edits)
    assert any("Race in shared memory" in fault for fault in small_faults(kernel, problem))


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "right"), [((), True), ((("o.z *= factor, ", ""),), False)])
def test_results_of_more_blocks_than_are_merged_at_once_are_rescaled(edits, right):
    problem = NARROW.with_(head_dim=576, value_dim=512)
    many = slice(-2, -1)  # "a row of many blocks"
    assert (small_faults(built(FAMILY, problem, config(), H100, *edits), problem, many) == []) == right


def test_as_many_results_are_loaded_at_once_as_the_cases_of_checks_count_on():
    text = (TEMPLATES / "latent_columns" / "merge_kernel.cuh").read_text()
    assert f"IN_FLIGHT = {IN_FLIGHT};" in text


def test_a_source_with_two_places_for_q_is_outdated_where_keys_have_8_bits():
    for problem in (NARROW, EIGHT):
        config = KernelConfig("latent_columns", BASE | {"LOADED": 1, "LOAD_KEYS": 32})
        source = render(FAMILY, problem, config, H100).source
        assert FAMILY.why_outdated(config, source) is None
        assert bool(FAMILY.why_outdated(config, source.replace("copy_scales", "copied"))) == (problem is EIGHT)
