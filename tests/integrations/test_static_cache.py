"""Steps over a static cache of transformers: the logits are eager's, by one kernel for all fillings of the cache."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from fake_cache import CacheDevice, split_kv_pick  # noqa: E402
from fake_device import fake_runtime, wgmma_pick  # noqa: E402
from test_transformers import TINY, TOKENS, close, llama, qwen3  # noqa: E402

from evoattn.integrations.static_cache import as_mask, filled_places, is_filled_places  # noqa: E402
from evoattn.integrations.transformers import NAME, register  # noqa: E402
from evoattn.ops import current  # noqa: E402

STEPS = (1, 1, 3, 1)
"""Tokens of each step after the prompt: three at once are a speculative step."""


def gemma2():
    config = transformers.Gemma2Config(
        **TINY, num_key_value_heads=2, head_dim=64, attn_logit_softcapping=2.0, layer_types=["full_attention"] * 2
    )
    return transformers.Gemma2ForCausalLM, config, dict(input_ids=TOKENS)


def steps(make, implementation, compiled=False):
    """Logits of the steps, by a model with a static cache, two sequences at once."""
    torch.manual_seed(0)
    kind, config, _ = make()
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=64)
    tokens = torch.cat((TOKENS, TOKENS.flip(1)))
    model(input_ids=tokens[:, :20], past_key_values=cache)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    found, at = [], 20
    for count in STEPS:
        found.append(run(input_ids=tokens[:, at : at + count], past_key_values=cache).logits)
        at += count
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("make", [llama, qwen3, gemma2])
def test_the_logits_are_eager_s(tmp_path, make):
    register()
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected, ours = steps(make, "eager"), steps(make, NAME)
        assert close(ours, expected)
    served = fake.launches.count("split_kv")
    assert served >= 2 * len(STEPS)  # in each of two layers, and checks before them


@pytest.mark.slow
def test_compiled_steps_take_the_same_kernel(tmp_path):
    torch.compiler.reset()
    register()
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected = steps(llama, "eager")
        plain = steps(llama, NAME)
        before = len(fake.launches)
        assert close(steps(llama, NAME, compiled=True), expected)
        assert len(fake.launches) - before == 2 * len(STEPS)
        assert close(plain, expected)
    torch.compiler.reset()


def test_without_a_kernel_they_are_sdpa_s(tmp_path):
    register()
    for pick in (None, lambda problem, gpu: None if problem.seqused else wgmma_pick(problem, gpu)):
        fake = None if pick is None else CacheDevice()
        with current.use(fake_runtime(fake, tmp_path, pick or wgmma_pick)), torch.no_grad():
            if fake is None:
                assert torch.equal(steps(llama, NAME), steps(llama, "sdpa"))
            else:
                steps(llama, "sdpa")
                assert not fake.launches


def test_filled_places_say_what_a_mask_does():
    filled = filled_places(2, 3, torch.tensor(20))
    assert is_filled_places(filled) and filled.flatten().tolist() == [23, 23]
    mask = as_mask(filled, 3, 30)
    assert mask.shape == (2, 1, 3, 30) and mask.sum(-1).flatten().tolist() == [21, 22, 23] * 2
    assert not is_filled_places(mask) and not is_filled_places(None)
