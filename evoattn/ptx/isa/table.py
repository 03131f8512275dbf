"""Imports every module that registers instructions; a new group of instructions is one more line here."""

from evoattn.ptx.isa import (  # noqa: F401
    async_copy,
    atomics,
    bits,
    bulk_bytes,
    bulk_copy,
    cluster_barrier,
    comparison,
    control,
    conversion,
    eight_bits,
    floating,
    half,
    hopper,
    integer,
    load_store,
    mbarrier,
    tensor_core,
    warp,
    wgmma,
    wmma,
)
