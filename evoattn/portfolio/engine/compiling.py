"""What a compile process does: source → machine code."""

from __future__ import annotations

from collections.abc import Iterable

from evoattn.backends.compiler import CompileError, compile_source
from evoattn.evaluation.pool import Pool
from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.workers import wait_for_any
from evoattn.model.records import Candidate, CompiledKernel

COMPILE_SECONDS = 40.0


class SourceHandler(Handler):
    """Compiles `(source, arch)`; the PTX is dropped, as nothing here interprets it."""

    def __call__(self, task: tuple[str, str]) -> CompiledKernel | str:
        source, arch = task
        try:
            compiled = compile_source(source, arch)
        except CompileError as error:
            return str(error)
        return CompiledKernel(compiled.cubin, "", compiled.info)


def compile_all(pool: Pool, candidates: Iterable[Candidate]) -> dict[str, CompiledKernel]:
    """What compiled, by the hash of its source; equal sources once. Tasks that the pool's processes still have end
    first, and what they come to is lost. Raises `WorkerFailed`."""
    waiting, running = list({c.source_hash: c for c in candidates}.values()), 0
    found: dict[str, CompiledKernel] = {}
    while waiting or running:
        for worker in pool.idle():
            if waiting:
                candidate = waiting.pop()
                worker.submit(candidate.source_hash, (candidate.source, candidate.arch), COMPILE_SECONDS)
                running += 1
        wait_for_any(pool.workers, 0.2)
        for outcome in pool.poll():
            if isinstance(outcome.tag, str):
                running -= 1
                if outcome.ending is Ending.RESULT and not isinstance(outcome.value, str):
                    found[outcome.tag] = outcome.value
        pool.check()
    return found
