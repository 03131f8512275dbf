"""Every arithmetic instruction of the whitelist against a line of NumPy or Python, on edges in random company
(hypothesis); and where the others have their plain statements."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoattn.ptx.isa import dispatch
from tests.ptx import statements_of_bits, statements_of_reals
from tests.ptx.golden.harness import evaluate
from tests.ptx.golden.operands import operand, result_type
from tests.ptx.statement import decode
from tests.ptx.test_golden import excused
from tests.ptx.whitelist_choices import uncovered

EXAMPLES = 2
TABLE = statements_of_bits.TABLE | statements_of_reals.TABLE
ELSEWHERE = {
    # what threads of a warp tell each other
    "shfl": "test_warp.test_shuffle",
    "vote": "test_warp.test_votes",
    "match": "test_warp.test_match_and_reduce",
    "redux": "test_warp.test_match_and_reduce",
    "activemask": "test_warp.test_half_a_warp_can_exchange_by_its_own_mask",
    "elect": "test_mbarrier.test_an_election_and_a_named_barrier",
    # products and the fragments they are of
    "mma": "test_tensor_core.test_mma",
    "wmma": "test_tensor_core.test_wmma",
    "wgmma": "test_wgmma.test_layouts",
    "ldmatrix": "test_tensor_core.test_ldmatrix",
    "stmatrix": "test_tensor_core.test_stmatrix_is_the_inverse_of_ldmatrix",
    # memory
    "ld": "test_memory.test_vectors_and_narrow_types",
    "st": "test_memory.test_vectors_and_narrow_types",
    "atom": "test_memory.test_atomics",
    "red": "test_memory.test_atomics",
    "cp": "test_memory.test_zero_filling",
    "cvta": "test_memory.test_generic_addresses_local_arrays_and_structs",
    "mapa": "test_clusters.test_blocks_read_and_write_each_other",
    # order, of which a right and a wrong program show what it allows
    "fence": "test_global_races.test_a_missing_order_is_found",
    "membar": "test_global_races.test_a_flag_hands_over",
    "bar": "test_races.test_exchange_through_shared_memory",
    "barrier": "test_races.test_named_barriers",
    "mbarrier": "test_mbarrier.test_phases_alternate_and_hand_over_memory",
    "setmaxnreg": "test_mbarrier.test_register_counts_are_a_matter_of_warpgroups",
    # the way of threads through a program
    "bra": "test_control.test_threads_that_loop_differently",
    "exit": "test_control.test_exited_threads_are_not_waited_for",
    "ret": "test_control.test_threads_that_loop_differently",
    "trap": "test_control.test_trap_is_a_fault",
}
"""Test of each instruction that moves, exchanges or orders, by file and name."""
WITHOUT_RESULT = {"prefetch", "nanosleep", "griddepcontrol"}
"""Hints about time: there is nothing to state; each runs among the goldens."""


@pytest.mark.slow
@pytest.mark.parametrize("opcode", TABLE)
@settings(max_examples=EXAMPLES, derandomize=True)
@given(seed=st.integers(0, 2**20))
@pytest.mark.sampled(2)
def test_it_does_what_numpy_says(opcode, seed):
    row = TABLE[opcode]
    inputs = [operand(kind, seed + 1009 * i, **row.how) for i, kind in enumerate(row.kinds)]
    operands = [decode(v, kind) if row.reals and "f" in kind else v for v, kind in zip(inputs, row.kinds)]
    with np.errstate(all="ignore"):
        got, expected = evaluate(row.text(opcode), result_type(row.result), *inputs), row.expect(*operands)
        got = decode(got, row.result) if row.reals and "f" in row.result else got
        same = got == expected
        if got.dtype.kind == "f":
            near = (
                np.abs(got - expected) <= row.relative * np.abs(expected) + row.absolute
                if row.relative + row.absolute
                else False
            )
            same = (
                same & ((np.signbit(got) == np.signbit(expected)) | (row.absolute > 0))
                | np.isnan(got) & np.isnan(expected)
                | near
            )
    at = np.flatnonzero(~same.reshape(len(inputs[0]), -1).all(1))[:3]
    assert not len(at), (opcode, [v[at] for v in operands], got[at], expected[at])


@pytest.mark.slow
def test_every_instruction_of_the_whitelist_is_stated():
    """Each entry and each alternative of its pattern, as `test_golden` counts them, by a row here or by a test that
    exists.
    """
    arithmetic = {
        re.match(r"\(\?P<op>(\w+)\)", m)[1]: m for m in uncovered(o.partition(",")[0] for o in TABLE) if not excused(m)
    }
    missing = {word: m for word, m in arithmetic.items() if word not in ELSEWHERE.keys() | WITHOUT_RESULT}
    assert not missing, "No plain statement for:\n" + "\n".join(missing.values())
    assert not (ELSEWHERE.keys() | WITHOUT_RESULT) - dispatch._ENTRIES.keys(), (
        "an instruction that the whitelist does not have"
    )
    for where in ELSEWHERE.values():
        file, name = where.split(".")
        tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, where
