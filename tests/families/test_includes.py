"""Headers are found by what a template includes, each put into the source once."""

import pytest

from evoattn.families.includes import IncludeError, resolve
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.paths import TEMPLATES
from evoattn.search.starting import starting_configs
from tests.support.compiles import compile_ptx
from tests.support.own_problems import own_problems

SHARED = sorted((TEMPLATES / "device").rglob("*.cuh"))


@pytest.fixture
def headers(tmp_path):
    """Writes headers, as names and texts, into a folder."""

    def write(**texts: str):
        for name, text in texts.items():
            (tmp_path / f"{name}.cuh").write_text(text)
        return tmp_path

    return write


def test_a_header_comes_once_after_those_it_includes(headers):
    folder = headers(
        a='// a\n#include "b.cuh"\n#include "c.cuh"\n\nint a;\n', b='// b\n#include "c.cuh"\n\nint b;\n', c="int c;\n"
    )
    text = resolve('// top\n#include "a.cuh"\n#include "c.cuh"  // again\nint end;\n', folder)
    assert text.split("\n") == [
        *("// top", "int c;", "", "// b", "", "int b;", "", "// a", "", "int a;", "", "int end;", "")
    ]


def test_a_header_is_put_in_verbatim(headers):
    body = 'asm("{%0, %1}" :: "r"(x));  // {{0}} {% if %}\n#include <mma.h>\n\tint a = 1 ;'
    assert resolve('#include "a.cuh"\n', headers(a=body + "\n")) == body + "\n\n"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"a": '#include "nowhere.cuh"\n'}, "no header 'nowhere.cuh'.*by a.cuh"),
        ({"a": '#include "../a.cuh"\n'}, "no header"),
        ({"a": '#include "a.cuh"\n'}, "a.cuh → a.cuh"),
        ({"a": '#include "b.cuh"\n', "b": '#include "a.cuh"\n'}, "a.cuh → b.cuh → a.cuh"),
        ({"a": 'int a;\n#include "b.cuh"\n', "b": ""}, "after its code"),
    ],
)
def test_what_cannot_be_included_is_said(headers, texts, said):
    with pytest.raises(IncludeError, match=said):
        resolve('#include "a.cuh"\n', headers(**texts))


def test_a_template_that_includes_no_file_says_so(headers):
    with pytest.raises(IncludeError, match="by a template"):
        resolve('#include "gone.cuh"\n', headers())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_rendered_source_is_whole(family):
    gpu = GPUS["h100"]
    problem = own_problems(family, gpu)[0]
    for config in starting_configs(load_space(family.name, gpu), problem, gpu)[:3]:
        source = render(family, problem, config, gpu).source
        assert '#include "' not in source
        for header in TEMPLATES.rglob("*.cuh"):
            assert source.count(header.read_text().splitlines()[0]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("header", SHARED, ids=lambda path: path.stem)
def test_a_shared_header_includes_all_that_it_needs(header):
    """It compiles alone; what a template's constants complete is no part of `templates/device`."""
    name = header.relative_to(TEMPLATES).as_posix()
    compile_ptx(resolve(f'#include "{name}"\n', TEMPLATES), "sm_90a")
