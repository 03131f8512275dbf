"""Compiled kernels on disk: what is found again, what is not trusted, and what a process that finds them imports."""

import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from evoattn.backends import versions
from evoattn.backends.cubins import get_cubin, recipe_of
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from tests.ops.fake_device import WGMMA

L4, FAMILY = GPUS["l4"], FAMILIES["flash_scalar"]
CONFIG = KernelConfig(FAMILY.name, load_space(FAMILY.name, L4).starting[0])
PROBLEM = AttentionProblem(1, 2, 2, 64, 64, 64)


def key(problem=PROBLEM, config=CONFIG, gpu=L4, family=FAMILY):
    return recipe_of(family, problem, config, gpu)


def test_the_key_covers_what_the_machine_code_depends_on():
    same = key()
    assert key(PROBLEM.with_(batch=3, seqlen_q=9)) == same, "lengths are run-time arguments"
    assert key(gpu=GPUS["l40s"]) == same, "of one architecture"
    others = [
        key(PROBLEM.with_(head_dim=128)),
        key(PROBLEM.with_(dtype="bf16")),
        key(PROBLEM.with_(mask="causal_upper_left")),
        key(config=replace(CONFIG, params=CONFIG.params | {"BLOCK_N": 32})),
        key(gpu=GPUS["a100"]),
        key(config=KernelConfig("flash_wgmma", WGMMA), gpu=GPUS["h100"], family=FAMILIES["flash_wgmma"]),
    ]
    assert len({same, *others}) == 1 + len(others)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_key_covers_every_file_that_the_source_is_made_of(name, tmp_path):
    shutil.copytree(TEMPLATES, tmp_path / "templates")

    def digest() -> str:
        versions.template_digest.cache_clear()
        return versions.template_digest(name, tmp_path / "templates")

    def included(file):
        found = re.findall(r'include "([^"{]+)"', file.read_text())
        return [tmp_path / "templates" / one for one in found]

    template = tmp_path / "templates" / f"{name}.cu.j2"
    first = included(template)
    own = (tmp_path / "templates" / name).rglob("*.cuh")  # some by a name that a constant says a part of
    files = list(dict.fromkeys([template, *first, *(file for one in first for file in included(one)), *own]))
    seen = {digest()}
    assert seen == {versions.template_digest(name)}
    for file in files:
        file.write_text(file.read_text() + "// changed\n")
        seen.add(digest())
    assert len(seen) == 1 + len(files) > 3
    now = digest()
    (tmp_path / "templates/device/of_nobody.cuh").write_text("// new\n")
    assert digest() == now, "of what no source of the family has nothing was made"


@pytest.mark.slow
def test_a_kernel_is_compiled_once_and_found_again(tmp_path):
    fresh = get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path)
    assert fresh.code.startswith(b"\x7fELF")
    code = f"""
        import sys
        from pathlib import Path
        from evoattn.families.registry import FAMILIES
        from evoattn.model.gpu import GPUS
        from evoattn.model.problem import AttentionProblem
        from evoattn.model.space import KernelConfig
        from evoattn.backends.cubins import get_cubin, recipe_of
        config = KernelConfig("flash_scalar", {CONFIG.params})
        args = FAMILIES["flash_scalar"], AttentionProblem(1, 2, 2, 64, 64, 64), config
        found = get_cubin(*args, GPUS["l4"], Path({str(tmp_path)!r}))
        assert found.digest == {fresh.digest!r}
        compilers = {{"jinja2", "cupy", "evoattn.backends.compiler"}}
        assert not compilers & set(sys.modules), "a warm process needs no compiler"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [pytest.param(text, marks=pytest.mark.slow) for text in (b"", b"not json\n", b"{}\nx")]
    + [b'{"digest": 1, "source": ""}\nx', None],
)
def test_a_damaged_file_is_compiled_again_with_a_warning(tmp_path, damage):
    fresh = get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path)
    (path,) = tmp_path.glob("*.kernel")
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.warns(RuntimeWarning, match="is damaged; it is compiled again"):
        assert get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path).digest == fresh.digest
    assert get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path) == fresh


@pytest.mark.slow
def test_another_kernels_file_under_this_name_is_compiled_again(tmp_path):
    fresh = get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path)
    other = get_cubin(FAMILY, PROBLEM.with_(head_dim=32), CONFIG, L4, tmp_path)
    (tmp_path / f"{fresh.recipe}.kernel").write_bytes((tmp_path / f"{other.recipe}.kernel").read_bytes())
    with pytest.warns(RuntimeWarning, match="is damaged; it is compiled again"):
        assert get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path) == fresh


@pytest.mark.slow
def test_a_planted_file_is_compiled_again(tmp_path):
    fresh = get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path)
    (path,) = tmp_path.glob("*.kernel")
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="is passed over"):
        assert get_cubin(FAMILY, PROBLEM, CONFIG, L4, tmp_path) == fresh
    assert path.stat().st_mode & 0o777 == 0o600, "a file of our own is in its place"


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert get_cubin(FAMILY, PROBLEM, CONFIG, L4, blocked / "folder").code.startswith(b"\x7fELF")


HEAVY = (
    *("torch._dynamo", "torch._inductor", "sympy", "yaml", "decimal", "evoattn.correctness", "evoattn.model.records"),
    *("optuna", "sqlalchemy", "typer", "rich", "jinja2", "cupy", "plotly", "alembic", "pandas"),
)


@pytest.mark.slow
def test_the_import_of_attention_adds_little_to_that_of_torch():
    names = "import sys, torch; before = set(sys.modules); import evoattn; evoattn.attention, evoattn.sdpa"
    code = f"{names}; print(*set(sys.modules) - before)"
    added = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not [name for name in added if name.startswith(HEAVY)]
