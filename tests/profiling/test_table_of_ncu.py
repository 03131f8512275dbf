"""The reader of ncu's table on one that ncu itself wrote."""

from pathlib import Path

from evoattn.profiling.ncu import parse


def test_a_table_that_ncu_wrote_on_an_h100_is_read():
    """Of `evoattn profile best` after a search of seed_h100; columns that nobody reads were taken out."""
    (kernel,) = parse((Path(__file__).parent / "ncu_h100.csv").read_text())
    assert (kernel.kernel, kernel.us) == ("flash_wgmma", 12.256)
    stalls = {words: value for words, value in kernel.counters.items() if words.startswith("stalled: ")}
    assert stalls["stalled: wait"] == 2.01 and stalls["stalled: gmma"] == 0.11 and len(stalls) == 15
    assert {words: value for words, value in kernel.counters.items() if words not in stalls} == {
        "SM busy, % of peak": 37.32,
        "tensor cores, % of peak": 49.6,
        "memory busy, % of peak": 25.64,
        "DRAM, % of peak": 0.17,
        "L2, % of peak": 25.11,
        "L2 hits, %": 97.97,
        "occupancy, %": 14.14,
        "instructions per cycle": 1.31,
        "registers per thread": 128.0,
    }
