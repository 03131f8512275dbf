"""`quantize_kv` and `attention_fp8` hand tensors of 16 bits to one kernel, and PyTorch's expressions serve the rest."""

import ctypes
import hashlib
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch

import evoattn
from evoattn.backends.cubins import Cubin
from evoattn.correctness import eight_bits
from evoattn.correctness.quantize import make_answer
from evoattn.model.problem import AttentionProblem
from evoattn.model.quantize import QUANTIZE_OPERATIONS, TOGETHER
from evoattn.ops import attention_fp8
from evoattn.ops.arguments import K_SCALE, SINKS, V_SCALE
from evoattn.ops.attention_fp8 import Quantised, dequantised, in_eight_bits
from evoattn.ops.beside import Wanted, quantize, quantize_by_torch, turn
from evoattn.ops.call import Call, terms_of
from evoattn.ops.choice import Choice
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import PROMISE
from tests.ops.fake_device import FakeDevice, tensor_at

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
SIZES = [ctypes.c_uint64] * 3 + [ctypes.c_int32] * 3 + [ctypes.c_int64] * 6
TURN = [ctypes.c_uint64] * 2 + [ctypes.c_int32] * 3 + [ctypes.c_int64] * 6
QUANTIZE = [ctypes.c_uint64] * 8 + [ctypes.c_int32] * 5 + [ctypes.c_int64] * 12


class QuantizingDevice(FakeDevice):
    """It reads the arguments of the two kernels, and computes what they point to with PyTorch."""

    def launch(self, config, function, arguments, _):
        if self.status:
            return self.status
        kernel, name = self._functions[(function.value or 0) - 1]
        types = {"quantize": QUANTIZE, "turn": TURN}.get(name, SIZES)
        pointers = (ctypes.c_void_p * len(types)).from_address(arguments.value or 0)
        values = [kind.from_address(at).value for at, kind in zip(pointers, types, strict=True)]
        self.launches.append(name)
        if name == "turn":
            x, numbers, heads, rows, _, *strides = values
            x = tensor_at(x, (kernel["batch"], heads, rows, kernel["dim"]), (*strides[:3], 1), DTYPES["e4m3"])
            made = eight_bits.turn(x)
            tensor_at(numbers, made.shape, (*strides[3:], 1), x.dtype).view(torch.uint8).copy_(made.view(torch.uint8))
        if name != "quantize":
            return 0
        tensors, (mean, sizes, heads, rows, _, of_scale, own), strides = values[:6], values[6:13], values[13:]
        if kernel["scales"] in ("block", "token"):
            assert not sizes and not own
        else:
            assert sizes and own == (self.launches[-2:] != ["quantize_sizes", "quantize"])
        smooth, pair = kernel["op"] == "quantize_smooth", kernel["op"] in TOGETHER
        shared = {"": 1, "head": heads // of_scale, "block": heads, "token": heads}[kernel["scales"]]
        assert pair == bool(tensors[3]) == any(strides[6:])
        for i in range(2 if pair else 1):
            x, numbers, scale = tensors[3 * i : 3 * i + 3]
            given, lie = strides[6 * i : 6 * i + 3], strides[6 * i + 3 : 6 * i + 6]
            turned = kernel["turned"] and (i > 0 or not pair)
            of = Wanted(DTYPES[kernel["kv"]], kernel["scales"] or "tensor", shared, smooth and not i, turned)
            shape = kernel["batch"], heads, rows, kernel["dim"]
            made = quantize_by_torch(tensor_at(x, shape, (*given, 1), torch.bfloat16), of)
            tensor_at(numbers, made.numbers.shape, (*lie, 1), of.dtype).copy_(made.numbers)
            for address, one in ((scale, made.scale), (mean, made.mean)):
                if address and one is not None:
                    tensor_at(address, one.shape, one.contiguous().stride(), torch.float32).copy_(one)
        return 0


def quantizer(problem, gpu):
    return current.best_known(problem, gpu) if problem.op in QUANTIZE_OPERATIONS else None


@pytest.fixture
def device(tmp_path):
    fake = QuantizingDevice()

    def build(family, problem, config, gpu, folder):
        words = dict(kv=problem.kv, scales=problem.scales, op=problem.op, dim=problem.head_dim, batch=2)
        words |= {"turned": problem.turned}
        code = json.dumps(words | {"config": config.id}).encode()
        return Cubin(code, hashlib.sha256(code).hexdigest(), "source", "recipe")

    with current.use(Runtime(fake, quantizer, tmp_path, build=build)):
        yield fake


def given(heads=2, rows=300, layout="bhsd", dtype=torch.bfloat16):
    x = (
        torch.randn(2, heads, rows, 64, generator=torch.Generator().manual_seed(rows))
        * torch.arange(1.0, heads + 1)[:, None, None]
    )
    return (x if layout == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)).to(dtype)


@pytest.mark.parametrize(
    ("kv", "granularity"), [("e4m3", "head"), ("e5m2", "tensor"), ("int8", "token"), ("e4m3", "block")]
)
def test_a_kernel_makes_what_the_expressions_make(device, kv, granularity):
    dtype = DTYPES[kv]
    k, v = given(), given(rows=300, layout="bshd")
    k8, v8, k_scale, v_scale = evoattn.quantize_kv(k, v, dtype, granularity)
    assert device.launches.count("quantize") >= 2 and device.loads == 1  # one kernel, checked first, for both
    before = len(device.launches)
    evoattn.quantize_kv(k, k, dtype, granularity)
    assert device.launches[before:].count("quantize") == 1 and device.loads == 1
    for x, numbers, scale in ((k, k8, k_scale), (v, v8, v_scale)):
        right = quantize_by_torch(x, Wanted(dtype, granularity, 2))
        assert torch.equal(numbers.float(), right.numbers.float()) and torch.equal(scale.view(-1), right.scale.view(-1))
        assert numbers.stride() == x.stride()


def test_a_kernel_turns_numbers_that_are_there(device):
    for layout in ("bhsd", "bshd"):
        value = given(2, 70, layout).to(torch.float8_e4m3fn)
        made = turn(value)
        assert torch.equal(made.float(), eight_bits.turn(value).float()) and made.shape == (2, 2, 64, 80)
    assert device.launches.count("turn") >= 2 and turn(value.cpu()[..., ::2]) is None and turn(value.half()) is None


@pytest.mark.parametrize("scale", [None, torch.ones(2, 2, 1)])
def test_a_value_is_turned_where_that_pays(device, monkeypatch, scale):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (given(8, 70), given(2, 70), given(2, 70)))
    evoattn.attention_fp8(q, k, v, v_descale=scale)
    assert "turn" not in device.launches
    monkeypatch.setattr(attention_fp8, "TURNED_FROM", 1)
    evoattn.attention_fp8(q, k, v, v_descale=scale)
    assert "turn" in device.launches


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1000])
def test_tensors_are_quantised_by_blocks_where_that_pays(device, monkeypatch, limit):
    monkeypatch.setattr(attention_fp8, "BLOCKS_BELOW", limit)
    evoattn.attention_fp8(given(8, 300), given(2, 300), given(2, 300))
    assert device.launches[0] == ("quantize" if limit else "quantize_sizes") and "quantize" in device.launches


@pytest.mark.slow
def test_attention_hands_its_tensors_over_and_keeps_plans(device):
    q, k, v = given(8, 70), given(2, 70), given(2, 70)
    k += 3
    _, out = (evoattn.attention_fp8(q, k, v, smooth_k=True) for _ in range(2))  # no kernel took a turned value
    before, loads = len(device.launches), device.loads
    again = evoattn.attention_fp8(q, k, v, smooth_k=True)
    assert torch.equal(out, again) and device.launches[before:].count("quantize") == 2 and device.loads == loads
    exact = evoattn.attention(q.double(), k.double(), v.double(), enable_gqa=True)
    assert (out - exact).square().mean() < 0.03 * exact.square().mean()


def test_what_no_kernel_serves_is_computed_all_the_same(device):
    wanted, x = Wanted(torch.float8_e4m3fn, "head", 2), given()
    for other in (x.float(), x[..., ::2], x[:, :, :0], x.flatten()[1 : 1 + 2 * 2 * 5 * 64].view(2, 2, 5, 64)):
        assert quantize(other, wanted).numbers.shape == other.shape if other.numel() else True
    device.status = 7
    with pytest.warns(RuntimeWarning, match="PyTorch's expression runs"):
        made = quantize(x, wanted)
    assert torch.equal(made.scale, quantize_by_torch(x, wanted).scale)


@pytest.mark.parametrize("op", ["quantize", "quantize_smooth"])
def test_the_expressions_are_the_reference(op):
    x = given(2, 33) + 5
    for kv, dtype in DTYPES.items():
        problem = AttentionProblem(2, 2, 2, 33, 33, 64, "bf16", kv=kv, scales="head", op=op)
        made = quantize_by_torch(x, Wanted(dtype, "head", 2, op == "quantize_smooth"))
        for name, exact in make_answer(problem, {"x": x, "v": x}).items():
            if name.startswith("v_"):
                continue
            found = getattr(made, name).double()
            assert (found - exact.values).abs().max() <= exact.allowed_error, (kv, name)


def test_what_is_no_number_has_no_part_in_a_scale_where_it_would_be_less_a_mean():
    x = torch.full((1, 1, 33, 64), 8.0, dtype=torch.bfloat16)
    x[0, 0, 4, 3] = torch.inf
    problem = AttentionProblem(1, 1, 1, 33, 33, 64, "bf16", kv="e4m3", scales="head", op="quantize_smooth")
    made = quantize_by_torch(x, Wanted(torch.float8_e4m3fn, "head", 1, True))
    least = (x.float() - made.mean).where(x.isfinite(), 0).abs().max().item() / 448
    assert made.scale.item() == pytest.approx(least)
    assert make_answer(problem, {"x": x, "v": x})["scale"].values.item() == pytest.approx(least)


@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
def test_a_number_is_half_a_step_off_and_what_is_none_counts_for_no_scale(granularity):
    x = given(2, 40).float()
    x[:, 0] *= 1e-30
    x[:, :, 3] = 0
    x[0, 1, 5, 7], x[1, 1, 6, 2] = torch.nan, -torch.inf
    bad = ~x.isfinite()
    for dtype in DTYPES.values():
        made = quantize_by_torch(x, Wanted(dtype, granularity, 2))
        scale = made.scale.view({"tensor": (1, 1, 1, 1), "head": (2, 2, 1, 1), "token": (2, 2, 40, 1)}[granularity])
        numbers = made.numbers.float()
        assert torch.equal(numbers.isnan(), bad if dtype.is_floating_point else torch.zeros_like(bad))
        assert made.scale.isfinite().all() and (made.scale > 0).all()
        steps = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 0}[dtype]
        least = {torch.float8_e4m3fn: 2**-10, torch.float8_e5m2: 2**-17, torch.int8: 0.5}[dtype]
        allowed = ((x / scale).abs() * steps).clamp(min=least) * (1 + 1e-5)
        assert ((numbers - x / scale).abs() <= allowed)[~bad].all()


class EightBitRuntime(Runtime):
    """Its kernel of 8 bits is the reference's attention; the fake device quantises."""

    def attend(self, call):
        if call.query.dtype != torch.float8_e4m3fn:
            return super().attend(call)
        if call.value.shape[3] == 32:
            raise evoattn.NoKernel("none")
        self.asked, PROMISE.fp8 = call, None  # the reference's attention is of 16 bits
        try:
            return self.made(call)
        finally:
            PROMISE.fp8 = in_eight_bits

    def made(self, call):
        scales = call.terms[-1], call.term(K_SCALE), call.term(V_SCALE)
        given = Quantised(call.query, call.key, call.value, *scales)
        return dequantised(replace(call, strict=False), given, call.term(SINKS))


@pytest.mark.slow
def test_enable_has_calls_run_in_eight_bits_where_a_kernel_serves_them(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_fp8, "LEAST_GAIN", 1000)
    pick = lambda p, gpu: current.best_known(p, gpu) if p.dtype == "e4m3" else None
    runtime = EightBitRuntime(FakeDevice(), pick, tmp_path)
    q, k, v = given(8, 70), given(2, 70), given(2, 70)
    attend = lambda *t, **words: torch.nn.functional.scaled_dot_product_attention(*t, enable_gqa=True, **words)
    exact = attend(q, k, v, is_causal=True)
    with current.use(runtime):
        evoattn.enable(precision="fp8")
        try:
            out = attend(q, k, v, is_causal=True)
            half = attend(q.half(), k.half(), v.half())
            said = evoattn.explain(q, k, v, enable_gqa=True)
            few = evoattn.explain(q[:, :, :1], k, v, enable_gqa=True)
            monkeypatch.setattr(attention_fp8, "LEAST_DIM", 96)
            small = evoattn.explain(q, k, v, enable_gqa=True)
            monkeypatch.setattr(attention_fp8, "LEAST_DIM", 64)
            runtime.asked = None
            learns = attend(q.requires_grad_(), k, v)
            narrow = attend(q.detach(), k, v[..., :32])
        finally:
            evoattn.disable()
        plain = evoattn.explain(q.detach(), k, v, enable_gqa=True)
    assert out.dtype == torch.bfloat16 and half.dtype == torch.float16 and learns.requires_grad
    assert 0 < (out - exact).square().mean() < 0.05 * exact.square().mean()
    assert said.startswith("fp8_wgmma") and "in 8 bits, as evoattn.enable" in said
    assert few.startswith("SDPA runs") and "not in 8 bits" in few and "multiply-adds a number" in few
    assert "whether 8 bits gain at head_dim 64" in small
    assert runtime.asked is None and narrow.shape[-1] == 32 and "8 bits" not in plain
    with pytest.raises(ValueError, match="precision must be 'fp8'"):
        evoattn.enable(precision="int4")
    with pytest.raises(ValueError, match="exclude each other"):
        evoattn.enable(precision="fp8", batch_invariant=True)


def test_keys_keep_their_mean_where_a_soft_cap_or_sinks_would_feel_it(tmp_path, monkeypatch):
    taken, runtime = [], Runtime(FakeDevice(), lambda *_: None, tmp_path)
    serves = mock.Mock(spec=Choice)
    monkeypatch.setattr(attention_fp8, "choice_in_eight_bits", lambda *_: serves)
    monkeypatch.setattr(attention_fp8, "attention_fp8", lambda *t, **words: taken.append(words["smooth_k"]) or t[0])
    q, k, v = given(8, 70), given(2, 70), given(2, 70)
    for words in ({}, {"softcap": 5.0}, {"terms": terms_of(sinks=torch.zeros(8))}):
        in_eight_bits(runtime, Call(q, k, v, enable_gqa=True, **words))
    assert taken == [True, False, False]


def test_a_turned_value_has_no_scale_of_each_token():
    with pytest.raises(ValueError, match="turned goes with granularity 'tensor' or 'head'"):
        evoattn.quantize_kv(*torch.zeros(2, 1, 2, 16, 32), granularity="token", turned=True)


@pytest.mark.parametrize("wrong", [[1.0], torch.zeros(1, 1, 4, 16, dtype=torch.int32)])
def test_what_is_no_tensor_of_floating_point_numbers_is_refused(wrong):
    with pytest.raises(TypeError, match="key must be a tensor of floating-point numbers"):
        evoattn.quantize_kv(wrong, torch.zeros(1, 1, 4, 16))
