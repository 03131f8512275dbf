"""Random-init models of transformers with windows, sinks, soft caps and position biases: their logits are eager's."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from evoattn.integrations.transformers import NAME, attention_forward, mask, register
from evoattn.ops.runtime import current
from tests.integrations.test_transformers import (
    TINY,
    TOKENS,
    close,
    deepseek,
    gemma3,
    gpt_oss,
    logits,
    mistral,
    near,
    of_text,
    t5,
)
from tests.ops.fake_device import FakeDevice, fake_runtime, wgmma_pick


def gemma2(window):
    scores = dict(attn_logit_softcapping=2.0, query_pre_attn_scalar=4)
    return of_text("Gemma2", **scores, head_dim=64, sliding_window=window)


def gemma4(shared_layers=0):
    """Full layers have twice the head_dim of those with windows; the last ones may have no keys of their own."""
    config = transformers.Gemma4TextConfig(
        **(TINY | dict(num_hidden_layers=4)),
        **dict(num_key_value_heads=2, head_dim=32, global_head_dim=64, sliding_window=16),
        **dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=99, num_kv_shared_layers=shared_layers),
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return transformers.Gemma4ForCausalLM, config, dict(input_ids=TOKENS)


EAGER = {
    "mistral": lambda: mistral(16),
    "gemma2": lambda: gemma2(16),
    "gemma3": lambda: gemma3(16),
    "gemma4": gemma4,
    "gemma4, keys shared": lambda: gemma4(2),
    "gpt-oss": gpt_oss,
    "t5": t5,
    "deepseek": deepseek,
}


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("has_device", [True, False])
def test_the_logits_of_variants_are_eager_s(tmp_path, name, has_device):
    """In float32 without a device, where nothing but the order of sums differs; by the fake one's kernels in bf16."""
    register()
    dtype = torch.bfloat16 if has_device else torch.float32
    fake = FakeDevice()
    with current.use(fake_runtime(fake if has_device else None, tmp_path)), torch.no_grad():
        kind, config, inputs = EAGER[name]()
        answers = []
        for implementation in ("eager", NAME):
            torch.manual_seed(0)
            model = kind._from_config(config, attn_implementation=implementation, dtype=dtype).eval()
            if name == "gpt-oss":  # its own start is what torch.empty leaves
                torch.manual_seed(1)
                for parameter in model.parameters():
                    parameter.normal_(std=0.05)
            answers.append(model(**inputs).logits)
    if has_device:
        assert (near if name.startswith("gemma4") else close)(answers[1], answers[0]) and fake.launches
    else:
        torch.testing.assert_close(answers[1], answers[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("make", [lambda: mistral(16), gpt_oss], ids=["mistral", "gpt-oss"])
def test_windows_hold_while_decoding(tmp_path, make):
    register()
    with current.use(fake_runtime(None, tmp_path)), torch.no_grad():
        kind, config, inputs = make()
        answers = []
        for implementation in ("eager", NAME):
            torch.manual_seed(0)
            model = kind._from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()
            torch.manual_seed(1)
            for parameter in model.parameters():
                parameter.normal_(std=0.05)
            words = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
            answers.append(torch.stack(model.generate(**inputs, **words, output_logits=True).logits))
    torch.testing.assert_close(answers[1], answers[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("queries, keys", [(48, 48), (1, 48), (40, 48)], ids=["prompt", "step", "empty static cache"])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["", "sinks"])
def test_windows_hold_under_dropout(tmp_path, queries, keys, sinks):
    """Of so little that nothing is dropped; no mask tensor was made."""
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups, module.config = True, 2, mistral(16)[1]
    query, key = torch.randn(2, 4, queries, 64), torch.randn(2, 2, keys, 64)
    with current.use(fake_runtime(None, tmp_path)):
        answers = [
            attention_forward(module, query, key, key, None, dropout, sliding_window=16, s_aux=sinks)[0]
            for dropout in (0.0, 1e-12)
        ]
        whole = attention_forward(module, query, key, key, None, s_aux=sinks)[0]
    torch.testing.assert_close(answers[1], answers[0])
    assert not torch.allclose(whole, answers[0])


def test_chunked_and_padded_windows_keep_their_mask():
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    words = dict(batch_size=1, q_length=48, kv_length=48, local_size=16, config=mistral(16)[1])
    assert mask(**words, mask_function=sliding_window_causal_mask_function(16)) is None
    assert mask(**words, mask_function=sliding_window_causal_mask_function(15)) is not None
    chunked = chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64))
    assert mask(**words, mask_function=chunked) is not None
    unknown = words | {"config": None}
    assert mask(**unknown, mask_function=sliding_window_causal_mask_function(16)) is not None
    padded = torch.ones(1, 48, dtype=torch.bool)
    padded[:, :5] = False
    assert mask(**words, mask_function=sliding_window_causal_mask_function(16), attention_mask=padded) is not None


def test_encoders_have_no_mask_tensor_in_compiled_code_either():
    from transformers.masking_utils import bidirectional_mask_function

    words = dict(batch_size=1, q_length=8, kv_length=12, mask_function=bidirectional_mask_function)
    words |= dict(allow_is_causal_skip=False)
    sizes = {}

    def made(scores, allowed):
        sizes[allowed] = mask(**words, allow_is_bidirectional_skip=allowed)
        return scores + (0 if sizes[allowed] is None else sizes[allowed].sum())

    for allowed in (True, False):
        torch.compile(made, backend="eager", fullgraph=True)(torch.zeros(1), allowed)
        assert (mask(**words, allow_is_bidirectional_skip=allowed) is None) == allowed


def test_position_biases_that_no_kernel_serves_are_sdpa_s(tmp_path):
    """The decoder's here, as where a portfolio has no class for a causal mask with a bias."""
    register()
    fake = FakeDevice()

    def pick(problem, gpu):
        return None if problem.bias and problem.causal else wgmma_pick(problem, gpu)

    with current.use(fake_runtime(fake, tmp_path, pick)), torch.no_grad():
        theirs = logits(t5, "sdpa")
        logits(t5, NAME)
        before = len(fake.launches)
        assert close(logits(t5, NAME), theirs)
        assert len(fake.launches) - before == 4
    with current.use(fake_runtime(fake, tmp_path, lambda problem, gpu: None)), torch.no_grad():
        assert torch.equal(logits(t5, NAME), theirs)
