"""What the formatter of CUDA may not touch stays. `make lint` says whether templates/ is formatted."""

import importlib.util
from pathlib import Path

import pytest

from evoattn.families.render import MARKER
from scripts import format_cuda

pytestmark = pytest.mark.skipif(
    format_cuda.shutil.which("clang-format") is None and not importlib.util.find_spec("clang_format"),
    reason="clang-format is not installed",
)


@pytest.fixture
def program():
    return format_cuda.formatter()


def test_a_header_is_formatted(program):
    assert format_cuda.formatted(Path("a.cuh"), "// a\nint  a ;\n", program) == "// a\nint a;\n"


def test_a_template_is_formatted_below_the_marker_only(program):
    above = f"constexpr int A = {{{{ A }}}} ;\n{MARKER}\n"
    assert format_cuda.formatted(Path("a.cu.j2"), above + "int  b ;\n", program) == above + "int b;\n"


def test_a_part_of_a_body_is_formatted_as_one(program):
    text = "  // a.cuh, a part of the kernel's body: one loop.\n  while (1) { a( ); }\n"
    assert format_cuda.formatted(Path("a.cuh"), text, program) == text.replace("( )", "()")


def test_template_arguments_that_would_be_torn_apart_are_refused(program):
    text = "void a() { b = c.template d<!E || F>(g); }\n"
    with pytest.raises(format_cuda.FormatterError, match="named constant"):
        format_cuda.formatted(Path("a.cuh"), text, program)
    assert "d<E>(g)" in format_cuda.formatted(Path("a.cuh"), text.replace("!E || F", "E"), program)
