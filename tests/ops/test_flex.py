"""`evoattn.flex_attention`: torch's answers and errors, by kernels on a device of host memory, else by torch."""

import copy
import functools
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import evoattn
from evoattn.model.mask import Band
from evoattn.model.space import KernelConfig
from evoattn.ops import arguments, block_masks, flex
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import by_formula
from tests.ops.fake_device import FakeDevice, Pick, build, near, tensors, wgmma_pick
from tests.ops.test_flex_mods import by_torch

ROWS, KEYS = 100, 130
LSE = AuxRequest(lse=True)


def mask_of(mask_mod, rows=ROWS, keys=KEYS, block=64, heads=None):
    return create_block_mask(mask_mod, None, heads, rows, keys, device="cpu", BLOCK_SIZE=block)


def expected_of(q, k, v, score_mod=None, mask=None):
    return by_torch(flex.Call(q, k, v), score_mod, mask)


def document(length):
    ids = torch.arange(max(ROWS, KEYS)) // length
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


CALLS = {
    "nothing": (None, None),
    "a score": (lambda s, b, h, q, k: s * (h + 1) - 0.1 * (q - k).abs(), None),
    "a band": (None, lambda b, h, q, k: (q >= k) & (q - k < 40)),
    "a soft cap": (lambda s, b, h, q, k: 3 * torch.tanh(s / 3), lambda b, h, q, k: q >= k),
    "documents": (None, document(37)),
    "both": (lambda s, b, h, q, k: s + h / (1 + q + k), lambda b, h, q, k: ((q + k) % 3 > 0) & (q < 90)),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, 3])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_answer(device, name, rows):
    score_mod, mask_mod = CALLS[name]
    q, k, v = tensors(2, 4, 2, rows, KEYS)
    mask = mask_mod and mask_of(mask_mod, rows)
    out, aux = evoattn.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_aux=LSE)
    launched = len(device.launches)
    assert launched
    expected = expected_of(q, k, v, score_mod, mask)
    assert near(out, expected[0]) and near(aux.lse, expected[1]) and aux.max_scores is None
    assert torch.equal(evoattn.flex_attention(q, k, v, score_mod, mask, enable_gqa=True), out)
    again = evoattn.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
    assert torch.equal(again[1], aux.lse) and len(device.launches) > launched + 1
    assert "flash_wgmma" in evoattn.explain(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)


def test_what_a_name_says_runs_as_the_name(device):
    made = [mask_of(CALLS[name][1]) for name in ("a band", "documents")]
    q, k, v = tensors(2, 4, 4, ROWS, KEYS)
    calls = [flex.calls(flex.Call(q, k, v), None, mask)[0]() for mask in made]
    assert calls[0].causal and calls[0].window == (39, 0) and not calls[0].blocks and calls[0].score is None
    assert calls[1].blocks == "64x64:2/0/2" and calls[1].score.predicate
    capped = flex.calls(flex.Call(q, k, v), CALLS["a soft cap"][0], None)[0]()
    assert capped.softcap == 3 and capped.score is None
    lower = mask_of(lambda b, h, q, k: k - q <= KEYS - ROWS)
    assert flex.calls(flex.Call(q, k, v), None, lower)[0]().mask == "causal_lower_right"
    wide = mask_of(lambda b, h, q, k: (k < q + 36) & (q - 9 < k))
    wide = flex.calls(flex.Call(q, k, v), None, wide)[0]()
    assert wide.mask == "full" and wide.window == (38, 5)


SLOPES, NEAR = torch.tensor([0.5, 0.25, 2.0, 1.0]), KEYS - ROWS
BIASES = torch.randn(4, ROWS, 136, generator=torch.Generator().manual_seed(1)).half()
ADDED = {
    "distances": (lambda s, b, h, q, k: s - SLOPES[h] * (q + NEAR - k).abs(), "slopes"),
    "distances the other way round": (lambda s, b, h, q, k: (k - q - NEAR).abs() * -SLOPES[h] + s, "slopes"),
    "from another corner": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), ""),
    "away from it": (lambda s, b, h, q, k: s + SLOPES[h] * (q + NEAR - k).abs(), ""),
    "twice as far": (lambda s, b, h, q, k: s - SLOPES[h] * (2 * q - k).abs(), ""),
    "of keys behind the diagonal, too": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q - NEAR), ""),
    "slopes of queries": (lambda s, b, h, q, k: s - SLOPES[q % 4] * (q + NEAR - k).abs(), ""),
    "a cap before": (lambda s, b, h, q, k: torch.tanh(s) - SLOPES[h] * (q + NEAR - k).abs(), ""),
    "a bias": (lambda s, b, h, q, k: BIASES[h, q, k] + s, "bias"),
    "less a bias": (lambda s, b, h, q, k: s - BIASES[h, q, k], ""),
    "of another head": (lambda s, b, h, q, k: s + BIASES[3 - h, q, k], ""),
    "of queries and keys in turn": (lambda s, b, h, q, k: s + BIASES[h, k % 50, q], ""),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_runs_as_its_name_where_it_means_the_same(device, name):
    score_mod, named = ADDED[name]
    keys = 136 if "BIASES" in score_mod.__code__.co_names else KEYS
    q, k, v = tensors(2, 4, 4, ROWS, keys)
    call = flex.calls(flex.Call(q, k, v), score_mod, None)[0]()
    found = {"slopes": call.term(arguments.SLOPES), "bias": call.term(arguments.BIAS)}
    assert [name for name, term in found.items() if term is not None] == [named] * bool(named)
    assert (call.score is None) == bool(named)
    out, lse = by_formula(replace(call, return_lse=True))
    expected = by_torch(flex.Call(q, k, v), score_mod, None)
    assert near(out, expected[0]) and near(lse, expected[1])


def of_heads(table, s, b, h, i, j):
    return s + table[h, i, j]


def of_all(table, s, b, h, i, j):
    return s + table[i, j]


def test_a_table_is_read_as_a_bias_only_as_it_lies(device):
    """Another dtype, more keys than a call has, a gradient, and rows that kernels would copy at each call."""
    for keys, table, named in (
        (136, BIASES, True),
        (136, BIASES.float(), False),
        (128, BIASES, False),
        (130, BIASES[..., :130].contiguous(), False),
        (136, BIASES[0], True),
        (136, BIASES.clone().float().requires_grad_().half(), False),
    ):
        q, k, v = tensors(2, 4, 4, ROWS, keys)
        added = functools.partial(of_heads if table.dim() == 3 else of_all, table)
        call = flex.calls(flex.Call(q, k, v), added, None)[0]()
        assert (call.term(arguments.BIAS) is not None) == named
    q, k, v = (tensor.float() for tensor in tensors(2, 4, 4, ROWS, 136))
    for on in (False, True):  # which would round a bias, and no table
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            call = flex.calls(flex.Call(q, k, v), functools.partial(of_all, BIASES[0].float()), None)[0]()
        assert (call.term(arguments.BIAS) is None) == on


@pytest.mark.slow
def test_slopes_without_a_size_need_a_causal_mask(device):
    q, k, v = tensors(2, 4, 4, ROWS, KEYS)
    mask = mask_of(lambda b, h, i, j: j - i <= NEAR)
    for score_mod, named in (
        (lambda s, b, h, i, j: s - SLOPES[h] * (i + NEAR - j), True),
        (lambda s, b, h, i, j: s - SLOPES[h] * (i - j), False),
    ):
        call = flex.calls(flex.Call(q, k, v), score_mod, mask)[0]()
        assert call.mask == "causal_lower_right" and (call.term(arguments.SLOPES) is not None) == named
        out = evoattn.flex_attention(q, k, v, score_mod, mask)
        assert near(out, expected_of(q, k, v, score_mod, mask)[0])


IDS = torch.arange(max(ROWS, KEYS)) // 37


@pytest.mark.slow
@pytest.mark.parametrize("by_table", [False, True])
def test_a_score_that_hides_keys_runs_as_a_mask(device, monkeypatch, by_table):
    """Lists are made in each call, and counted once: captured tensors may change."""
    ids, made = IDS.clone(), []

    def score_mod(s, b, h, i, j):
        shown = (ids[i] == ids[j]) & (i >= j) if by_table else i >= j
        return torch.where(shown, 2 * s, -torch.inf)

    def created(mask_mod, shape, where, predicate, given, bounds):
        made.append(shape)
        mask = create_block_mask(mask_mod, 1, 1, shape.seqlen_q, shape.seqlen_k, "cpu")
        block_masks.kept(mask).again = made.append  # finer lists would be counted in each call
        return mask

    monkeypatch.setattr(block_masks, "LEAST_SCORES", 0)
    monkeypatch.setattr(block_masks, "MOST_SHARE", 1.0)
    monkeypatch.setattr(block_masks, "created", created)
    q, k, v = tensors(1, 2, 2, ROWS, KEYS)
    for step in range(2):
        with evoattn.capture() as shapes:
            out = evoattn.flex_attention(q, k, v, score_mod)
        (asked,) = (entry.problem for entry in shapes.entries)
        assert (asked.mask, bool(asked.blocks)) == ("full", True) if by_table else ("causal_upper_left", False)
        assert near(out, expected_of(q, k, v, score_mod)[0]) and len(made) == (step + 1) * by_table
        ids.copy_(IDS.flip(0))
        monkeypatch.setattr(block_masks, "_counts", None)
    monkeypatch.setattr(block_masks, "MOST_SHARE", 0.1)
    block_masks._worth.clear()
    monkeypatch.setattr(block_masks, "_counts", lambda *_: "1/0/1")
    with evoattn.capture() as shapes:
        evoattn.flex_attention(q, k, v, score_mod)
    assert not shapes.entries[0].problem.blocks


def test_a_mask_of_ours_that_is_a_band_is_not_looked_at(device):
    """The first launches of torch's kernels take a process longer than all else of a call."""
    mask = mask_of(CALLS["a band"][1])
    bounds = flex.said_by((None, mask.mask_mod), torch.device("cpu"))[0].bounds
    band = Band(ROWS, KEYS, *bounds)
    assert not block_masks.is_known(mask, band)
    mask.kv_indices.fill_(99)
    block_masks.kept(mask).agrees[band] = True
    q, k, v = tensors(2, 4, 4, ROWS, KEYS)
    assert not block_masks.is_known(mask, None) and not block_masks.is_known(mask, Band(ROWS, KEYS, -3, 0))
    other = Band(ROWS, KEYS, -9, 0)
    block_masks.kept(mask).agrees[other] = False
    assert not block_masks.is_known(mask, other)
    block_masks.kept(mask).counts = "1/1/2"
    assert block_masks.is_known(mask, other) and block_masks.is_known(mask, None)
    assert block_masks.is_known(mask, band) and flex.calls(flex.Call(q, k, v), None, mask)[0]().window == (39, 0)


def lists(*rows):
    """Counts and numbers of blocks, of all batches and heads."""
    counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
    width = max(map(len, rows))
    return counts, torch.tensor([[[[*row, *[0] * (width - len(row))] for row in rows]]], dtype=torch.int32)


def chosen(mask_mod=None, full=True):
    """The second row of blocks is empty; the first has a PARTIAL block 2, and a FULL one 0 if `full`."""
    words = {"compute_q_blocks": False} | ({} if mask_mod is None else {"mask_mod": mask_mod})
    return BlockMask.from_kv_blocks(
        *lists([2], []), *(lists([0], []) if full else (None, None)), BLOCK_SIZE=64, seq_lengths=(ROWS, KEYS), **words
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("mask", [chosen(), chosen(lambda b, h, q, k: q >= k), chosen(full=False)])
def test_lists_say_what_is_seen_whatever_the_function_says(device, mask, kernels):
    q, k, v = tensors(2, 2, 2, ROWS, KEYS)
    seen = torch.zeros(ROWS, KEYS, dtype=torch.bool)
    seen[:64, 128:] = mask.mask_mod is torch_flex.noop_mask
    seen[:64, :64] = mask.full_kv_num_blocks is not None
    score_mod = None if kernels else lambda s, b, h, q, k: torch.logaddexp(s, s - 99)
    out, aux = evoattn.flex_attention(q, k, v, score_mod, mask, return_aux=LSE)
    assert bool(device.launches) == kernels
    scores = (q.double() @ k.double().mT / 8).masked_fill(~seen, -torch.inf)
    assert near(out, torch.softmax(scores, -1).nan_to_num(0) @ v.double())
    assert near(aux.lse, scores.logsumexp(-1)) and aux.lse[:, :, 64:].isneginf().all()


@pytest.mark.slow
def test_a_table_serves_blocks_that_tiles_do_not_divide(device):
    mask = mask_of(document(37), block=40)
    q, k, v = tensors(2, 2, 2, ROWS, KEYS)
    out = evoattn.flex_attention(q, k, v, None, mask)
    assert device.launches and near(out, expected_of(q, k, v, None, mask)[0])


TABLE, DOUBLES = torch.arange(9.0), torch.ones(4, dtype=torch.float64)
REFUSED = {
    "expressions have no aten::logaddexp": lambda s, b, h, q, k: torch.logaddexp(s, s),
    "aten::_local_scalar_dense": lambda s, b, h, q, k: s if q.item() == 0 else s + 1,
    "taken whole": lambda s, b, h, q, k: s + (TABLE + q).mean() * 0,
    "rounding_mode='trunc'": lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="trunc"),
    "captures a tensor of shape [1, 1, 1, 1, 9]": lambda s, b, h, q, k: (
        s + TABLE[None, None, None, None][h, h, h, h, q]
    ),
    "captures a tensor of float64": lambda s, b, h, q, k: s * DOUBLES[h],
    "NotImplementedError: no": lambda s, b, h, q, k: _raise(),
}


def _raise():
    raise NotImplementedError("no\nand more")


@pytest.mark.slow
@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_expression_is_refused_by_name(device, why):
    q, k, v = tensors(1, 4, 4, 20, 30)
    words = evoattn.explain(q, k, v, score_mod=REFUSED[why])
    assert why in words and words.startswith("FlexAttention of torch runs: ") and words.count(". ") == 0
    if why in ("expressions have no aten::logaddexp", "captures a tensor of float64"):
        out = evoattn.flex_attention(q, k, v, REFUSED[why])
        assert not device.launches and near(out, expected_of(q, k, v, REFUSED[why])[0])


def test_gradients_and_largest_scores_are_torch_s(device):
    q, k, v = tensors(1, 2, 2, 20, 30, dtype=torch.float32)
    bias = torch.randn(20, 30, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):  # torch's own words
        evoattn.flex_attention(q.clone().requires_grad_(), k, v)

    def biased(s, b, h, i, j):
        return s + bias[i, j]

    assert "gradients" in evoattn.explain(q.half(), k.half(), v.half(), score_mod=biased)
    assert not device.launches
    with torch.no_grad():
        assert near(evoattn.flex_attention(q.half(), k.half(), v.half(), biased), expected_of(q, k, v, biased)[0])
    assert device.launches
    device.launches.clear()
    q, k, v = tensors(1, 2, 2, 20, 30)
    with pytest.raises(NotImplementedError, match="max scores is not supported on CPU"):
        evoattn.flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert not device.launches
    assert evoattn.flex_attention(q, k, v, return_aux=AuxRequest())[1] == (None, None) and device.launches


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, mask: (q, k[:, :1], v[:, :1], None, mask),
        lambda q, k, v, mask: (q[:, :, :50], k, v, None, mask),
        lambda q, k, v, mask: (q, k[:, :, :50], v[:, :, :50], None, mask),
        lambda q, k, v, mask: (q[:1], k, v, None, None),
        lambda q, k, v, mask: (q, k[..., :8], v, None, None),
        lambda q, k, v, mask: (q[0], k[0], v[0], None, None),
        lambda q, k, v, mask: (q, k, v, None, mask[0]),
    ],
)
def test_errors_are_torch_s(device, change):
    arguments = change(*tensors(2, 2, 2, ROWS, KEYS), mask_of(document(30)))
    with pytest.raises(Exception) as theirs:
        flex.TORCH(*arguments)
    with pytest.raises(type(theirs.value)) as ours:
        evoattn.flex_attention(*arguments)
    assert str(ours.value) == str(theirs.value) and not device.launches


def test_both_ways_to_ask_for_the_log_sum_exp_exclude_each_other(device):
    with pytest.raises(ValueError, match="return_lse and return_aux"):
        evoattn.flex_attention(*tensors(1, 2, 2, 20, 30), return_lse=True, return_aux=LSE)


def test_captured_tensors_are_read_at_each_call(device):
    q, k, v = tensors(1, 2, 2, ROWS, KEYS)
    gate = torch.tensor(1.0)

    def gated(s, b, h, i, j):
        return s * gate

    first = evoattn.flex_attention(q, k, v, gated)
    gate.fill_(3.0)
    second = evoattn.flex_attention(q, k, v, gated)
    assert near(second, expected_of(q, k, v, gated)[0]) and not near(second, first)
    assert device.loads == 1


@pytest.mark.slow
def test_functions_made_anew_are_traced_once_and_share_a_kernel(device):
    q, k, v = tensors(1, 2, 2, ROWS, KEYS)
    known = []
    for length in (30, 31, 32):
        mask = mask_of(document(length))
        assert near(evoattn.flex_attention(q, k, v, None, mask), expected_of(q, k, v, None, mask)[0])
        known.append((len(flex._known), device.loads))
    assert known[0] == known[1] == known[2]


def test_another_length_has_no_kernel_of_its_own(device):
    """Which a number of the function's is, or one less; but for one that it divides by."""
    texts = set()
    for length in (140, 200, 150):
        table = torch.linspace(-1, 1, 2 * length)
        q, k, v = tensors(1, 2, 2, length, length)

        def biased(s, b, h, i, j, table=table, length=length):
            return s + table[j - i + length] + i // 128 + (j // 7 == length - 1)

        assert near(evoattn.flex_attention(q, k, v, biased), expected_of(q, k, v, biased)[0])
        call = flex.calls(flex.Call(q, k, v), biased, None)[0]()
        texts.add(call.score.text)
        assert [one.tolist() for one in call.terms[-2:]] == [[length - 1], [length]]
    assert len(texts) == 1 and device.loads == 1 and "//128" in texts.pop()
    q, k, v = tensors(1, 2, 2, 100, 100)
    call = flex.calls(flex.Call(q, k, v), lambda s, b, h, i, j: s + i * 1e-100, None)[0]()
    assert "1e-100" in call.score.text, "an exponent is no length"


OF_AN_EXPRESSION = lambda s, b, h, i, j: s + (i - j) * 0.1
OF_A_NAME = lambda s, b, h, i, j: 4 * torch.tanh(s / 4)


@pytest.mark.slow
@pytest.mark.parametrize("score_mod", [OF_AN_EXPRESSION, OF_A_NAME])
@pytest.mark.parametrize("is_new", [False, True])
def test_no_call_waits_for_another_kernel_of_its_expression(tmp_path, score_mod, is_new):
    """Another length has another kernel: the first one serves it until that is compiled and can be checked, beside the
    calls. Before the first one there is another that is compiled sooner, but in a capture."""
    device, may, built = FakeDevice(), threading.Event(), []
    least, most = (64, 80) if is_new else (128, 192)
    runtime = Runtime(device, lambda problem, gpu: pick(problem, gpu), tmp_path, build=lambda *of: slow(*of))

    def pick(problem, gpu):
        genes = {"BLOCK_N": 80} if is_new else {"STAGES": 2 + (problem.seqlen_q > 64)}
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", {**wgmma_pick(problem, gpu).config.params, **genes}))

    def slow(family, problem, config, gpu, folder):
        built.append(config["BLOCK_N"] * config["STAGES"])
        assert built[-1] == least or may.wait(20)
        return build(family, problem, config, gpu, folder)

    def called(rows):
        q, k, v = tensors(1, 2, 2, rows, KEYS)
        device.launches.clear()
        out = evoattn.flex_attention(q, k, v, score_mod)
        assert near(out, expected_of(q, k, v, score_mod)[0]) and device.launches
        return device.launches[-1].smem_bytes

    with current.use(runtime):
        first = called(30)
        assert called(100) == called(90) == first
        may.set()
        runtime.settle()
        device.is_capturing = True
        assert called(100) == first, "a capture loads none, and takes the one that is loaded"
        device.is_capturing = False
        runtime.settle()
        assert called(100) > first and (called(30) > first) == is_new
    assert set(built) == {least, most}


def test_who_wants_the_same_bits_waits_for_the_kernel_itself(tmp_path):
    device, built = FakeDevice(), []

    def pick(problem, gpu):
        return Pick(
            "flash_wgmma", KernelConfig("flash_wgmma", {**wgmma_pick(problem, gpu).config.params, "BLOCK_N": 80})
        )

    def noted(family, problem, config, gpu, folder):
        built.append(config["BLOCK_N"])
        return build(family, problem, config, gpu, folder)

    torch.use_deterministic_algorithms(True)
    try:
        with current.use(Runtime(device, pick, tmp_path, build=noted)):
            evoattn.flex_attention(*tensors(1, 2, 2, 30, KEYS), OF_AN_EXPRESSION)
    finally:
        torch.use_deterministic_algorithms(False)
    assert built == [80]


OFFSET = 0


@pytest.mark.slow
@pytest.mark.parametrize("are_bits_kept", [False, True])
def test_numbers_that_change_need_no_kernel_of_their_own(device, are_bits_kept):
    """One kernel takes them as arguments, from the first on. Those with the first as constants are compiled beside, and
    run when they come again, but in a capture that loads none and where all runs are to have the same bits."""
    q, k, v = tensors(1, 2, 2, 20, 30)

    def called(number):
        global OFFSET
        OFFSET, by = number, 0.5 + number / 7
        score_mod = lambda s, b, h, i, j, step=number + 2: s * by + (i + OFFSET) % 7 + j // step
        assert near(evoattn.flex_attention(q, k, v, score_mod), expected_of(q, k, v, score_mod)[0])
        evoattn.settle()

    torch.use_deterministic_algorithms(are_bits_kept)
    try:
        for number in range(6):
            called(number)
        assert device.loads == 1
        device.is_capturing = True
        called(0)
        device.is_capturing = False
        for number in (*range(6), 0, 1):
            called(number)
        assert device.loads == (1 if are_bits_kept else flex.MOST_VALUES + 1)
        device.is_capturing = True
        launched = len(device.launches)
        called(0)
        assert len(device.launches) == launched + 1
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_numbers_that_decide_in_python_are_constants(device):
    q, k, v = tensors(1, 2, 2, 20, 30)

    def by(number):
        return lambda s, b, h, i, j: s * number if number else s - i % 3

    for number in (0, 2):
        assert near(evoattn.flex_attention(q, k, v, by(number)), expected_of(q, k, v, by(number))[0])
    assert device.loads == 2


def test_caps_that_change_stay_caps_and_gradients_have_another_way():
    q, k, v = tensors(1, 2, 2, 20, 30)
    capped_by = lambda cap: lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    for cap in (0.5, 0.6, 0.7, 0.8):
        capped = capped_by(cap)
        assert flex.calls(flex.Call(q, k, v), capped, None)[0]().softcap == cap
    by_name, by_score = flex.calls(flex.Call(q.requires_grad_(), k, v), capped, None)
    assert by_name().score is None and by_score().softcap == 0 and by_score().score.text


def test_functions_of_torch_that_are_captured_leave_a_key():
    for one in (torch.Tensor.exp, torch.exp, torch.Size):
        assert flex.key_of(lambda s, b, h, i, j, one=one: one(s), []) is not None


@pytest.mark.slow
def test_what_an_object_holds_may_change(device):
    class Windowed:
        size = 3

        def __call__(self, s, b, h, i, j):
            return torch.where((i - j).abs() < self.size, s, s - 5)

    q, k, v = tensors(1, 2, 2, 20, 30)
    windowed = Windowed()
    for size in (3, 9):
        windowed.size = size
        expected = expected_of(q, k, v, lambda s, b, h, i, j: windowed(s, b, h, i, j))
        assert near(evoattn.flex_attention(q, k, v, windowed.__call__), expected[0])


def test_a_mask_is_looked_at_once_and_forgotten_with_it(device):
    q, k, v = tensors(1, 2, 2, ROWS, KEYS)
    mask = mask_of(document(33))
    evoattn.flex_attention(q, k, v, None, mask)
    known = block_masks.kept(mask)
    evoattn.flex_attention(q, k, v, None, mask)
    assert block_masks.kept(mask) is known
    causal = mask_of(lambda b, h, i, j: i >= j)
    assert (evoattn.flex_attention(q, k, v, None, causal)[:, :, 0] == v[:, :, 0]).all()
    causal.kv_num_blocks.zero_(), causal.full_kv_num_blocks.zero_()  # in place
    assert (evoattn.flex_attention(q, k, v, None, causal) == 0).all()
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    assert not block_masks.is_kept(mask)
    assert (evoattn.flex_attention(q, k, v, None, mask) == 0)[:, :, :33].all()
    for name in ("kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE"):
        assert block_masks.kept(mask) and block_masks.is_kept(mask)
        setattr(mask, name, copy.copy(getattr(mask, name)) if name != "BLOCK_SIZE" else (64, 32))
        assert not block_masks.is_kept(mask)
    gone = weakref.ref(mask)
    del mask, known
    assert gone() is None


def test_lists_are_read_at_each_call(device):
    q, k, v = tensors(1, 2, 2, ROWS, KEYS)
    mask = chosen(full=False)
    evoattn.flex_attention(q, k, v, None, mask)
    mask.kv_num_blocks.zero_()
    assert (evoattn.flex_attention(q, k, v, None, mask) == 0).all()


def test_calls_are_recorded(device):
    q, k, v = tensors(1, 2, 2, ROWS, KEYS)
    with evoattn.capture() as shapes:
        evoattn.flex_attention(q, k, v, None, mask_of(document(37)))
    (problem,) = shapes
    assert problem.blocks == "64x64:2/0/2" and problem.predicate == "(t0[q]==t0[k])&(q>=k)"
    assert evoattn.AttentionProblem(**problem.to_dict()) == problem


@pytest.mark.slow
def test_autocast_and_a_negative_scale(device):
    q, k, v = tensors(1, 2, 2, 20, 30, dtype=torch.float32)
    score_mod = CALLS["a score"][0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = evoattn.flex_attention(q, k, v, score_mod)
    assert out.dtype == torch.bfloat16 and device.launches
    count = len(device.launches)
    out = evoattn.flex_attention(q, k, v, score_mod, scale=-0.3)
    assert len(device.launches) == count
    scores = -0.3 * q @ k.mT * torch.arange(1, 3)[:, None, None]
    distance = (torch.arange(20)[:, None] - torch.arange(30)).abs()
    assert near(out, torch.softmax(scores - 0.1 * distance, -1) @ v)
