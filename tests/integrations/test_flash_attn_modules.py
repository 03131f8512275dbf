"""`evoattn.integrations.flash_attn.install`: what libraries import and ask of FlashAttention, and the functions that
they call themselves where keys are split over cards."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from evoattn import flash_attn
from evoattn.integrations.flash_attn import gradients, install, low_level_2, low_level_3, uninstall, version_2
from tests.integrations.flash_attn_formula import Asked, drawn

HEADS, KV_HEADS, DIM = 4, 2, 16
NAMES = {
    "flash_attn_interface": [
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
        "flash_attn_combine",
    ],
    "flash_attn_3.flash_attn_interface": ["flash_attn_func", "_flash_attn_forward", "_flash_attn_backward"],
    "flash_attn": [
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
    ],
    "flash_attn.flash_attn_interface": [
        "flash_attn_func",
        "_flash_attn_forward",
        "_flash_attn_backward",
        "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward",
        "_wrapped_flash_attn_forward",
        "_wrapped_flash_attn_backward",
    ],
    "flash_attn.bert_padding": ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"],
    "flash_attn_2_cuda": ["varlen_bwd"],
}


@pytest.fixture
def installed():
    install(replace=True)
    yield
    uninstall()


def in_a_process(code):
    done = subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_libraries_import_these(installed, name):
    module = importlib.import_module(name)
    assert not [one for one in NAMES[name] if not callable(getattr(module, one, None))]
    assert importlib.util.find_spec(name) is not None


def test_what_is_installed_is_gone_again():
    before = set(sys.modules), list(sys.meta_path)
    install(replace=True)
    install()  # the second one does nothing
    assert "flash_attn_interface" in sys.modules
    uninstall()
    assert (set(sys.modules), list(sys.meta_path)) == before
    uninstall()


def test_versions_say_whose_they_are(installed):
    for name in ("flash-attn", "flash_attn"):
        assert importlib.metadata.version(name).startswith("2.8.2+evoattn.")
    assert importlib.metadata.version("flash-attn-3").startswith("3.0.0+evoattn.")
    assert "flash-attn-3" in importlib.metadata.packages_distributions()["flash_attn_interface"]
    assert sys.modules["flash_attn"].__version__ == importlib.metadata.version("flash-attn")
    assert importlib.metadata.version("numpy")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn-4")


def test_what_is_there_is_kept(tmp_path):
    """FlashAttention itself, imported or not."""
    (tmp_path / "flash_attn.py").write_text("mine = 1\n")
    in_a_process(f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from evoattn.integrations.flash_attn import install, uninstall
try: install()
except RuntimeError as error: assert "flash_attn is there already" in str(error)
else: raise AssertionError
import flash_attn
install(replace=True)
assert sys.modules["flash_attn"] is not flash_attn
uninstall()
assert sys.modules["flash_attn"] is flash_attn
""")


@pytest.mark.slow
def test_transformers_finds_them():
    pytest.importorskip("transformers")
    in_a_process("""
from evoattn.integrations.flash_attn import install
install()
from transformers.utils import import_utils
assert import_utils._is_package_available("flash_attn", return_version=True)[1].startswith("2.8.2")
assert "flash-attn" in import_utils.PACKAGE_DISTRIBUTION_MAPPING["flash_attn"]
assert "flash-attn-3" in import_utils.PACKAGE_DISTRIBUTION_MAPPING["flash_attn_interface"]
assert import_utils.is_flash_attn_greater_or_equal("2.6.0")
from transformers import modeling_flash_attention_utils as used
for version in (2, 3):
    assert used.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]["pkg_availability_check"]()
import flash_attn, flash_attn_interface
known = used._lazy_define_process_function(flash_attn_interface.flash_attn_varlen_func).keywords["supports_mapping"]
assert known["s_aux"] and known["softcap"] and known["dropout_p"] and known["max_seqlen_q"]
""")


def test_a_library_that_looked_before_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.warns(RuntimeWarning, match="transformers was imported before"):
        install(replace=True)
    uninstall()


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_a_model_of_transformers_runs(name):
    pytest.importorskip("transformers")
    in_a_process(f"""
from evoattn.integrations.flash_attn import install
install()
import torch, transformers
words = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=99)
config = transformers.LlamaConfig(**words, intermediate_size=256)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
tokens, mask = torch.randint(0, 99, (2, 50), device="cuda"), torch.ones(2, 50, dtype=torch.long, device="cuda")
mask[0, :13] = 0
with torch.no_grad():
    for given in ({{}}, {{"attention_mask": mask}}):
        model.set_attn_implementation("sdpa")
        expected = model(tokens, **given).logits
        model.set_attn_implementation({name!r})
        found = model(tokens, **given).logits
        real = mask.bool() if given else torch.ones_like(mask).bool()
        assert torch.allclose(found[real].float(), expected[real].float(), atol=3e-2, rtol=3e-2)
""")


def test_arguments_are_flash_attention_s():
    """Names and order of what callers give without names."""
    three = list(inspect.signature(flash_attn.flash_attn_func).parameters)
    assert three[:9] == ["q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale"]
    two = list(inspect.signature(version_2.flash_attn_func).parameters)
    assert two[3:9] == ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"]


def test_padding_there_and_back():
    from evoattn.integrations.flash_attn.padding import index_first_axis, pad_input, unpad_input

    rows = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    packed, indices, bounds, longest, used = unpad_input(rows, mask)
    assert torch.equal(packed, rows[mask.bool()]) and longest == 4
    assert bounds.tolist() == [0, 2, 2, 6] and used.tolist() == [2, 0, 4] and bounds.dtype == torch.int32
    back = pad_input(packed, indices, 3, 5)
    assert torch.equal(back, rows * mask[..., None, None])
    (gradient,) = torch.autograd.grad(back.sum(), rows)
    assert torch.equal(gradient, mask[..., None, None].expand_as(rows).float())
    assert torch.equal(index_first_axis(rows.flatten(0, 1), indices), packed)
    unused = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    _, _, bounds, longest, used = unpad_input(rows, mask, unused)
    assert bounds.tolist() == [0, 3, 4, 8] and longest == 4 and used.tolist() == [2, 0, 4]


WORDS = [
    {},
    {"causal": True},
    {"window_size": (7, 2)},
    {"softcap": 3.0},
    {"alibi_slopes": torch.linspace(0.1, 0.5, HEADS), "causal": True},
    {"softmax_scale": 0.4},
]


def split(words):
    past, ahead = words.get("window_size", (-1, -1))
    softcap, slopes = words.get("softcap", 0.0), words.get("alibi_slopes")
    return words.get("softmax_scale"), words.get("causal", False), past, ahead, softcap, slopes


@pytest.mark.parametrize("words", WORDS)
def test_gradients_from_the_output_of_more_keys(words, monkeypatch):
    """As a ring of cards computes them: out and log-sum-exp are those of all keys, keys are a part."""
    q, k, v = drawn(2, 9, HEADS, DIM, seed=1), drawn(2, 24, KV_HEADS, DIM, seed=2), drawn(2, 24, KV_HEADS, DIM, seed=3)
    inputs, dout = [t.requires_grad_() for t in (q, k, v)], drawn(2, 9, HEADS, DIM, seed=4)
    answers = [Asked(**words).of(*(t[b] for t in inputs), b) for b in range(2)]
    out, lse = (torch.stack([one[i] for one in answers]) for i in range(2))
    expected = torch.autograd.grad(out, inputs, dout)
    found = [torch.empty_like(t) for t in inputs]
    with torch.no_grad():
        for scores in (gradients.SCORES_AT_ONCE, 1):  # a row at a time, where they are many
            monkeypatch.setattr(gradients, "SCORES_AT_ONCE", scores)
            low_level_2._flash_attn_backward(dout, q, k, v, out, lse, *found, 0.0, *split(words))
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.allclose(mine, theirs, atol=1e-6)
        forward = low_level_2._flash_attn_forward(q, k, v, 0.0, *split(words))
        assert torch.allclose(forward[0], out) and torch.allclose(forward[1].double(), lse, atol=1e-5)
        if not words:
            later, first = slice(10, 24), torch.empty_like(q)
            parts = [torch.empty_like(t[:, later]) for t in (k, v)]
            low_level_3._flash_attn_backward(
                dout, q, k[:, later], v[:, later], out, lse, dq=first, dk=parts[0], dv=parts[1]
            )
            for mine, theirs in zip(parts, expected[1:], strict=True):
                assert torch.allclose(mine, theirs[:, later], atol=1e-6)


@pytest.mark.parametrize("words", WORDS)
def test_gradients_of_packed_sequences(words):
    queries, keys = [3, 0, 9], [5, 4, 17]
    cu_q, cu_k = torch.tensor([0, 3, 3, 12]).int(), torch.tensor([0, 5, 9, 26]).int()
    q, dout = drawn(12, HEADS, DIM, seed=1), drawn(12, HEADS, DIM, seed=4)
    k, v = (drawn(26, KV_HEADS, DIM, seed=seed) for seed in (2, 3))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    parts = [
        Asked(**words).of(q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]])
        for i in range(len(queries))
    ]
    out, lse = torch.cat([one[0] for one in parts]), torch.cat([one[1] for one in parts], dim=1)
    expected, found = torch.autograd.grad(out, inputs, dout), [torch.empty_like(t) for t in inputs]
    lengths = cu_q, cu_k, max(queries), max(keys)
    with torch.no_grad():
        low_level_2._flash_attn_varlen_backward(dout, q, k, v, out, lse, *found, *lengths, 0.0, *split(words))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
        forward = low_level_2._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, *split(words))
        assert torch.allclose(forward[0], out) and torch.allclose(forward[1].double(), lse, atol=1e-5)
        scale, causal, past, ahead, softcap, slopes = split(words)
        if slopes is None:
            three = low_level_3._flash_attn_forward(
                q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=9, max_seqlen_k=17, softmax_scale=scale,
                causal=causal, window_size_left=past, window_size_right=ahead, softcap=softcap,
            )  # fmt: skip
            assert len(three) == 4 and torch.allclose(three[0], out)
            low_level_3._flash_attn_backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                *lengths[:2],
                None,
                None,
                *lengths[2:],
                *found,
                scale,
                causal,
                past,
                ahead,
                softcap,
            )
            assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(found, expected, strict=True))


def test_forward_of_version_3_over_a_cache():
    cache = [drawn(2, 20, KV_HEADS, DIM, seed=seed) for seed in (1, 2)]
    q, used = drawn(2, 3, HEADS, DIM, seed=3), torch.tensor([5, 17]).int()
    out, lse, *_ = low_level_3._flash_attn_forward(q, *cache, seqused_k=used, causal=True)
    for b, count in enumerate(used.tolist()):
        expected, sums = Asked(causal=True).of(q[b], cache[0][b, :count], cache[1][b, :count])
        assert torch.allclose(out[b], expected) and torch.allclose(lse[b].double(), sums, atol=1e-5)


def test_what_is_refused_is_said():
    q = drawn(2, 3, HEADS, DIM, seed=3)
    with pytest.raises(ValueError, match="no dropout"):
        low_level_2._flash_attn_forward(q, q, q, 0.1, None, False)
    with pytest.raises(ValueError, match="seqused"):
        low_level_3._flash_attn_backward(q, q, q, q, q, q, sequed_k=torch.ones(2))
    with pytest.raises(ValueError, match="seqused_q"):
        low_level_3._flash_attn_forward(q, q, q, seqused_q=torch.ones(2))
    with pytest.raises(NotImplementedError, match="varlen_bwd"):
        low_level_2.varlen_bwd()
