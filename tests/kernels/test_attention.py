"""What production calls, against the oracle."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import attention, attention_plan, reference
from octavo.testing.depth import deep
from octavo.testing.oracles.paged_batches import PagedBatch, random_paged_batch

SHAPES = {
    "one token": [(1, 1)],
    "one full block": [(1, 16)],
    "across a block border": [(1, 17), (1, 16), (1, 15)],
    "ragged decode": [(1, 3), (1, 90), (1, 31), (1, 32), (1, 1)],
    "prompts": [(7, 7), (16, 16), (33, 33)],
    "chunks over history": [(5, 40), (16, 17), (2, 33)],
    "mixed": [(1, 50), (20, 20), (1, 1), (9, 64), (1, 16)],
}
# Around a block of 16: smaller, equal, larger; and larger than any context above.
WINDOWS = [1, 7, 16, 17, 40, 100]


def planned(batch: PagedBatch) -> attention_plan.AttentionPlan:
    kv_heads, head_dim = batch.key_cache.shape[2:]
    return attention_plan.plan_attention(
        batch.block_tables,
        batch.context_lens,
        batch.query_lens,
        block_size=batch.key_cache.shape[1],
        bytes_per_token=2 * kv_heads * head_dim * batch.query.itemsize,
        dtype=batch.query.dtype,
        device=batch.query.device,
        window=batch.window,
    )


def attend(batch: PagedBatch) -> Tensor:
    return attention.paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        planned(batch),
        batch.scale,
        softcap=batch.softcap,
        sinks=batch.sinks,
    )


def oracle(batch: PagedBatch) -> Tensor:
    return reference.paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_lens,
        batch.scale,
        batch.window,
        batch.softcap,
        batch.sinks,
    )


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(lengths: list[tuple[int, int]], group: int, block_size: int) -> None:
    batch = random_paged_batch(lengths, block_size=block_size, group=group)
    torch.testing.assert_close(attend(batch), oracle(batch))


def test_equals_the_reference_in_bfloat16() -> None:
    batch = random_paged_batch(SHAPES["mixed"], block_size=16, dtype=torch.bfloat16)
    torch.testing.assert_close(attend(batch), oracle(batch), atol=2e-2, rtol=2e-2)


def in_pool(caches: tuple[Tensor, Tensor], heads_first: bool) -> tuple[Tensor, Tensor]:
    """The same keys and values as a layer of a pool of all layers holds them, on a CPU or, `heads_first`, on a GPU."""
    blocks = torch.stack(caches, dim=1)[:, None].expand(-1, 3, -1, -1, -1, -1)
    pool = blocks.transpose(3, 4).contiguous().transpose(3, 4) if heads_first else blocks.contiguous()
    return pool[:, 1, 0], pool[:, 1, 1]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("window", [0, 7])
def test_a_layer_of_a_pool_is_read_as_a_cache_of_its_own(heads_first: bool, window: int) -> None:
    batch = random_paged_batch(SHAPES["mixed"], block_size=16, window=window)
    keys, values = in_pool((batch.key_cache, batch.value_cache), heads_first)
    assert not keys.is_contiguous()
    assert torch.equal(attend(replace(batch, key_cache=keys, value_cache=values)), attend(batch))


@pytest.mark.parametrize("examples", [15, *deep(40)])
def test_equals_the_reference_on_any_batch(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 40)), min_size=1, max_size=6),
        block_size=st.sampled_from([1, 3, 16]),
        group=st.sampled_from([1, 3, 7]),
        seed=st.integers(0, 2**31),
    )
    def check(lengths: list[tuple[int, int]], block_size: int, group: int, seed: int) -> None:
        chunks = [(query, history + query) for query, history in lengths]
        batch = random_paged_batch(chunks, block_size=block_size, group=group, kv_heads=1, head_dim=8, seed=seed)
        torch.testing.assert_close(attend(batch), oracle(batch))

    check()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference_under_a_window(lengths: list[tuple[int, int]], window: int) -> None:
    batch = random_paged_batch(lengths, block_size=16, window=window)
    torch.testing.assert_close(attend(batch), oracle(batch))


@pytest.mark.parametrize("examples", [25, *deep(80)])
def test_equals_the_reference_on_any_batch_under_any_window(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 60)), min_size=1, max_size=6),
        block_size=st.sampled_from([1, 3, 16]),
        window=st.integers(1, 90),
        seed=st.integers(0, 2**31),
    )
    def check(lengths: list[tuple[int, int]], block_size: int, window: int, seed: int) -> None:
        chunks = [(query, history + query) for query, history in lengths]
        batch = random_paged_batch(
            chunks, block_size=block_size, group=3, kv_heads=1, head_dim=8, window=window, seed=seed
        )
        torch.testing.assert_close(attend(batch), oracle(batch))

    check()


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference_with_soft_caps_and_sinks(
    lengths: list[tuple[int, int]], softcap: float, window: int
) -> None:
    batch = random_paged_batch(lengths, block_size=16, window=window)
    sinks = torch.randn(batch.query.shape[1], generator=torch.Generator().manual_seed(1))
    capped = replace(batch, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(attend(capped), oracle(capped))
    assert not torch.allclose(attend(capped), attend(batch), atol=1e-3)


def test_a_window_gathers_only_the_blocks_it_reaches_into() -> None:
    batch = random_paged_batch([(1, 1000), (1, 989), (1, 5), (20, 500)], block_size=16, window=33)
    plan = planned(batch)
    assert [len(group.block_ids) for group in plan.decode_groups] == [3 * 3]
    assert [len(tile.block_ids) for tile in plan.prefill_tiles] == [4]


def test_a_window_larger_than_every_context_changes_nothing() -> None:
    batch = random_paged_batch(SHAPES["mixed"], block_size=16)
    assert torch.equal(attend(replace(batch, window=64)), attend(batch))


def test_a_missing_block_inside_the_window_is_refused() -> None:
    for lengths in ([(1, 40)], [(5, 40)]):
        batch = random_paged_batch(lengths, block_size=4, window=9)
        batch.block_tables[0, 8] = -1
        for call in (attend, oracle):
            with pytest.raises(ValueError, match="no block where a query looks"):
                call(batch)


@pytest.mark.parametrize("window", [0, 10])
def test_a_batch_cut_into_many_calls_gives_the_same(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    batch = random_paged_batch([(1, 90), (1, 5), (40, 70), (1, 33), (1, 34)], block_size=4, window=window)
    whole = attend(batch)
    monkeypatch.setattr(attention_plan, "_GATHER_BYTES", 1)
    monkeypatch.setattr(attention_plan, "_TILE_QUERIES", 16)
    plan = planned(batch)
    assert (len(plan.decode_groups), len(plan.prefill_tiles)) == (4, 3)
    torch.testing.assert_close(attend(batch), whole)


def test_decode_temporaries_are_bounded() -> None:
    contexts = [(1, context) for context in range(20, 2000, 20)]
    batch = random_paged_batch(contexts, block_size=16, kv_heads=4, head_dim=64, group=1)
    plan = planned(batch)
    sizes = [len(group.block_ids) * 16 * 2 * 4 * 64 * 4 for group in plan.decode_groups]
    assert max(sizes) <= 8 << 20
    assert sum(len(group.rows) for group in plan.decode_groups) == len(contexts)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("block_size", [1, 16])
def test_writes_keys_and_values_as_the_reference_does(block_size: int, heads_first: bool) -> None:
    tokens, heads = 9, 3
    # Strided, as the slice of a fused QKV projection is.
    key, value = torch.randn(tokens, 4 * heads, 8)[:, heads:-heads].chunk(2, dim=1)
    slots = torch.randperm(20 * block_size)[:tokens]
    keys, values = torch.zeros(2, 20, block_size, heads, 8).unbind()
    theirs = (keys, values)
    ours = in_pool(theirs, heads_first)
    attention.reshape_and_cache(key, value, *ours, slots)
    reference.reshape_and_cache(key, value, *theirs, slots)
    assert all(map(torch.equal, ours, theirs))
    assert all(cache.any() for cache in ours)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 6, 16)}, "3 rows for sequences of 2"),
        ({"query": torch.zeros(2, 5, 16)}, "5 query heads do not share 2 KV heads"),
        ({"query": torch.zeros(2, 6, 8)}, "does not fit a cache"),
        ({"query": torch.zeros(2, 6, 16, dtype=torch.bfloat16)}, "does not fit a cache"),
        ({"value_cache": torch.zeros(1, 4, 2, 16)}, "differ"),
        ({"context_lens": [1]}, "2 query tokens, 1 context tokens"),
        ({"context_lens": [99]}, "99 context tokens, 8 slots"),
        ({"query_lens": [0]}, "0 query tokens"),
        ({"query_lens": [1, 1]}, "2 queries"),
        ({"window": -1}, "a window of -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    batch = replace(random_paged_batch([(2, 3)], block_size=4), **change)  # type: ignore[arg-type]
    for call in (attend, oracle):
        with pytest.raises(ValueError, match=message):
            call(batch)


def test_new_keys_that_do_not_fit_the_cache_are_refused() -> None:
    cache = torch.zeros(2, 4, 2, 8)
    new, slots = torch.zeros(3, 2, 8), torch.tensor([0, 1, 2])
    for write in (attention.reshape_and_cache, reference.reshape_and_cache):
        with pytest.raises(ValueError, match="value is"):
            write(new, new.bfloat16(), cache, cache, slots)
        with pytest.raises(ValueError, match="key is"):
            write(new[:2], new, cache, cache, slots)
        with pytest.raises(ValueError, match="slot_mapping"):
            write(new, new, cache, cache, slots.int())
        with pytest.raises(ValueError, match="the last one 1"):
            write(new, new, cache.transpose(2, 3), cache.transpose(2, 3), slots)
        with pytest.raises(ValueError, match="alike"):
            write(new, new, cache, torch.zeros(4, 2, 2, 8).transpose(0, 1), slots)


def test_a_plan_for_another_block_size_is_refused() -> None:
    batch = random_paged_batch([(1, 4)], block_size=4)
    cache = batch.key_cache.reshape(-1, 2, 2, 16)
    with pytest.raises(ValueError, match="blocks of 4 slots and a cache of 2"):
        attention.paged_attention(batch.query, cache, cache, planned(batch), batch.scale)
