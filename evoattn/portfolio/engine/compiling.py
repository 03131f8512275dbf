"""What a compile process does: source → machine code."""

from __future__ import annotations

from evoattn.backends.compiler import CompileError, compile_source
from evoattn.evaluation.process import Handler
from evoattn.model.records import CompiledKernel

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
