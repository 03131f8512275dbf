"""Models with `attn_implementation="evoattn"` are copied, pickled, saved, switched and wrapped as others are. Models
of transformers train through "evoattn" as through "sdpa": by kernels of both passes where these serve."""

import pytest

transformers = pytest.importorskip("transformers")
import copy
import io
import pickle

import torch

from evoattn.integrations.transformers import NAME, register
from evoattn.ops.runtime import current
from tests.integrations.test_transformers import TWO, gemma3, gpt_oss, llama, padding
from tests.ops.fake_backward import TrainingDevice, training_runtime

IDS = torch.arange(3, 51).reshape(1, 48)


@pytest.fixture
def model(model_device):
    sizes = dict(hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=128)
    made = transformers.LlamaForCausalLM._from_config(config, attn_implementation=NAME, dtype=torch.bfloat16)
    return made.eval()


def launched(model_device, model):
    """(launches of a forward pass, its logits)."""
    before = len(model_device.launches)
    logits = model(IDS).logits
    return len(model_device.launches) - before, logits


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def through_a_file_of_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, through_a_file_of_torch])
def test_copies_run_the_kernel_too(model_device, model, copied):
    launched(model_device, model)  # loads and checks it
    count, logits = launched(model_device, model)
    assert count == 2
    again, same = launched(model_device, copied(model))
    assert again == 2 and torch.equal(logits, same)


def test_a_saved_model_is_loaded_with_any_attention(model_device, model, tmp_path):
    """Its config names no attention: who loads it chooses."""
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    launched(model_device, model)
    _, logits = launched(model_device, model)
    words = {"dtype": torch.bfloat16, "local_files_only": True}
    for name, count in ((NAME, 2), ("sdpa", 0)):
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=name, **words).eval()
        before = len(model_device.launches)
        torch.testing.assert_close(loaded(IDS).logits, logits, atol=0.06, rtol=0.03)
        assert len(model_device.launches) == before + count


def test_a_model_is_switched_there_and_back(model_device, model):
    launched(model_device, model)
    for name, count in (("sdpa", 0), (NAME, 2), ("eager", 0), (NAME, 2)):
        model.set_attn_implementation(name)
        assert launched(model_device, model)[0] == count


def test_modes_and_wrappers(model_device, model):
    launched(model_device, model)
    _, logits = launched(model_device, model)
    with torch.inference_mode():
        count, inside = launched(model_device, model)
    assert count == 2 and torch.equal(inside, logits)
    if not torch.cuda.is_available():  # on a GPU it is a copy there, which the stand-in of a device does not serve
        count, parallel = launched(model_device, torch.nn.DataParallel(model))
        assert count == 2 and torch.equal(parallel, logits)


def test_two_models_of_a_process_keep_their_own_attention(model_device, model):
    launched(model_device, model)
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    assert launched(model_device, other)[0] == 0 and launched(model_device, model)[0] == 2


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
