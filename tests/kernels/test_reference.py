"""The oracle against torch's own attention on the same keys and values laid out in one piece."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.reference import paged_attention, reshape_and_cache
from octavo.testing.oracles.paged_batches import PagedBatch, random_paged_batch


def contiguous_attention(batch: PagedBatch) -> Tensor:
    rows = torch.split(batch.query, batch.query_lens)
    outputs = []
    for query, table, context in zip(rows, batch.block_tables, batch.context_lens, strict=True):
        width = -(-context // batch.key_cache.shape[1])
        keys, values = (
            cache[table[:width]].flatten(0, 1)[:context].transpose(0, 1).nan_to_num()
            for cache in (batch.key_cache, batch.value_cache)
        )
        visible = torch.ones(context, context, dtype=torch.bool).tril()
        if batch.window:
            visible = visible.triu(1 - batch.window)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1), keys, values, attn_mask=visible[-len(query) :], scale=batch.scale, enable_gqa=True
        )
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [0, 1, 6])
def test_equals_torch_attention_on_contiguous_keys(block_size: int, group: int, window: int) -> None:
    lengths = [(1, 1), (5, 5), (3, 20), (1, 17), (16, 16)]
    batch = random_paged_batch(lengths, block_size=block_size, group=group, window=window)
    attended = paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_lens,
        batch.scale,
        batch.window,
    )
    torch.testing.assert_close(attended, contiguous_attention(batch))


def test_a_soft_cap_and_sinks_are_those_of_a_softmax_with_one_more_score() -> None:
    batch = random_paged_batch([(1, 9)], block_size=4, group=2, kv_heads=1)
    sinks = torch.tensor([0.5, -1.0])
    attended = paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, [9], [1], batch.scale, 0, 3.0, sinks
    )
    keys, values = (
        cache[batch.block_tables[0, :3]].flatten(0, 1)[:9, 0] for cache in (batch.key_cache, batch.value_cache)
    )
    scores = 3.0 * torch.tanh(batch.query[0] @ keys.T * batch.scale / 3.0)
    weights = torch.cat((scores, sinks[:, None]), dim=1).softmax(dim=1)
    torch.testing.assert_close(attended[0], weights[:, :9] @ values)


def test_a_first_token_attends_to_itself_alone() -> None:
    batch = random_paged_batch([(1, 1)], block_size=4, group=1)
    attended = paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, [1], [1], batch.scale
    )
    torch.testing.assert_close(attended[0], batch.value_cache[batch.block_tables[0, 0], 0])


def test_writes_each_token_into_its_slot_and_nowhere_else() -> None:
    key, value = torch.randn(2, 3, 2, 4).unbind()
    key_cache, value_cache = torch.zeros(2, 5, 4, 2, 4).unbind()
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([19, 0, 6]))
    for cache, new in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[4, 3], new[0])
        assert torch.equal(cache[0, 0], new[1])
        assert torch.equal(cache[1, 2], new[2])
        assert cache.flatten(0, 1).any(dim=(1, 2)).sum() == 3
