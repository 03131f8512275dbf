"""Faults that once passed the tests: a compiled call that loses an argument, rows that see no key, keys of another
head_dim, machine code of an older template."""

import math
from dataclasses import fields

import pytest
import torch
from torch.overrides import TorchFunctionMode

import evoattn
from evoattn.backends.cubins import recipe_of
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.ops import torch_answer
from evoattn.ops.call import Call, terms_of, why_not_shapes
from evoattn.ops.custom_op import PLAIN, _made, operands


def test_a_compiled_call_loses_no_argument():
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    table, used = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    terms = terms_of(sinks=torch.zeros(4), bias=torch.zeros(5, 5), alibi_slopes=torch.zeros(4), seqused_k=used)
    scales = dict(k_scale=torch.ones(2), v_scale=torch.ones(2))
    others = terms_of(block_table=table, cu_seqlens_q=starts, cu_seqlens_k=starts.clone(), **scales)
    terms = tuple(one if one is not None else other for one, other in zip(terms, others, strict=True))
    call = Call(
        q, k, k.clone(), "causal_lower_right", 0.3, True, (3, 2), 5.0, terms, strict=True, longest=(3, 4), finite=True
    )
    plain = Call(q, k, k.clone(), "causal_upper_left", 0.3, True, strict=True)
    assert None not in terms and len(operands(plain)) == 5 + len(PLAIN)
    for one in (call, plain):
        made = _made(*operands(one))
        for field in fields(Call):
            if field.name not in ("out", "compiled"):
                ours, theirs = getattr(one, field.name), getattr(made, field.name)
                pairs = zip(ours, theirs, strict=True) if field.name == "terms" else [(ours, theirs)]
                assert all(a is b or a == b for a, b in pairs), field.name
        assert made.compiled and made.out is not None


class UnseenAreNoNumbers(TorchFunctionMode):
    """SDPA as some of its kernels are: NaN for queries of which the mask hides every key."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if func is torch_answer.SDPA and args[3] is not None:
            answer = answer.masked_fill(~args[3].any(-1, keepdim=True), math.nan)
        return answer


def test_rows_that_see_no_key_are_zero_whatever_sdpa_makes_of_them():
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 4, 8)
    call = Call(q, k, k, "causal_lower_right")
    expected = torch_answer.answer(call)
    assert not expected[:, :, :2].any() and expected[:, :, 2:].all()
    with UnseenAreNoNumbers():
        assert torch.equal(torch_answer.answer(call), expected)


def test_keys_of_another_head_dim_are_rotary_columns_in_pages_alone():
    q, half = torch.randn(1, 2, 6, 64), torch.randn(1, 2, 6, 32)
    with pytest.raises(RuntimeError, match="Expected size"):
        evoattn.attention(q, half, half)
    assert "head_dim" in (why_not_shapes(Call(q, half, half)) or "")


def test_another_template_is_another_recipe(tmp_path):
    gpu, family = GPUS["h100"], FAMILIES["flash_scalar"]
    config = load_space(family.name, gpu).starting_configs()[0]
    arguments = family, AttentionProblem(1, 2, 2, 64, 64, 64, "fp32"), config, gpu
    (tmp_path / "flash_scalar.cu.j2").write_text("other")
    today, other = recipe_of(*arguments), recipe_of(*arguments, templates=tmp_path)
    assert today == recipe_of(*arguments, templates=TEMPLATES) != other
