"""Anchors are found however a formatter sets white space and breaks lines, and only where they are meant."""

import pytest

from tests.support.source_edits import AnchorError, find_all, replaced

PLAIN = """  load(a, b);
  __syncthreads();      // all rows are written, and none is read
  store(a, b);
"""
FORMATTED = """load(a,
     b);
__syncthreads(); // all rows are written,
                 // and none is read
store(a, b);
"""


@pytest.mark.parametrize("source", [PLAIN, FORMATTED], ids=["plain", "formatted"])
def test_an_anchor_outlives_a_formatter(source):
    edited = replaced(source, "__syncthreads();   // all rows are written, and none", "//")
    assert "__syncthreads" not in edited and "store(a, b);" in edited
    assert find_all(edited, "load(a,b);")


@pytest.mark.parametrize(("old", "times"), [("missing", 1), ("(a, b)", 1), ("(a, b)", 3), ("missing", None)])
def test_a_wrong_number_of_places_is_an_error(old, times):
    with pytest.raises(AnchorError, match="places like"):
        replaced(PLAIN, old, "", times)


def test_all_places_are_replaced_where_so_many_are_expected():
    assert replaced(PLAIN, "(a, b)", "()", 2) == PLAIN.replace("(a, b)", "()")
