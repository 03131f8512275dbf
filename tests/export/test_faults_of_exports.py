"""Faults of exported kernels that once passed the tests, which nvcc need not see."""

import re
from types import SimpleNamespace

import pytest

from evoattn.export.check import _sizes, buffers_of
from evoattn.export.header import export_header
from evoattn.export.recorded import Target
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from tests.export.kernels import record, recorded


def test_terms_take_as_many_bytes_as_they_have():
    problem = AttentionProblem(2, 8, 2, 300, 500, 64, "fp16", sink=True, alibi=True, seqused="1:500", lse=True)
    sizes = _sizes(problem, buffers_of(problem, ()))
    assert sizes["sinks"] == 8 * 2 and sizes["slopes"] == 8 * 4 and sizes["seqused"] == 2 * 4
    assert sizes["lse"] == 2 * 8 * 300 * 4 and sizes["q"] == 2 * 8 * 300 * 64 * 2
    biased = problem.with_(alibi=False, bias="hs")
    bytes_of_bias = _sizes(biased, ["bias"])["bias"]
    assert bytes_of_bias % 2 == 0 and 8 * 300 * 500 * 2 <= bytes_of_bias < 8 * 300 * 508 * 2


@pytest.mark.parametrize("overlaps, least", [((False, False), 80), ((False, True), 90), ((True, True), 90)])
def test_one_launch_that_only_hopper_has_is_enough(overlaps, least):
    launches = tuple(KernelLaunch("k", (1, 1, 1), (32, 1, 1), 0, (), overlaps=one) for one in overlaps)
    family = SimpleNamespace(devices="sm_80 and newer")
    assert Target.of(SimpleNamespace(source="", family=family, launches=launches)).number == least


def test_a_header_leaves_no_macro_behind(database):
    text = export_header(database, record(database, "flash_mma", "a100"))
    macros = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", recorded(database, "flash_mma", "l4").source, re.M))
    undefined = set(re.findall(r"^#undef (\w+)", text, re.M))
    assert macros and macros <= undefined
