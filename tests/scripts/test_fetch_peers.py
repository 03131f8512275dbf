"""scripts/fetch_peers.py asks pip for all peers, for the Python that is wanted."""

import importlib.util

import pytest

from evoattn.model.paths import ROOT

spec = importlib.util.spec_from_file_location("fetch_peers", ROOT / "scripts" / "fetch_peers.py")
fetch_peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fetch_peers)


@pytest.mark.parametrize("python_version", [None, "3.12"])
def test_all_peers_without_their_needs_for_the_python_that_is_wanted(tmp_path, python_version):
    asked = []
    folders = fetch_peers.fetch(tmp_path, python_version, lambda *words: asked.extend(words))
    assert folders == [tmp_path, tmp_path / "nvidia_cutlass_dsl" / "dsl_packages"]
    assert {"--no-deps", "fa3-fwd==0.0.3", "flash-attn-4==4.0.0b36", "flashinfer-python==0.7.2.post1"} <= set(
        asked
    ) and asked[asked.index("--target") + 1] == str(tmp_path)
    assert ("manylinux_2_28_x86_64" in asked) == ("3.12" in asked) == bool(python_version)


@pytest.mark.slow
def test_a_failing_pip_is_one_sentence():
    with pytest.raises(SystemExit, match="pip failed: pip no-such-command"):
        fetch_peers.pip("no-such-command")
