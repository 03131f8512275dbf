"""Tokens over a growing cache of transformers: what the integration does for each is little, whatever the model's code
is as long."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import evoattn
from evoattn.ops.check import record_check
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import lasting_pick, next_picks
from tests.ops.fake_device import FakeDevice, build

transformers = pytest.importorskip("transformers")
from evoattn.integrations.transformers import NAME, register

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
