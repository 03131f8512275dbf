"""Steps over a static cache of transformers: the logits are eager's, by one kernel for all fillings of the cache.
Tokens over a growing cache of transformers: what the integration does for each is little, whatever the model's code is
as long."""

import pytest

transformers = pytest.importorskip("transformers")
import sys
from collections import Counter
from pathlib import Path

import torch

import evoattn
from evoattn.integrations import by_hand
from evoattn.integrations.static_cache import (
    TRACES_NO_COPY,
    attention,
    filled_places,
    kernel_serves,
    padded_places,
    places_of,
)
from evoattn.integrations.transformers import NAME, register
from evoattn.ops.check import record_check
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import lasting_pick, next_picks
from tests.integrations.test_transformers import TINY, TOKENS, close, deepseek, llama, near, qwen3
from tests.ops.fake_device import BUILT, CacheDevice, FakeDevice, build, fake_runtime, split_kv_pick, wgmma_pick

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


def gemma4():
    """Layers of two head_dims, of which the config as a whole has none."""
    config = transformers.Gemma4TextConfig(
        **TINY,
        **dict(num_key_value_heads=2, head_dim=32, global_head_dim=64, sliding_window=16),
        **dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=99),
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.Gemma4ForCausalLM, config, dict(input_ids=TOKENS)


@pytest.mark.parametrize("make, layers", [(llama, 2), (qwen3, 2), (gemma2, 2), (gemma4, 1)])
def test_the_logits_are_eager_s(tmp_path, make, layers):
    register()
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected, ours = steps(make, "eager"), steps(make, NAME)
        assert near(ours, expected) if make is gemma4 else close(ours, expected)
    served = fake.launches.count("split_kv")
    assert served >= layers * len(STEPS)  # in each layer without a window, and checks before them


@pytest.mark.slow
@pytest.mark.parametrize("make, layers", [(llama, 2), (gemma4, 1)])
def test_compiled_steps_take_the_same_kernel(tmp_path, make, layers):
    torch.compiler.reset()
    register()
    fake = CacheDevice()
    alike = near if make is gemma4 else close
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected = steps(make, "eager")
        plain = steps(make, NAME)
        before = len(fake.launches)
        assert alike(steps(make, NAME, compiled=True), expected)
        served = 0 if make is gemma4 and TRACES_NO_COPY else layers * len(STEPS)
        assert len(fake.launches) - before == served
        assert alike(plain, expected)
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
    filled = places_of(filled_places(2, 3, torch.tensor(20)), 2, 30, torch.bfloat16)
    assert filled.filled.tolist() == [23, 23] and filled.bias is None
    mask = filled.as_mask(3, 30)
    assert mask.shape == (2, 1, 3, 30) and mask.sum(-1).flatten().tolist() == [21, 22, 23] * 2
    assert places_of(mask, 2, 30, torch.bfloat16) is None and places_of(None, 2, 30, torch.bfloat16) is None
    assert places_of(mask.int(), 2, 30, torch.bfloat16) is None


def test_a_step_has_its_scale_its_soft_cap_and_its_sinks():
    q, (k, v), sinks = 9 * torch.randn(2, 4, 1, 16), torch.randn(2, 2, 2, 30, 16), torch.randn(4)
    seen = places_of(filled_places(2, 1, torch.tensor(20)), 2, 30, torch.float32)
    for more in ((0.5, 0.0, None), (None, 2.0, None), (None, 0.0, sinks)):
        exact = by_hand.attention(q, k, v, seen.as_mask(1, 30), 0.0, more[0], False, more[1] or None, more[2])
        torch.testing.assert_close(attention(q, k, v, seen, *more).transpose(1, 2), exact)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("places, said", [(30, 21), (32, 21), (30, 40)])
def test_padded_places_say_what_a_mask_does(places, said, dtype):
    padding = torch.ones(3, said, dtype=torch.bool)
    padding[1, :7] = padding[2, 3:5] = padding[:, 21:] = False
    seen = places_of(padded_places(3, torch.tensor(20), padding, places, dtype), 3, places, dtype)
    assert seen.filled.tolist() == [21] * 3 and seen.bias.dtype == dtype
    expected = torch.nn.functional.pad(padding, (0, places - said))
    assert torch.equal(seen.as_mask(1, places), expected[:, None, None])


def generated(make, implementation, padding, steps=6, cache="static", **others):
    """Logits of `generate`, two sequences at once."""
    torch.manual_seed(0)
    kind, config, _ = make()
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16).eval()
    made = model.generate(
        torch.cat((TOKENS, TOKENS.flip(1)))[:, :20],
        attention_mask=padding,
        **dict(max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0, eos_token_id=98),
        **dict(cache_implementation=cache, output_logits=True, return_dict_in_generate=True),
        **others,
    )
    return torch.stack(made.logits, dim=1)


@pytest.mark.parametrize("make", [llama, qwen3])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_takes_a_kernel_with_padding_and_without(tmp_path, make, padded):
    register()
    padding = torch.ones(2, 20, dtype=torch.long)
    if padded:
        padding[1, :13] = 0
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected, before = generated(make, "eager", padding), len(fake.launches)
        ours = generated(make, NAME, padding)
        assert close(ours, expected)
        assert fake.launches[before:].count("split_kv") >= 2 * 5  # of two layers; the prompt is no step
    assert padded == (not close(generated(make, "eager", torch.ones_like(padding)), expected))


@pytest.mark.parametrize("make", [llama, gemma2])
def test_padding_before_a_growing_cache_is_a_bias(tmp_path, make):
    """As the prompts of a batch have it."""
    register()
    padding = torch.ones(2, 20, dtype=torch.long)
    padding[1, :13] = 0
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected, before = generated(make, "eager", padding, cache=None), len(fake.launches)
        assert close(generated(make, NAME, padding, cache=None), expected)
        assert fake.launches[before:].count("split_kv") >= 2 * 5
        before = len(fake.launches)
        generated(make, NAME, torch.ones_like(padding), cache=None)
        assert "split_kv" not in fake.launches[before:], "nothing is hidden"
        assert not close(generated(make, "eager", torch.ones_like(padding), cache=None), expected)


@pytest.mark.slow
def test_compiled_steps_of_generate_take_the_kernel(tmp_path):
    torch.compiler.reset()
    register()
    padding = torch.ones(2, 20, dtype=torch.long)
    padding[1, :13] = 0
    compiled = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
        expected, before = generated(llama, "eager", padding), len(fake.launches)
        assert close(generated(llama, NAME, padding, compile_config=compiled), expected)
        assert fake.launches[before:].count("split_kv") >= 2 * 5
    torch.compiler.reset()


def test_no_step_of_generate_reads_a_mask_back(tmp_path):
    register()
    fake = CacheDevice()
    places = []

    def watched(*arguments, **others):
        made = transformers_mask(*arguments, **others)
        places.append((others["q_length"], made))
        return made

    transformers_mask = transformers.AttentionMaskInterface()[NAME]
    transformers.AttentionMaskInterface.register(NAME, watched)
    try:
        with current.use(fake_runtime(fake, tmp_path, split_kv_pick)), torch.no_grad():
            generated(llama, NAME, torch.ones(2, 20, dtype=torch.long))
    finally:
        register()
    steps = [made for queries, made in places if queries == 1]
    assert len(steps) == 5 and all(made.dtype == torch.int32 for made in steps)
    assert len({made.shape for made in steps}) == 1, "a compiled or captured step runs again"


def test_under_autocast_padding_is_a_mask_tensor(tmp_path):
    """A bf16 model's bias read as fp16, which autocast makes the queries, would hold NaN in place of -inf."""
    register()
    made = transformers.AttentionMaskInterface()[NAME]
    padding = torch.ones(2, 21, dtype=torch.bool)
    padding[1, :7] = False
    config = llama()[1]
    sizes = dict(batch_size=2, q_length=1, kv_length=64, q_offset=torch.tensor(20), attention_mask=padding)
    with current.use(fake_runtime(CacheDevice(), tmp_path, split_kv_pick)):
        assert made(**sizes, config=config, dtype=torch.bfloat16).dtype == torch.int32
        with torch.autocast("cpu", torch.float16):
            mask = made(**sizes, config=config, dtype=torch.bfloat16)
    assert mask.dtype == torch.bool and mask.sum(-1).flatten().tolist() == [21, 14]


def test_latent_attention_asks_for_its_own_head_dims(tmp_path):
    """Of keys with 16 rotated columns and 48 others, and values of 32; head_dim in its config is the rotated part."""
    asked, config = [], deepseek()[1]
    pick = lambda problem, gpu: asked.append(problem)
    with current.use(fake_runtime(CacheDevice(), tmp_path, pick)):
        assert not kernel_serves(config, 2, 1, 64, torch.bfloat16, torch.device("cpu"))
    (problem,) = asked
    assert (problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim_v) == (4, 4, 64, 32)
    assert config.head_dim == 16


def test_whether_a_kernel_serves_is_asked_again_where_that_may_have_changed(tmp_path):
    """After `tune` has found one, and after the one that served has failed."""
    found = []
    pick = lambda problem, gpu: split_kv_pick(problem, gpu) if found else None
    fake, config = CacheDevice(), llama()[1]
    step = config, 2, 1, 64, torch.bfloat16, torch.device("cpu")
    with current.use(fake_runtime(fake, tmp_path, pick)) as runtime, torch.no_grad():
        assert not kernel_serves(*step)
        found.append(True)
        assert not kernel_serves(*step), "what was found out is kept"
        runtime.forget()
        assert kernel_serves(*step)
        register()
        BUILT.clear()
        fake.status = 1  # so that the kernel fails its check
        with pytest.warns(RuntimeWarning, match="fake error 1; SDPA runs"):
            steps(llama, NAME)
        assert not kernel_serves(*step)


LAYERS, PROMPT = 4, 130
SIZES = dict(hidden_size=256, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=99)
SIZES |= dict(num_key_value_heads=2, head_dim=64, max_position_embeddings=512)
KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
MODELS = {
    "llama": lambda: (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)),
    "mistral": lambda: (transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=64)),
    "gemma3": lambda: (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(**SIZES, sliding_window=64, layer_types=KINDS),
    ),
}
FOR_MASKS, FOR_ATTENTION, FOR_A_LENGTH = 60, 60, 1000
"""Calls of evoattn's functions: for each kind of layer's masks, for each layer, and for each kind's new length."""

PACKAGE = str(Path(evoattn.__file__).parent)


class Idle(FakeDevice):
    """It computes nothing."""

    def launch(self, *arguments: object) -> int:
        self.launches.append(arguments)
        return 0


def right(family, problem, config, gpu, folder):
    """Machine code that was checked before."""
    cubin = build(family, problem, config, gpu, folder)
    record_check(cubin, Idle().identity(0), folder, config, "")
    return cubin


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_token_takes_few_calls_and_reads_no_code(tmp_path, name, padded):
    register()
    make, config = MODELS[name]()
    torch.manual_seed(0)
    model = make._from_config(config, attn_implementation=NAME).eval().bfloat16()
    tokens = torch.arange(3, 3 + PROMPT).repeat(2, 1) % 99
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :20] = 0
    calls: Counter[str] = Counter()

    def counted(frame, event: str, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls["evoattn"] += 1
        elif event == "c_call" and argument.__qualname__ == "Pattern.search":
            calls["searches"] += 1

    device = Idle()
    with current.use(Runtime(device, lasting_pick, tmp_path, right, next_picks)), torch.no_grad():
        cache = transformers.DynamicCache(config=config)
        model(input_ids=tokens, past_key_values=cache, attention_mask=mask)
        for token in range(4):
            mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
            before, launches = sys.getprofile(), len(device.launches)
            if token == 3:  # lengths are rounded alike, and all that is found out once is known
                sys.setprofile(counted)
            try:
                model(input_ids=tokens[:, :1], past_key_values=cache, attention_mask=mask)
            finally:
                sys.setprofile(before)
    assert len(device.launches) - launches >= (LAYERS // 2 if padded and name != "llama" else LAYERS)
    assert calls["searches"] == 0
    kinds = len(set(getattr(config, "layer_types", None) or ["full_attention"]))
    assert calls["evoattn"] < kinds * (FOR_MASKS + FOR_A_LENGTH) + LAYERS * FOR_ATTENTION
