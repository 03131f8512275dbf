"""scripts/fetch_peers.py takes out of vLLM's wheel what FlashAttention 3 needs, and asks pip for the Python that is wanted."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

from evoattn.paths import ROOT

spec = importlib.util.spec_from_file_location("fetch_peers", ROOT / "scripts" / "fetch_peers.py")
fetch_peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fetch_peers)
FLASH = "vllm/vllm_flash_attn"
WHEEL = ("vllm/__init__.py", f"{FLASH}/_vllm_fa2_C.abi3.so", f"{FLASH}/_vllm_fa3_C.abi3.so", "vllm-0.20.2.dist-info/METADATA")


@pytest.mark.parametrize("python_version", [None, "3.12"])
def test_one_library_of_vllm_and_the_packages_of_fa4_end_in_the_folder(tmp_path, monkeypatch, python_version):
    asked = []

    def pip(*words):
        asked.append(words)
        if words[0] == "download":
            with zipfile.ZipFile(Path(words[words.index("--dest") + 1], "vllm-0.20.2-cp38-abi3-linux_x86_64.whl"), "w") as wheel:
                for name in WHEEL:
                    wheel.writestr(name, name)
        else:
            (tmp_path / "peers" / fetch_peers.DSL).mkdir(parents=True)

    monkeypatch.setattr(fetch_peers, "pip", pip)
    folder = tmp_path / "peers"
    assert fetch_peers.fetch(folder, python_version) == [folder, folder / "nvidia_cutlass_dsl" / "dsl_packages"]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(WHEEL[2:])
    for words in asked:
        assert "--no-deps" in words and ("manylinux_2_28_x86_64" in words) == ("3.12" in words) == bool(python_version)


def test_a_failing_pip_is_one_sentence():
    with pytest.raises(SystemExit, match="pip failed: pip no-such-command"):
        fetch_peers.pip("no-such-command")
