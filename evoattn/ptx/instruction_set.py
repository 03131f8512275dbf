"""Imports every module that registers instructions; a new group of instructions is one more line here."""

from evoattn.ptx import (  # noqa: F401
    async_copy, atomics, bits, comparison, control, conversion, floating, half_arithmetic, integer, load_store, tensor_core, warp, wmma,
)
