"""An operation and a family from outside, added to the tables. Workers of a search import this module with their first
task, since the family's class is in it."""

from pathlib import Path

from evoattn.families.genes import gene
from evoattn.families.registry import FAMILIES
from evoattn.families.work import LaunchWork, Step
from tests.operation.merge_two import MergeGenes, MergeTwo, rows_of


class WholeGenes(MergeGenes):
    BLOCK_N: int = gene("there are no keys", (1,))


class Registered(MergeTwo):
    """The family of `merge_two`, with what a search asks for beside."""

    genes = WholeGenes
    search_spaces = Path(__file__).parent / "search_spaces"

    def work(self, problem, config, registers=0):
        threads = config.params["BLOCK_M"]
        ends = Step(fp32=4.0 * threads * problem.head_dim, loaded_bytes=12.0 * threads * problem.head_dim, waits=1000)
        blocks = -(-rows_of(problem) // threads)
        size = 4.0 * rows_of(problem) * problem.head_dim
        return (
            LaunchWork("merge_two", blocks, threads, threads // 32, 0, registers or 32, Step(), 1.0, 1.0, ends,
                       read_bytes=2 * size, write_bytes=size),
        )  # fmt: skip


FAMILIES["merge_two"] = Registered()
