"""Kernels of all families, drawn once. What is decided of them before any is compiled stays until a change wants it
otherwise. They are right on the interpreter, with no race and no access out of bounds. Faults planted in them are
found."""

import pytest

from evoattn.backends.base import LaunchError
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from tests.families.decisions import LEAST, decided, faults_of, rows, setting
from tests.support.compiles import ptx_kept

ROWS = rows()
NOTHING_TO_ASSERT = {"append_kv", "backward_scalar", "flash_scalar", "merge_parts", "quantize"}
"""Families whose CUDA does not count its shared memory; accesses behind its end show on the interpreter."""
PLANTED = [(row, key) for row in ROWS for key in row["faults"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_decided_of_a_kernel_stays(family):
    known = [row for row in ROWS if row["family"] == family]
    assert len(known) >= LEAST, "python -m tests.families.decisions draws some of a new family"
    assert sum(len(row["faults"]) for row in known) >= LEAST, f"python -m tests.families.decisions --plant {family}"
    for row in known:
        found = decided(row)
        others = [name for name in found.keys() | row["decided"].keys() if found.get(name) != row["decided"].get(name)]
        assert not others, (
            f"{others} of {row['params']} on {row['gpu']} for {row['problem']} are not as they were. If that is "
            f"wanted: python -m tests.families.decisions. What there is now: the same with --show {family}."
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NOTHING_TO_ASSERT))
def test_shared_memory_of_python_is_that_of_cuda(family):
    """The kernels' static_assert; the kernel behind it, and what follows, is left out. Kernels of the rows between are
    compiled below."""
    for row in [row for row in ROWS if row["family"] == family][1::3]:
        before, asserts, behind = setting(row).source.partition("disagree")
        assert asserts, row["params"]
        ptx_kept(before + asserts + behind.partition('extern "C" __global__')[0], GPUS[row["gpu"]].arch)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)), ids=[f"{row['family']}-{n}" for n, row in enumerate(ROWS)])
@pytest.mark.sampled(8)
def test_it_is_right(number):
    """On the first two small cases, which show 58 of 60 recorded faults (`small_faults`)."""
    assert faults_of(ROWS[number], cases=slice(2)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("row", "key"), PLANTED, ids=[f"{row['family']}: {key}" for row, key in PLANTED])
@pytest.mark.sampled(12)
def test_a_fault_is_found(row, key):
    try:
        found = faults_of(row, key)
    except LaunchError:  # a parameter of another width: no launch, and so no candidate
        return
    if found is None:
        pytest.skip("Its line is another now: python -m tests.families.decisions leaves it out.")
    assert found
