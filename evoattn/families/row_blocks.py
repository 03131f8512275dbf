"""How many tiles of rows a grid has."""

import math

from evoattn.model.problem import AttentionProblem


def row_blocks(problem: AttentionProblem, rows: int, rows_per_query: int = 1) -> int:
    """Tiles of `rows` rows of one head of one of `batches`; a query may have several rows.

    Of packed sequences, slots for all of them: as many as `templates/device/schedule/sequences.cuh` counts, of which
    each sequence leaves at most one empty."""
    if problem.varlen:
        return problem.shape("q")[2] * rows_per_query // rows + problem.batch
    return math.ceil(problem.seqlen_q * rows_per_query / rows)


def batches(problem: AttentionProblem) -> int:
    """Batches of the grid: packed sequences are one."""
    return 1 if problem.varlen else problem.batch
