"""`scripts/compile_speed.py` ends where a config does not compile or a process fails."""

import multiprocessing
import os
import threading

import compile_speed
import pytest

GOOD = 'extern "C" __global__ void kernel() {}'


def test_a_source_with_an_error_does_not_count():
    texts = ["no CUDA", GOOD, "no CUDA", GOOD]
    assert len(compile_speed.compiled(texts, threading.Barrier(1))) == 2


@pytest.mark.slow
def test_the_others_do_not_wait_for_a_process_that_failed():
    context = multiprocessing.get_context("spawn")
    failed, waiting = context.Process(target=os._exit, args=(3,)), context.Process(target=context.Barrier(2).wait)
    for process in (failed, waiting):
        process.start()
    with pytest.raises(SystemExit, match="has failed"):
        compile_speed.rows_of([failed, waiting], context.Queue())
    waiting.join(20)
    assert waiting.exitcode
