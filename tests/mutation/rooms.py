"""The rooms of evoattn's Python: files, and the tests of them."""

from dataclasses import dataclass

ANSWERS = "tests/correctness/test_facts_of_answers.py"
"""Digests of the inputs and answers of checks."""
DECISIONS = "tests/families/test_decisions.py", "tests/families/test_facts_of_families.py"
"""Digests of what is decided of kernels: they notice most faults of what makes them, in seconds."""


@dataclass(frozen=True)
class Room:
    """Files, and the tests that are to notice a fault in them: files, folders or patterns of them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "search": Room(("evoattn/search/*.py",), ("tests/search", "tests/cli/test_try.py", "tests/export/test_command.py")),
    "finals": Room(
        ("evoattn/engine/finals.py", "evoattn/search/finalists.py"),
        ("tests/search/test_finals.py", "tests/cheats/test_contest.py", "tests/search/test_finals.py"),
    ),
    "ranking": Room(("evoattn/timing/ranking.py",), ("tests/timing/test_ranking.py",)),
    "storage": Room(("evoattn/storage/*.py",), ("tests/storage",)),
    "samplers": Room(("evoattn/samplers/*.py",), ("tests/samplers",)),
    "benchmark": Room(
        ("evoattn/timing/benchmark.py",),
        (
            "tests/timing/test_timer.py",
            "tests/timing/test_timer.py",
            "tests/cheats/test_timed_path.py",
            "tests/cheats/test_timed_path.py",
        ),
    ),
    "validate": Room(
        (
            "evoattn/correctness/validate.py",
            "evoattn/correctness/judge.py",
            "evoattn/correctness/cases.py",
            "evoattn/correctness/interpreter_cases.py",
        ),
        (
            *(*DECISIONS, ANSWERS),
            "tests/correctness/test_validate.py",
            "tests/correctness/test_cases.py",
            "tests/cheats/test_timed_path.py",
            "tests/cheats/test_timed_path.py",
        ),
    ),
    "ops": Room(("evoattn/ops/**/*.py",), ("tests/ops",)),
    "portfolio": Room(("evoattn/portfolio/*.py",), ("tests/portfolio",)),
    "integrations": Room(("evoattn/integrations/*.py",), ("tests/integrations",)),
    "timing": Room(("evoattn/timing/*.py",), ("tests/timing", "tests/cheats")),
    "cost": Room(("evoattn/cost/*.py",), (*DECISIONS, "tests/cost")),
    "model": Room(("evoattn/model/*.py",), (*DECISIONS, "tests/model")),
    "export": Room(("evoattn/export/*.py",), ("tests/export",)),
    "engine": Room(("evoattn/engine/*.py",), ("tests/search", "tests/portfolio")),
    "peers": Room(("evoattn/peers/*.py",), ("tests/peers",)),
    "families": Room(("evoattn/families/*.py", "evoattn/families/*/*.py"), (*DECISIONS, "tests/families")),
    "fleet": Room(("evoattn/fleet/*.py",), ("tests/fleet", "tests/search/test_several_boards.py")),
    "report": Room(
        (
            "evoattn/report/summary.py",
            "evoattn/report/analysis.py",
            "evoattn/report/data.py",
            "evoattn/report/winner.py",
        ),
        ("tests/report",),
    ),
    "flex": Room(
        (
            *(f"evoattn/ops/{name}.py" for name in ("flex", "block_masks")),
            *("evoattn/*/block_list.py", "evoattn/families/mask_blocks.py", "evoattn/integrations/listed_mask.py"),
        ),
        (
            *(*DECISIONS, ANSWERS),
            *("tests/ops/test_flex*.py", "tests/ops/test_created_masks.py", "tests/*/test_block_list.py"),
            *("tests/integrations/test_listed_mask.py", "tests/peers/test_flex_masks.py"),
            *("tests/model/test_facts_of_*.py", "tests/ops/test_facts_of_*.py"),
        ),
    ),
    "expressions": Room(
        (
            *(f"evoattn/ops/{name}.py" for name in ("mods", "given")),
            *(f"evoattn/model/score_{name}.py" for name in ("cuda", "lines")),
        ),
        (*("tests/model/test_facts_of_expressions.py", "tests/model/test_score.py", "tests/ops"),),
    ),
    "mask_blocks": Room(
        ("templates/device/mask_blocks.cuh", "templates/device/score_range.cuh", "evoattn/model/score_lines.py"),
        (
            *(f"tests/ops/test_{name}.py" for name in ("score_ranges", "created_masks")),
            *("tests/model/test_facts_of_expressions.py", "tests/model/test_score.py"),
        ),
    ),
    "backward": Room(
        (
            "evoattn/ops/gradients.py",
            *("evoattn/*/backward.py", "evoattn/correctness/gradients.py"),
            "evoattn/families/backward_*/*.py",
        ),
        (
            *(*DECISIONS, ANSWERS),
            *("tests/ops/test_training*.py", "tests/ops/test_choice.py", "tests/ops/test_flex_gradients.py"),
            *(
                "tests/correctness/test_gradients.py",
                "tests/families/test_backward*.py",
                "tests/peers/test_backward.py",
            ),
            *("tests/integrations/test_model_copies.py", "tests/benchmarks/test_backward.py"),
        ),
    ),
    "serving": Room(
        (
            *("evoattn/*/append.py", "evoattn/*/merge.py", "evoattn/*/sequences.py"),
            *("evoattn/families/append_kv/*.py", "evoattn/families/work.py", "evoattn/families/merge_parts/*.py"),
            "evoattn/families/row_kernels.py",
            *(f"evoattn/integrations/{name}.py" for name in ("vllm", "sglang", "static_cache")),
            *("evoattn/integrations/flash_attn/*.py", "evoattn/ops/beside.py"),
        ),
        (
            *DECISIONS,
            *(f"tests/ops/test_{name}.py" for name in ("beside", "mixed", "growing", "varlen", "attention")),
            *("tests/families/test_append_kv.py", "tests/families/test_merge_parts.py", "tests/operation"),
            *(f"tests/integrations/test_{name}.py" for name in ("vllm", "sglang", "static_cache", "flash_attn_*")),
            *("tests/model/test_used_keys.py", "tests/correctness", "tests/families/test_every_family.py"),
        ),
    ),
    "fp8": Room(
        (
            *("evoattn/ops/attention_fp8.py", "evoattn/ops/beside.py"),
            *("evoattn/*/quantize.py", "evoattn/model/scales.py", "evoattn/correctness/eight_bits.py"),
            *("evoattn/families/quantize/*.py", "evoattn/families/fp8_wgmma/*.py"),
            "evoattn/integrations/flash_attn/eight_bits.py",
        ),
        (
            *DECISIONS,
            *("tests/*/test_eight_bits.py", "tests/ops/test_attention_fp8.py", "tests/*/test_quantize.py"),
            *("tests/ops/test_beside.py", "tests/ops/test_beside.py", "tests/ops/test_facts_of_calls.py"),
            *("tests/families/test_fp8_wgmma.py", "tests/families/test_eight_bit_cache.py", "tests/correctness"),
            *("tests/families/test_every_family.py", "tests/integrations/test_flash_attn_*.py"),
        ),
    ),
    "calibration": Room(
        (
            *("evoattn/portfolio/calibrate.py", "evoattn/portfolio/calibrations.py", "evoattn/portfolio/wins.py"),
            *("evoattn/cost/correction*.py", "evoattn/model/paths.py", "evoattn/model/gpu_table.py"),
            "evoattn/ops/choice.py",
        ),
        (
            *("tests/portfolio", "tests/ops/test_race.py", "tests/ops/test_choice.py"),
            *("tests/cost/test_correction.py", "tests/model/test_gpu.py", "tests/benchmarks/test_stranger.py"),
            "tests/model/test_facts_of_cards.py",
            *("tests/ops/test_known_calls.py", "tests/cost/test_facts_of_estimates.py"),
        ),
    ),
}
