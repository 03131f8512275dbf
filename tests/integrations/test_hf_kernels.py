"""The layout of Hugging Face's `kernels`: read as it reads it, and by itself where it is installed."""

import importlib.util
import json

import pytest

import evoattn
from evoattn.integrations import hf_kernels


def test_a_variant_has_flash_attention_s_functions(tmp_path, capsys):
    assert hf_kernels.main([str(tmp_path / "repository")]) == 0 and "get_local_kernel" in capsys.readouterr().out
    place = tmp_path / "repository" / "build" / "torch-universal"
    metadata = json.loads((place / "metadata.json").read_text())
    assert metadata.keys() == {"id", "name", "version", "license", "python-depends", "backend"}
    spec = importlib.util.spec_from_file_location(metadata["id"], place / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.flash_attn_varlen_func is evoattn.flash_attn.flash_attn_varlen_func
    assert set(module.__all__) == set(evoattn.flash_attn.__all__)
    assert hf_kernels.main([]) == 2


def test_the_package_loads_it(tmp_path):
    kernels = pytest.importorskip("kernels")
    hf_kernels.write(tmp_path)
    assert kernels.get_local_kernel(tmp_path).flash_attn_func is evoattn.flash_attn.flash_attn_func
