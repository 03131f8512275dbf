"""Attention as the formula says it, in float64 beside loops over rows, and the masks that models make of windows and
selected keys."""

import math
from unittest import mock

import pytest
import torch

from evoattn.integrations import by_hand
from tests.integrations.flash_attn_formula import drawn

ROWS, KEYS, HEADS, KV_HEADS, DIM = 3, 7, 4, 2, 5
QUERY, KEY, VALUE = (
    drawn(2, heads, rows, DIM, seed=seed) for seed, (heads, rows) in enumerate([(4, ROWS), (2, KEYS), (2, KEYS)])
)
SINKS, BIAS = drawn(HEADS, seed=3), drawn(2, HEADS, ROWS, KEYS, seed=4)
SEEN = torch.ones(2, 1, ROWS, KEYS, dtype=torch.bool).tril(3)
SEEN[1, :, 2] = False


def row_by_row(mask=None, scale=DIM**-0.5, softcap=None, sinks=None, bias=None):
    """The same, each row from the definition."""
    out = torch.zeros(2, ROWS, HEADS, DIM, dtype=torch.float64)
    for b in range(2):
        for h in range(HEADS):
            for q in range(ROWS):
                scores = KEY[b, h // 2] @ QUERY[b, h, q] * scale
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                scores = scores if bias is None else scores + bias[b, h, q]
                weights = scores.exp() if mask is None else scores.exp() * mask[b, 0, q]
                total = weights.sum() + (0 if sinks is None or not weights.any() else math.exp(sinks[h]))
                out[b, q, h] = weights @ VALUE[b, h // 2] / (total or 1.0)
    return out


@pytest.mark.parametrize(
    "given, meant",
    [
        ((None, 0.0, None, False, None, None), {}),
        ((None, 0.0, 0.3, False, None, None), {"scale": 0.3}),
        ((None, 0.0, None, True, None, None), {"mask": torch.ones(2, 1, ROWS, KEYS).tril()}),
        ((SEEN, 0.0, None, True, 2.0, SINKS), {"mask": SEEN, "softcap": 2.0, "sinks": SINKS}),
        ((None, 0.0, None, False, 2.0, None, BIAS), {"softcap": 2.0, "bias": BIAS}),
        ((BIAS, 0.0, None, True, None, SINKS), {"bias": BIAS, "sinks": SINKS}),
    ],
)
def test_each_term_is_as_the_formula_has_it(given, meant):
    torch.testing.assert_close(by_hand.attention(QUERY, KEY, VALUE, *given), row_by_row(**meant))


def test_weights_are_dropped_as_often_as_asked():
    value, same = torch.ones_like(VALUE), torch.zeros_like(QUERY)
    torch.manual_seed(0)
    out = by_hand.attention(same, KEY, value, None, 0.5, None, False, None, None)
    assert set((out * KEYS / 2).round(decimals=9).flatten().tolist()) <= {float(n) for n in range(KEYS + 1)}
    assert len(set(out.flatten().tolist())) > 2


@pytest.mark.parametrize(
    "queries, keys, window, seen",
    [
        (1, 4, 2, ["0011"]),
        (1, 1, 2, ["1"]),
        (3, 3, 2, ["100", "110", "011"]),
        (2, 4, 9, ["1000", "1100"]),  # an empty static cache
    ],
)
def test_a_window_ends_with_each_query_s_own_key(queries, keys, window, seen):
    mask = by_hand.window_mask(torch.empty(1, 2, queries, 6), torch.empty(1, 1, keys, 6), window)
    assert ["".join(str(int(one)) for one in row) for row in mask] == seen


def test_selected_keys_are_those_of_the_mask_that_are_named():
    query, key = torch.empty(1, 2, 3, 6), torch.empty(1, 1, 4, 6)
    named = torch.tensor([[[0, 1], [1, 3], [2, 2]]], dtype=torch.int32)
    rows = lambda mask: ["".join(str(int(one)) for one in row) for row in mask[0, 0]]
    assert rows(by_hand.selected(named, None, query, key, False)) == ["1100", "0101", "0010"]
    assert rows(by_hand.selected(named, None, query, key, True)) == ["1000", "0100", "0010"]
    seen = torch.ones(3, 4, dtype=torch.bool).triu()[None, None]
    assert rows(by_hand.selected(named, seen, query, key, True)) == ["1100", "0101", "0010"]
    seen[..., 0] = False
    assert rows(by_hand.selected(named, seen, query, key, False)) == ["0100", "0101", "0010"]
    added = by_hand.selected(named, torch.full((1, 1, 3, 4), -2.0), query, key, False)
    assert rows(added == -2.0) == ["1100", "0101", "0010"]
    assert set(added.flatten().tolist()) == {-2.0, torch.finfo(torch.float32).min}


def test_blocks_are_selected_by_the_layer_for_the_queries_that_end_with_the_keys():
    layer, query, key = mock.Mock(), torch.empty(2, 4, 3, 6), torch.empty(2, 1, 7, 6)
    blocks, seen = torch.zeros(2, 1, 3, 2), torch.ones(2, 1, 3, 7, dtype=torch.bool)
    asked = layer.indexer.build_block_mask
    for positions in (None, torch.tensor([4, 5, 6]), torch.tensor([[4, 5, 6], [0, 1, 2]])):
        assert by_hand.of_blocks(layer, blocks, seen, query, key, positions) is asked.return_value
        assert asked.call_args.args[:5] == (blocks, seen, 7, torch.float32, query.device)
        expected = [[4, 5, 6], [4, 5, 6] if positions is None or positions.dim() == 1 else [0, 1, 2]]
        assert asked.call_args.args[5].tolist() == expected
    by_hand.of_blocks(layer, blocks, seen, query.to("meta"), key, None)
    assert asked.call_args.args[5].device.type == "meta", "positions are where the queries are"
    with pytest.raises(ValueError, match="over selected blocks of keys"):
        by_hand.of_blocks(torch.nn.Module(), blocks, seen, query, key, None)
