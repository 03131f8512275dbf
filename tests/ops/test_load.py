"""`evoattn.load`: a recorded kernel is called as `evoattn.attention` is, and serves the problems it was found for."""

import pytest
import torch

import evoattn
from evoattn.families.registry import load_space
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import ConfigError, KernelConfig
from evoattn.ops.explain import RecordedKernel, load
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import WGMMA, FakeDevice, fake_runtime, near, reference, tensors

SHAPE = "B=1,H=4,S=128,D=64,mask=causal"


def record(storage, config=None, cost=1.0, shape=SHAPE):
    """A right trial of flash_wgmma in a study of its own."""
    space = load_space("flash_wgmma", GPUS["h100"])
    name = f"s{len(storage.studies())}"
    problem = parse_shape(shape)
    study = storage.create_study(name, problem, GPUS["h100"], True, "random", 0, ("flash_wgmma",), {}, {})
    evaluation = Evaluation(TrialState.ESTIMATED, "", CompileInfo(), relative_cost=cost)
    return storage.record(study, config or space.make_config(WGMMA), None, evaluation), study


def test_the_recorded_kernel_answers_and_nothing_else_does(storage, tmp_path):
    device = FakeDevice()
    kernel = RecordedKernel(*record(storage), lambda pick: fake_runtime(device, tmp_path, pick))
    q, k, v = tensors(seqlen_q=37, seqlen_k=37)
    answer = kernel(q, k, v, is_causal=True, enable_gqa=True)
    assert near(answer, reference(q, k, v, is_causal=True)) and device.launches
    assert near(kernel(q, k, v, causal=True, enable_gqa=True), answer)
    assert kernel.trial == 1 and kernel.family == "flash_wgmma" and "BLOCK_M=64" in repr(kernel)
    out = torch.empty_like(q)
    assert kernel(q, k, v, is_causal=True, enable_gqa=True, out=out) is out and near(out, answer)
    with pytest.raises(NoKernel, match="transform"):
        torch.func.vmap(lambda a, b, c: kernel(a, b, c, is_causal=True, enable_gqa=True))(q[None], k[None], v[None])
    for other in (
        dict(is_causal=False),
        dict(is_causal=True, dtype=torch.bfloat16),
        dict(is_causal=True, head_dim=128),
    ):
        causal = other.pop("is_causal")
        with pytest.raises(NoKernel):
            kernel(*tensors(seqlen_q=37, seqlen_k=37, **other), is_causal=causal, enable_gqa=True)


def test_a_recorded_variant_answers_as_the_op_does(storage, tmp_path):
    device = FakeDevice()
    shape = "B=1,H=4,S=128,D=64,mask=causal,window=9:0,sink=1"
    kernel = RecordedKernel(*record(storage, shape=shape), lambda pick: fake_runtime(device, tmp_path, pick))
    (q, k, v), sinks = tensors(seqlen_q=37, seqlen_k=37), torch.linspace(-1, 1, 4).half()
    words = dict(is_causal=True, enable_gqa=True, scale=0.2, window=(5, 0), sinks=sinks)
    answer = kernel(q, k, v, **words)
    assert device.launches and near(answer, evoattn.attention(q, k, v, **words))
    with torch.autocast("cpu", dtype=torch.float16):
        assert near(kernel(q.float(), k.float(), v.float(), **words), answer)
    for other in ({"sinks": None}, {"window": None}, {"softcap": 3.0}, {"is_causal": False, "window": (5, 2)}):
        with pytest.raises(NoKernel):
            kernel(q, k, v, **(words | other))
    with pytest.raises(ValueError, match="causal must be True, False"):
        kernel(q, k, v, **words, causal="sideways")
    with pytest.raises(ValueError, match="sinks must have one value"):
        kernel(q, k, v, **(words | {"sinks": sinks[:2]}))


@pytest.mark.slow
def test_a_windowed_kernel_serves_calls_that_the_window_hides_nothing_of(storage, tmp_path):
    """Of fewer keys than the window has, and of one query, such a call says neither window nor mask."""
    shape = "B=1,H=4,S=128,D=64,mask=causal_lower_right,window=40:0"
    kernel = RecordedKernel(*record(storage, shape=shape), lambda pick: fake_runtime(FakeDevice(), tmp_path, pick))
    words = dict(causal=True, enable_gqa=True, window=(40, 0))
    for lengths in (dict(seqlen_q=37, seqlen_k=37), dict(seqlen_q=1, seqlen_k=30), dict(seqlen_q=1, seqlen_k=99)):
        q, k, v = tensors(**lengths)
        assert near(kernel(q, k, v, **words), evoattn.attention(q, k, v, **words)), lengths
    with pytest.raises(NoKernel):
        kernel(*tensors(seqlen_q=50, seqlen_k=50), **(words | {"window": None}))


def test_a_kernel_is_loaded_by_number_study_or_shape(storage, tmp_path):
    record(storage, cost=2.0)
    record(storage, cost=3.0)
    record(storage, cost=1.0, shape="B=1,H=4,S=128,D=128")
    db = str(tmp_path / "db.sqlite")
    assert evoattn.load is load
    assert load(db=db).trial == load("best", db=db).trial == load(3, db=db).trial == 3
    assert load(2, db=db).trial == load(study="s1", db=db).trial == 2
    assert load(shape=SHAPE, db=db).trial == load(shape=SHAPE, gpu="h100", db=db).trial == 1
    assert load(shape=parse_shape(SHAPE), db=tmp_path / "db.sqlite").trial == 1
    wrong = (dict(study=1), dict(shape=1), dict(gpu=1, shape=SHAPE), dict(study="s1", shape=SHAPE))
    for words in (dict(trial=9), dict(study="x"), dict(shape="B=1"), *wrong):
        with pytest.raises(WrongUse):
            load(**words, db=db)


def test_a_config_that_the_search_space_lacks_is_refused(storage):
    trial, study = record(storage, KernelConfig("flash_wgmma", {"BLOCK_M": 1}))
    with pytest.raises(ConfigError):
        RecordedKernel(trial, study)
