"""scripts/cubins.py tells machine code that differs from source that only reads otherwise."""

import importlib.util
import json
import sys

import pytest

from evoattn.backends.compiler import compile_source, machine_code_hash
from evoattn.model.paths import ROOT

_SPEC = importlib.util.spec_from_file_location("cubins", ROOT / "scripts" / "cubins.py")
cubins = importlib.util.module_from_spec(_SPEC)
sys.modules["cubins"] = cubins
_SPEC.loader.exec_module(cubins)

SOURCE = """
__device__ __forceinline__ float twice(float x) { return 2.f * x; }
extern "C" __global__ void kernel(float* y) { y[threadIdx.x] = twice(y[threadIdx.x]); }
"""


def code(source: str) -> str:
    return machine_code_hash(compile_source(source, "sm_80").cubin)


def test_names_and_comments_do_not_count_but_instructions_and_constants_do():
    expected = code(SOURCE)
    assert code("// a comment, and further lines\n\n" + SOURCE.replace("twice", "doubled")) == expected
    assert code(SOURCE.replace("2.f", "3.f")) != expected
    assert code(SOURCE.replace("y[threadIdx.x] =", "y[threadIdx.x + 1] =")) != expected


def test_what_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="ELF"):
        machine_code_hash(b"no machine code")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("int a = 1;// one\n  /* two\n */ int  b=a ;", True),
        ("int a = 1; int c = a;", False),
        ("int a = 1; int b = -a;", False),
    ],
)
def test_white_space_and_comments_are_no_tokens(other, same):
    assert (cubins.tokens_hash("int a = 1;\nint b = a;\n") == cubins.tokens_hash(other)) is same


def test_strings_are_tokens_as_they_are():
    assert cubins.tokens_hash('asm("a  // b");') != cubins.tokens_hash('asm("a // b");')


def test_every_kind_of_difference_is_listed():
    before = {name: cubins.Code(name, 32, name) for name in ("same", "gone", "other", "wider")}
    now = {
        "same": before["same"],
        "other": cubins.Code("x", 32, "y"),
        "wider": cubins.Code("wider", 40, "y"),
        "new": before["gone"],
    }
    assert cubins.differences(before, now) == [
        "gone: gone",
        "differs: other (32 → 32 registers)",
        "differs: wider (32 → 40 registers)",
        "new: new",
    ]


def test_a_record_is_read_as_it_was_written(tmp_path):
    codes = {"flash_mma/a": cubins.Code("1", 32, "2"), "split_kv/b": cubins.Code("3", 40, "4")}
    cubins.write(tmp_path / "record.json", codes)
    assert json.loads((tmp_path / "record.json").read_text())["compiler"].startswith("NVRTC")
    assert cubins.read(tmp_path / "record.json", ["split_kv"])[1] == {"split_kv/b": codes["split_kv/b"]}
