"""What is said of a slow import of torch."""

import py_compile
from importlib.util import spec_from_file_location

from evoattn.evaluation.imports import why_slow


def test_a_package_without_bytecode_is_named_until_it_is_compiled(tmp_path):
    file = tmp_path / "torch" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    spec = spec_from_file_location("torch", file)
    assert "no bytecode of torch is kept here" in why_slow(spec) and f"compileall -q {file.parent}`" in why_slow(spec)
    py_compile.compile(str(file), cfile=spec.cached)
    assert why_slow(spec) == ""


def test_a_package_that_is_not_there_is_no_slow_one():
    assert why_slow(None) == ""
