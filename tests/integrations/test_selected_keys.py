"""Layers whose indexer selects keys, or blocks of them: only those are seen."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from evoattn.integrations.static_cache import filled_places
from evoattn.integrations.transformers import attention_forward
from evoattn.ops.runtime import current
from tests.integrations.test_model_code import TOKENS, minimax_m3, of_both, same
from tests.ops.fake_device import fake_runtime


def test_keys_are_selected_among_filled_places(tmp_path):
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    query, key = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 32, 16)
    indices = torch.tensor([3, 7, 19]).expand(2, 1, 3)
    with current.use(fake_runtime(None, tmp_path)):
        places = filled_places(2, 1, torch.tensor(8))
        found, _ = attention_forward(module, query, key, key, places, indices=indices)
        expected, _ = attention_forward(module, query, key[:, :, [3, 7]], key[:, :, [3, 7]], None)
    torch.testing.assert_close(found, expected)


class Indexer:
    """Selects blocks of 4 keys."""

    def build_block_mask(self, blocks, mask, keys, dtype, device, positions):
        return mask & (blocks[..., None] == torch.arange(keys) // 4).any(-2)


def test_blocks_are_selected_among_filled_places(tmp_path):
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups, module.indexer = True, 1, Indexer()
    query, key = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 32, 16)
    blocks = torch.tensor([0, 2]).expand(2, 2, 1, 2)
    with current.use(fake_runtime(None, tmp_path)):
        places = filled_places(2, 1, torch.tensor(9))
        found, _ = attention_forward(module, query, key, key, places, block_indices=blocks)
        seen = key[:, :, [0, 1, 2, 3, 8, 9]]
        expected, _ = attention_forward(module, query, seen, seen, None)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["", "sinks"])
def test_only_selected_keys_are_seen(tmp_path, kind, sinks):
    """Of those that the mask shows."""
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    query, key = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    indices = torch.stack([torch.randperm(9)[:5] for _ in range(18)]).view(2, 9, 5)
    indices[:, :, 0] = torch.arange(9)  # each query sees its own key
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    mask = {None: None, torch.bool: causal, torch.float32: torch.zeros(1, 1, 9, 9).masked_fill(~causal, -1e30)}[kind]
    seen = causal & (indices[..., None] == torch.arange(9)).any(2)[:, None]
    with current.use(fake_runtime(None, tmp_path)):
        found, _ = attention_forward(module, query, key, key, mask, indices=indices, s_aux=sinks)
        expected, _ = attention_forward(module, query, key, key, seen, s_aux=sinks)
    torch.testing.assert_close(found, expected)


def test_blocks_are_selected_over_a_growing_cache(tmp_path):
    """Each step says by its positions where in the cache it is. With more blocks the logits are others."""

    def steps(model):
        cache = transformers.DynamicCache(config=model.config)
        parts = (TOKENS[:, :12], TOKENS[:, 12:17], TOKENS[:, 17:18])
        return torch.cat([model(input_ids=part, past_key_values=cache)[0] for part in parts], dim=1)

    same(found := of_both(minimax_m3, tmp_path, steps))
    assert not torch.allclose(of_both(lambda: minimax_m3(5), tmp_path, steps)[1], found[1], atol=1e-2)


def test_selected_blocks_are_refused_of_a_layer_that_makes_no_mask_of_them():
    query = torch.randn(1, 4, 9, 16)
    with pytest.raises(ValueError, match='load this model with "sdpa"'):
        attention_forward(torch.nn.Module(), query, query, query, None, block_indices=torch.zeros(1, 4, 9, 2))
