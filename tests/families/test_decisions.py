"""What is decided of kernels before any is compiled stays as it is, until a change wants it otherwise."""

import pytest

from evoattn.families.registry import FAMILIES
from tests.families.decisions import LEAST, decided, rows


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_decided_of_a_kernel_stays(family):
    known = [row for row in rows() if row["family"] == family]
    assert len(known) >= LEAST, "python -m tests.families.decisions draws some of a new family"
    for row in known:
        found = decided(row)
        others = [name for name in found.keys() | row["decided"].keys() if found.get(name) != row["decided"].get(name)]
        assert not others, (
            f"{others} of {row['params']} on {row['gpu']} for {row['problem']} are not as they were. If that is "
            f"wanted: python -m tests.families.decisions. What there is now: the same with --show {family}."
        )
