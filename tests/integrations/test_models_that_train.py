"""Models of transformers train through "evoattn" as through "sdpa": by kernels of both passes where these serve."""

import pytest
import torch

from evoattn.ops.runtime import current
from tests.ops.fake_backward import TrainingDevice, training_runtime

transformers = pytest.importorskip("transformers")
from evoattn.integrations.transformers import NAME, register
from tests.integrations.test_transformers import TWO, gemma3, gpt_oss, llama, padding

STEPS = 4


@pytest.fixture
def device(tmp_path):
    register()
    fake = TrainingDevice()
    with current.use(training_runtime(fake, tmp_path)):
        yield fake


def losses(make, name, checkpointed=False, **words):
    """Of a few steps; padding has no part in them."""
    torch.manual_seed(3)
    kind, config, inputs = make
    config._attn_implementation = name
    model = kind(config).to(torch.bfloat16).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    inputs = inputs | words
    labels = inputs["input_ids"].masked_fill(inputs.get("attention_mask", torch.ones(1)) == 0, -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def require_near(ours, theirs):
    assert ours[-1] < ours[0] - 0.1
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "checkpointed"])
def test_without_padding(device, name):
    make = gemma3(16) if name == "gemma3" else llama()
    ours = losses(make, NAME, name == "checkpointed")
    assert len(device.backwards) == 2 * STEPS
    require_near(ours, losses(make, "sdpa"))


@pytest.mark.slow
def test_sinks_train(device):
    ours = losses(gpt_oss(), NAME)
    assert len(device.backwards) == 2 * STEPS and all(k["grads"] == "sinks" for k in device.backwards)
    require_near(ours, losses(gpt_oss(), "eager"))


@pytest.mark.slow
def test_a_padded_batch(device):
    """A row is two packed sequences: its text and its padding."""
    make, mask = llama(), padding(*range(40, 48))
    words = dict(input_ids=TWO.reshape(2, 48), attention_mask=mask)
    ours = losses(make, NAME, **words)
    assert len(device.backwards) == 2 * STEPS and all("varlen" in k["variants"] for k in device.backwards)
    require_near(ours, losses(make, "sdpa", **words))
