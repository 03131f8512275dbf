"""`tests/mutation/false_alarms.py`: a few configs, as the command runs hundreds; and what it once met."""

import json
import random
import sys
from dataclasses import dataclass

import pytest

from evoattn.evaluation.compile import score
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from tests.families.on_interpreter import built, small_faults
from tests.mutation import false_alarms
from tests.mutation.false_alarms import draw_variant

pytestmark = pytest.mark.slow

MET = {
    "what blocks of a cluster send is aligned, though one warp's one row ends at 8 bytes": (
        "split_kv",
        "h200",
        AttentionProblem(1, 1, 1, 64, 203, 96, "fp32", "causal_upper_left", "bshd"),
        {
            "COMPUTE": "fma",
            "LOAD": "registers",
            "BLOCK_M": 1,
            "BLOCK_N": 16,
            "WARPS": 1,
            "STAGES": 1,
            "VECTOR_BYTES": 16,
            "DOT_LANES": 4,
            "SPLITS": 8,
            "MERGE": "cluster",
            "DEPENDENT_LAUNCH": "none",
            "BLOCKS_PER_SM": 1,
        },
    ),
    "the most registers are those of another kernel than the most threads": (
        "three_kernel",
        "l40s",
        AttentionProblem(1, 2, 2, 1025, 2048, 192, "fp16", "causal_lower_right"),
        {
            "PRODUCT": "mma",
            "BLOCK_M": 128,
            "BLOCK_N": 128,
            "BLOCK_K": 64,
            "WARPS_M": 8,
            "WARPS_N": 4,
            "TILES_A_BLOCK": 1,
            "S_TYPE": "fp16",
            "SOFTMAX": "statistics",
            "P_PLACE": "in_place",
            "THREADS_PER_ROW": 8,
            "ROWS_PER_BLOCK": 16,
            "VECTOR_WIDTH": 8,
            "KEPT_VECTORS": 1,
            "PV_BLOCK_M": 128,
            "PV_BLOCK_K": 32,
            "PV_WARPS": 8,
            "PV_STAGES": 2,
            "HEAD_ORDER": "zigzag",
            "DEPENDENT_LAUNCH": "none",
        },
    ),
}


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """The program, in this process."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["false_alarms", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            false_alarms.main()
        code, said = ended.value.code, capsys.readouterr()
        return Done(code, said.out, said.err) if isinstance(code, int) else Done(1, said.out, f"{code}\n")

    return call


def test_a_run_goes_on_where_it_ended(run, tmp_path):
    out = tmp_path / "ran.jsonl"
    words = "--seed", 5, "--family", "append_kv", "--out", out
    assert "1 configs" in run(1, *words).stdout
    again = run(2, *words)
    assert again.returncode == 0 and "0 false alarms in 2 configs" in again.stdout, again.stdout + again.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["number"], row["seed"], row["alarm"]) for row in rows] == [(0, 5, ""), (1, 5, "")]
    out.write_text(out.read_text() + json.dumps(rows[0] | {"number": 2, "alarm": "INCORRECT"}) + "\n")
    wrong = run(3, *words)
    assert wrong.returncode == 1 and "1 false alarms in 3 configs" in wrong.stdout, "known ones count"
    assert "other families" in run(1, "--seed", 5, "--family", "flash_scalar", "--out", out).stderr


OLD = '{"number": 0, "family": "flash_mma", "seconds": 1.0, "alarm": "", "seed": 0}'


@pytest.mark.parametrize("line", [OLD.replace(', "seed": 0', ""), OLD, OLD[:-1], "3"])
def test_a_file_that_an_older_script_wrote_is_one_sentence(run, tmp_path, line):
    out = tmp_path / "ran.jsonl"
    out.write_text(line + "\n")
    done = run(1, "--out", out)
    assert done.returncode == 1 and done.stderr.startswith(f"{out}, line 1, is not as this script writes it today")
    assert done.stderr.count("\n") == 1


def test_the_families_take_turns(run):
    families = "append_kv", "merge_parts", "quantize"  # whose checks are short
    done = run(3, "--seed", 5, "--family", *families)
    assert done.returncode == 0 and "0 false alarms in 3 configs" in done.stdout, done.stdout
    assert all(family in done.stdout for family in families)


@pytest.mark.parametrize("fault", MET)
def test_what_it_met_is_right_now(fault):
    name, gpu, problem, params = MET[fault]
    family, spec = FAMILIES[name], GPUS[gpu]
    config = load_space(name, spec).make_config(params)
    assert family.why_invalid(problem, config, spec) is None
    kernel = built(family, problem, config, spec, machine_code=True)
    assert not small_faults(kernel, problem, 0) and score(config, kernel.compiled.info, problem, spec) is not None


@pytest.mark.parametrize("name", sorted({name for family in FAMILIES.values() for name in family.variants}))
def test_every_variant_can_be_drawn(name):
    problem = parse_shape("B=2,H=8,Hkv=2,Sq=2,Sk=600,D=64,dtype=fp16")
    assert draw_variant(problem, name, random.Random(1))
