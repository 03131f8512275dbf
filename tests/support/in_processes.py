"""Calls in several processes, for programs whose work is many small runs of the interpreter (`--jobs N`)."""

import multiprocessing
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(jobs: int, call: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """`call` of every item, in `jobs` forked processes of one thread each: results as they come, in any order.

    The processes know what this one has in memory now. One job runs here, in order."""
    torch.set_num_threads(1)
    if jobs == 1:
        yield from map(call, items)
        return
    with multiprocessing.get_context("fork").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap_unordered(call, items)
