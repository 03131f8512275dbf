"""What is said of cards, spaces, timings and words stays, until a change wants it otherwise."""

from collections.abc import Iterator
from typing import Any

from evoattn.model import dtype, errors, gpu, space, variant
from evoattn.model.gpu_table import is_played, target
from evoattn.model.paths import calibration_name
from evoattn.model.records import CheckResult, CompileInfo, Evaluation, Timing, TrialState, ValidationReport
from tests.samplers.made_up_families import SPACES
from tests.support.facts import answer, changed, told

PRODUCTS = ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "Tesla T4", "NVIDIA L4", "NVIDIA A100-SXM4-40GB", "x")
LIMITS = {"sm_count": 20, "smem_per_block": 101376, "l2_bytes": 33554432, "registers_per_sm": 65536}
RATES = {"clock_khz": 1500000, "memory_khz": 7001000, "bus_bits": 192, "memory_bytes": 12 * 10**9}
DEVICES = [
    gpu.DetectedDevice(0, product, capability, "13.0", "GPU-1", LIMITS, rates)
    for product, capability in (
        *((product, (8, 9)) for product in PRODUCTS),
        ("NVIDIA GeForce RTX 9", (8, 7)),
        ("Old", (7, 5)),
    )
    for rates in (RATES, {})
]
TIMINGS = [
    Timing((3.0, 1.0, 2.0, 9.0), {"stage": "final", "run": "r", "calls_per_replay": 3, "board_factor": 1.1}),
    Timing((2.0,), {"stage": "screen"}),
    Timing.out("It changed its inputs.", True),
    Timing.out("It was slow.", False),
]
WORDS = [("flash_mm", ("flash_mma", "flash_wmma")), ("h10", ("h100", "h200")), ("x", ("abc",)), ("", ("a",))]
CHOICES = [["TILE=6,1"], ["TILE=1", "round_2=2"], ["TILE"], ["TILE=", "round_1=2"], ["A=1", "A=2"], ["flat_2=true"]]
SOME = {"TILE": 3, **{f"round_{i}": 2 for i in range(1, 6)}}
CARDS = ("a100", "b200", "h100", "h200", "l4", "rtx4090")


def _restricted(of_family: space.SearchSpace, words: list[str]) -> int:
    return of_family.restricted(space.parse_choices(words)).size()


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    arguments = [(), (96, 128, 49152), (255, 1024, 0), (10**9, 10**6, "fp16"), ("fp16",), ("fp32",), ("e4m3",)]
    cards = {name: gpu.GPUS[name] for name in CARDS}
    yield "names", [*gpu.GPUS]
    for name, spec in cards.items():
        yield name, [told(spec, *arguments, without=("is_like", "with_limits")), target(spec.arch), is_played(spec)]
        yield (f"likes of {name}", [spec.is_like(other) for other in (*cards.values(), None, spec.with_limits(LIMITS))])
        yield f"calibrations of {name}", calibration_name(spec.name, spec.sm_count, spec.arch)
    yield "lookups", [answer(gpu.lookup, word) for word in ("h100", "H100", "NVIDIA H100", "h10", "", "rtx 4090")]
    yield "products", [answer(gpu.row_of, product) for product in PRODUCTS]
    yield "devices", [[told(device), device.describe()] for device in DEVICES]
    for family, of_family in SPACES.items():
        yield (
            f"space of {family}",
            told(of_family, (), ({},), ({"TILE": 3},), ({"TILE": 99},), (SOME,), (SOME | {"A": 1},)),
        )
        yield f"choices of {family}", [answer(_restricted, of_family, words) for words in CHOICES]
    yield "timings", [told(timing, (), (0.5,), (0.1,), (TIMINGS[0],), (TIMINGS[1],)) for timing in TIMINGS]
    checks = CheckResult("one", True, 0.1, 0.2), CheckResult("two", False, 0.3, 0.2, "It differs.")
    report = ValidationReport("cuda", checks)
    yield "checks", [told(report), told(ValidationReport("cuda", checks[:1]))]
    info = CompileInfo(128, 8, 16, 24, 1024)
    yield "resources", told(info)
    yield "evaluations", [told(Evaluation(state, "", info, report, tuple(TIMINGS), 2.0)) for state in TrialState]
    yield "words", [[errors.meant(*words), errors.unknown("card", *words, "See there.")] for words in WORDS]
    yield "dtypes", [[name, told(one)] for name, one in dtype.DTYPES.items()]
    yield "windows", [answer(variant.parse_window, text) for text in ("3:0", "0:0", "12:x", "3", "-1:2")]
    yield "ids", [space.config_id("a", {"X": 1, "Y": True}), space.config_id("a", {"X": 1, "Y": 1})]


def test_what_is_said_of_cards_and_spaces_stays():
    assert not changed("cards")
