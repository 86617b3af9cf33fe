"""Every variant of the native kernel against the oracle, and rows that depend on nothing but themselves."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.native.attention import NativeAttention, NativeStep
from octavo.kernels.native.library import NativeLibrary
from octavo.testing.depth import deep_unless
from octavo.testing.native import library, threads
from octavo.testing.oracles.paged_batches import PagedBatch, random_paged_batch

__all__ = ["library"]

DTYPES = [torch.float32, torch.bfloat16]
# The dtype of the computation, that of the cache, and what the result may be off by: in bf16 the weights of the values
# are rounded too, and of normally distributed numbers 8 bits leave a hundredth open.
KINDS: dict[str, tuple[torch.dtype, torch.dtype, float]] = {
    "float32": (torch.float32, torch.float32, 1e-5),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 2e-2),
    "float32 over bfloat16": (torch.float32, torch.bfloat16, 2e-2),
    "float32 over int8": (torch.float32, torch.int8, 6e-2),
    "bfloat16 over int8": (torch.bfloat16, torch.int8, 6e-2),
}
KIND_NAMES = deep_unless(lambda name: name in ("float32", "bfloat16", "float32 over int8"), KINDS)
RAGGED = [(1, 3), (1, 90), (1, 31), (1, 32), (1, 1), (1, 65)]
MIXED = [(1, 50), (20, 20), (1, 1), (9, 64), (1, 16), (17, 130)]
CASES: dict[str, dict[str, Any]] = {
    "one token": {"lengths": [(1, 1)]},
    "one full block": {"lengths": [(1, 16)]},
    "ragged decode": {"lengths": RAGGED},
    "prompts": {"lengths": [(7, 7), (16, 16), (33, 33)]},
    "chunks over history": {"lengths": [(5, 40), (16, 17), (2, 33), (31, 95)]},
    "mixed": {"lengths": MIXED},
    "blocks of 32": {"lengths": MIXED, "block_size": 32},
    "blocks of 256": {"lengths": [(1, 300), (20, 270), (1, 256)], "block_size": 256},
    **{f"{group} heads per KV head": {"lengths": MIXED[:4], "group": group} for group in (1, 2, 5, 7, 12, 13, 14)},
    **{f"heads of {size}": {"lengths": MIXED[:4], "head_dim": size} for size in (16, 32, 80, 96, 128, 256)},
    **{f"window of {window}": {"lengths": MIXED, "window": window} for window in (1, 7, 16, 17, 40, 64, 200)},
    "window and blocks of 32": {"lengths": RAGGED, "block_size": 32, "window": 33},
    "soft cap": {"lengths": MIXED, "softcap": 2.0},
    "sinks": {"lengths": MIXED, "sinks": True},
    "all at once": {"lengths": MIXED, "softcap": 2.0, "sinks": True, "window": 19, "group": 5, "head_dim": 48},
}


def random_batch(
    *,
    lengths: Sequence[tuple[int, int]],
    block_size: int = 16,
    group: int = 3,
    head_dim: int = 64,
    softcap: float = 0.0,
    sinks: bool = False,
    **options: Any,
) -> PagedBatch:
    batch = random_paged_batch(lengths, block_size=block_size, group=group, head_dim=head_dim, **options)
    logits = torch.randn(batch.query.shape[1], generator=torch.Generator().manual_seed(1))
    return replace(batch, softcap=softcap, sinks=logits if sinks else None)


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


@functools.cache
def solved(name: str, dtype: torch.dtype) -> tuple[PagedBatch, Tensor]:
    """A case of `CASES` and what the oracle makes of it; all variants have to meet the same."""
    batch = random_batch(dtype=dtype, **CASES[name])
    return batch, oracle(batch)


@dataclass
class Cache:
    """The native form of one layer's keys and values, the second of a `pool` of three; NaN wherever nothing was
    written."""

    attention: NativeAttention
    pool: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def like(
        cls, library: NativeLibrary, batch: PagedBatch, dtype: torch.dtype | None = None, *, exact: bool = False
    ) -> "Cache":
        """Of `dtype`, None: the batch's. All bits of an int8 cache are set: its scales are NaN too."""
        num_blocks, block_size, kv_heads, head_dim = batch.key_cache.shape
        shape = CacheShape(block_size, kv_heads, head_dim, dtype or batch.key_cache.dtype)
        nothing = torch.nan if shape.dtype.is_floating_point else -1
        pool = torch.full((num_blocks, 3, 2, block_size, kv_heads, shape.width), nothing, dtype=shape.dtype)
        attention = NativeAttention(library, shape, batch.query.dtype, exact=exact)
        return cls(attention, pool, pool[:, 1, 0], pool[:, 1, 1])

    def step(self, batch: PagedBatch) -> NativeStep:
        slots = torch.cat([self.slots(batch, row, context - query) for row, query, context in sequences(batch)])
        tables, contexts, queries = batch.block_tables, batch.context_lens, batch.query_lens
        return self.attention.step(GroupBatch(slots, tables, contexts, queries, batch.window))

    def slots(self, batch: PagedBatch, row: int, start: int) -> Tensor:
        """Of the tokens of a sequence from position `start` on."""
        block_size = batch.key_cache.shape[1]
        positions = torch.arange(start, batch.context_lens[row])
        return batch.block_tables[row, positions // block_size] * block_size + positions % block_size

    def write(self, batch: PagedBatch, slots: Tensor) -> None:
        """The keys and values that `batch` holds in these slots."""
        blocks = torch.unique(slots // batch.key_cache.shape[1])[None]
        tokens = blocks.shape[1] * batch.key_cache.shape[1]
        step = self.attention.step(GroupBatch(slots, blocks, [tokens], [len(slots)], 0))
        key, value = (cache.flatten(0, 1)[slots] for cache in (batch.key_cache, batch.value_cache))
        self.attention.write(key, value, self.keys, self.values, step)

    def attend(self, batch: PagedBatch) -> Tensor:
        step = self.step(batch)
        return self.attention.attend(
            batch.query, self.keys, self.values, step, batch.scale, softcap=batch.softcap, sinks=batch.sinks
        )


def sequences(batch: PagedBatch) -> list[tuple[int, int, int]]:
    """(row of the tables, query tokens, context tokens) of each."""
    return list(zip(range(len(batch.query_lens)), batch.query_lens, batch.context_lens, strict=True))


def filled(
    library: NativeLibrary, batch: PagedBatch, dtype: torch.dtype | None = None, *, exact: bool = False
) -> Cache:
    """A cache with all that the blocks hold which no window has passed."""
    cache = Cache.like(library, batch, dtype, exact=exact)
    block_size = batch.key_cache.shape[1]
    for row, query, context in sequences(batch):
        seen = max(0, context - query + 1 - batch.window) if batch.window else 0
        cache.write(batch, cache.slots(batch, row, seen // block_size * block_size))
    return cache


def attend(
    library: NativeLibrary, batch: PagedBatch, dtype: torch.dtype | None = None, *, exact: bool = False
) -> Tensor:
    return filled(library, batch, dtype, exact=exact).attend(batch)


def one_sequence(batch: PagedBatch, row: int) -> PagedBatch:
    first = sum(batch.query_lens[:row])
    query, context = batch.query_lens[row], batch.context_lens[row]
    rows, table = batch.query[first : first + query], batch.block_tables[row : row + 1]
    return replace(batch, query=rows, block_tables=table, context_lens=[context], query_lens=[query])


def assert_close(attended: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(library: NativeLibrary, name: str, kind: str) -> None:
    dtype, cache, tolerance = KINDS[kind]
    batch, expected = solved(name, dtype)
    assert_close(attend(library, batch, cache), expected, tolerance)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 90)), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32, 48]),
    head_dim=st.sampled_from([16, 48, 80]),
    group=st.integers(1, 14),
    window=st.one_of(st.just(0), st.integers(1, 130)),
    softcap=st.sampled_from([0.0, 3.0]),
    sinks=st.booleans(),
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference_on_any_batch(
    library: NativeLibrary, lengths: list[tuple[int, int]], kind: str, **options: Any
) -> None:
    dtype, cache, tolerance = KINDS[kind]
    chunks = [(query, history + query) for query, history in lengths]
    batch = random_batch(lengths=chunks, kv_heads=1, dtype=dtype, **options)
    assert_close(attend(library, batch, cache), oracle(batch), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [1e2, 1e4])
def test_large_scores_neither_overflow_nor_vanish(library: NativeLibrary, largest: float, dtype: torch.dtype) -> None:
    batch = random_batch(lengths=MIXED, dtype=dtype)
    products = largest / batch.scale
    loud = replace(batch, query=batch.query * products**0.5, key_cache=batch.key_cache * products**0.5)
    attended = attend(library, loud)
    assert attended.isfinite().all()
    # What fp32 rounds off a score is a share of it, and of a weight e to the power of that.
    assert_close(attended, oracle(loud), largest * 5e-5 + KINDS[str(dtype).removeprefix("torch.")][2])
    assert attend(library, loud, torch.int8).isfinite().all()


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_may_count_for_nothing_or_for_everything(library: NativeLibrary, sink: float) -> None:
    batch = random_batch(lengths=MIXED)
    sunk = attend(library, replace(batch, sinks=torch.full((6,), sink)))
    expected = torch.zeros_like(sunk) if sink > 0 else attend(library, batch)
    torch.testing.assert_close(sunk, expected)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_long_context_keeps_its_precision(library: NativeLibrary, kind: str) -> None:
    dtype, cache, tolerance = KINDS[kind]
    batch = random_batch(lengths=[(1, 5000), (2, 4999)], kv_heads=1, dtype=dtype)
    # The mean of so many values is small.
    assert_close(attend(library, batch, cache), oracle(batch), tolerance / 10)


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("window", [0, 19])
def test_a_sequence_alone_gets_what_it_gets_among_others(library: NativeLibrary, kind: str, window: int) -> None:
    dtype, kept, _ = KINDS[kind]
    batch = random_batch(lengths=MIXED, dtype=dtype, window=window, sinks=True)
    cache = filled(library, batch, kept)
    together = cache.attend(batch)
    alone = torch.cat([cache.attend(one_sequence(batch, row)) for row, _, _ in sequences(batch)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("group", [1, 3, 14])
@pytest.mark.parametrize("window", [0, 100])
def test_a_prompt_gets_the_same_in_chunks_of_any_size(
    library: NativeLibrary, kind: str, group: int, window: int
) -> None:
    tokens = 150
    dtype, kept, _ = KINDS[kind]
    whole = random_batch(lengths=[(tokens, tokens)], dtype=dtype, group=group, window=window, kv_heads=1)
    expected = attend(library, whole, kept)
    for size in (1, 5, 16, 33, 64):
        cache, chunks = Cache.like(library, whole, kept), []
        for start in range(0, tokens, size):
            end = min(start + size, tokens)
            chunk = replace(whole, query=whole.query[start:end], context_lens=[end], query_lens=[end - start])
            cache.write(whole, cache.slots(chunk, 0, start))
            chunks.append(cache.attend(chunk))
        assert torch.equal(torch.cat(chunks), expected), size


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_the_number_of_threads_does_not_show(library: NativeLibrary, kind: str) -> None:
    dtype, kept, _ = KINDS[kind]
    batch = random_batch(lengths=MIXED, dtype=dtype)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(attend(library, batch, kept))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_nan_shows_in_its_own_sequence_and_in_no_other(library: NativeLibrary, kind: str) -> None:
    dtype, kept, _ = KINDS[kind]
    batch = random_batch(lengths=MIXED, dtype=dtype)
    expected = attend(library, batch, kept)
    # The last key of the second sequence, and the query of the fourth one's last token.
    key_cache, query = batch.key_cache.clone(), batch.query.clone()
    key_cache[batch.block_tables[1, 1], 3, 0, 5] = torch.nan
    query[29, 4, 7] = torch.nan
    attended = attend(library, replace(batch, query=query, key_cache=key_cache), kept)
    assert attended[20, :3].isnan().all()
    assert attended[29, 4].isnan().all()
    untouched = torch.ones(attended.shape[:2], dtype=torch.bool)
    untouched[1:21, :3] = untouched[29, 4] = False
    assert torch.equal(attended[untouched], expected[untouched])


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_a_token_does_not_see_yet_may_be_no_number(library: NativeLibrary, kind: str, broken: float) -> None:
    """Of each number of tokens, and at even and odd places, one breaks those from itself on."""
    dtype, kept, _ = KINDS[kind]
    for tokens, place in [(2, 1), (5, 3), (9, 4), (20, 1), (33, 30), (33, 31)]:
        batch = random_batch(lengths=[(tokens, 61 + tokens), (1, 40)], dtype=dtype)
        expected = attend(library, batch, kept)
        slot = int(batch.slots(0, 61 + place)[0])
        key_cache, value_cache = batch.key_cache.clone(), batch.value_cache.clone()
        for cache in (key_cache, value_cache):
            cache.view(-1, *cache.shape[2:])[slot] = broken
        attended = attend(library, replace(batch, key_cache=key_cache, value_cache=value_cache), kept)
        assert torch.equal(attended[:place], expected[:place])
        assert torch.equal(attended[tokens:], expected[tokens:])
        assert not attended[place:tokens].isfinite().any()


def test_queries_keys_and_values_may_be_parts_of_one_tensor(library: NativeLibrary) -> None:
    batch = random_batch(lengths=[(9, 9)], group=3)
    cache = Cache.like(library, batch)
    step = cache.step(batch)
    key, value = (plain.flatten(0, 1)[step.slot_mapping] for plain in (batch.key_cache, batch.value_cache))
    fused = torch.cat((batch.query, key, value), dim=1)
    query, key, value = torch.split(fused, [6, 2, 2], dim=1)
    cache.attention.write(key, value, cache.keys, cache.values, step)
    attended = cache.attention.attend(query, cache.keys, cache.values, step, batch.scale)
    assert torch.equal(attended, attend(library, batch))
    across = fused.transpose(1, 2).contiguous().transpose(1, 2)[:, :6]
    assert torch.equal(cache.attention.attend(across, cache.keys, cache.values, step, batch.scale), attended)


def test_writing_8_bits_touches_its_own_slots_and_no_others(library: NativeLibrary) -> None:
    batch = random_batch(lengths=[(5, 21)])
    cache = Cache.like(library, batch, torch.int8)
    # Where codes and scales lie, as two writes of other values find it.
    cache.write(batch, cache.slots(batch, 0, 16))
    once = cache.pool.clone()
    cache.write(replace(batch, key_cache=-batch.key_cache, value_cache=-batch.value_cache), cache.slots(batch, 0, 16))
    block = batch.block_tables[0, 1]
    touched = (once != -1) | (cache.pool != -1)
    # A code of -1 may be what is written.
    assert 0.97 * 2 * 5 * 2 * 64 < touched[block, 1].sum() <= 2 * 5 * 2 * 68
    assert touched[block, 1].sum() == touched.sum()


def test_writing_touches_its_own_slots_and_no_others(library: NativeLibrary) -> None:
    batch = random_batch(lengths=[(5, 21)])
    cache = Cache.like(library, batch)
    cache.write(batch, cache.slots(batch, 0, 16))
    for tensor in (cache.keys, cache.values):
        written = ~tensor.isnan()
        assert written.sum() == 5 * 2 * 64
        assert written[batch.block_tables[0, 1]].sum() == written.sum()
    assert cache.pool[:, ::2].isnan().all()


def test_8_bits_hold_large_small_and_no_numbers(library: NativeLibrary) -> None:
    """Elements of one size cost another no precision but in their own group; zeros stay zeros."""
    batch = random_batch(lengths=[(1, 20)], kv_heads=1, group=1)
    key_cache, value_cache = batch.key_cache.clone(), batch.value_cache.clone()
    key_cache[..., :32] *= 1e3
    loud = replace(batch, query=batch.query * torch.tensor([1e-3] * 32 + [1.0] * 32), key_cache=key_cache)
    assert_close(attend(library, loud, torch.int8), oracle(loud), 6e-2)
    for size in (1e-25, 0.0, 1e20):
        sized = replace(batch, value_cache=value_cache * size)
        torch.testing.assert_close(attend(library, sized, torch.int8), oracle(sized), atol=6e-2 * size, rtol=6e-2)
    for broken in (torch.nan, torch.inf):
        spoilt = value_cache.clone()
        spoilt[batch.block_tables[0, 0], 3, 0, 5] = broken
        assert not attend(library, replace(batch, value_cache=spoilt), torch.int8).isfinite().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 6, 16)}, "3 rows for sequences of 2"),
        ({"query": torch.zeros(2, 5, 16)}, "5 query heads do not share 2 KV heads"),
        ({"query": torch.zeros(2, 6, 8)}, "does not fit a cache"),
        (
            {"query": torch.zeros(2, 6, 16, dtype=torch.bfloat16)},
            "does not fit a cache for heads of 16 and torch.float32",
        ),
        ({"query": torch.zeros(2, 96)}, "query is"),
        ({"context_lens": [1]}, "2 query tokens, 1 context tokens"),
        ({"context_lens": [99]}, "99 context tokens, 32 slots"),
        ({"query_lens": [0]}, "0 query tokens"),
        ({"query_lens": [1, 1]}, "2 queries"),
        ({"window": -1}, "a window of -1"),
        ({"softcap": -1.0}, "a soft cap of -1"),
        ({"sinks": torch.zeros(5)}, "sinks"),
        ({"block_tables": torch.tensor([[-1, 0]])}, "no block where a query looks"),
        ({"block_tables": torch.tensor([[4, 0]])}, "block 4 is named; the cache has 4"),
        ({"block_tables": torch.tensor([[1 << 40, 0]])}, "is named; the cache has 4"),
        ({"block_tables": torch.tensor([[0, 0]], dtype=torch.int32)}, "int64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(library: NativeLibrary, change: dict[str, object], message: str) -> None:
    batch = random_paged_batch([(2, 3)], block_size=16)
    cache = filled(library, batch)
    slots = cache.slots(batch, 0, 1)
    changed = replace(batch, **change)  # type: ignore[arg-type]
    step = GroupBatch(slots, changed.block_tables, changed.context_lens, changed.query_lens, changed.window)
    with pytest.raises(ValueError, match=message):
        cache.attention.attend(
            changed.query,
            cache.keys,
            cache.values,
            cache.attention.step(step),
            changed.scale,
            softcap=changed.softcap,
            sinks=changed.sinks,
        )


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([0, -1]), "no block"),
        (torch.tensor([0, 64]), "block 4 is named; the cache has 4"),
        (torch.tensor([0]), "1 slots for 2 query tokens"),
        (torch.tensor([0, 1, 2]), "3 slots for 2 query tokens"),
        (torch.tensor([0, 1], dtype=torch.int32), "int64"),
    ],
)
def test_slots_that_cannot_be_are_refused(library: NativeLibrary, slots: Tensor, message: str) -> None:
    attention = NativeAttention(library, CacheShape(16, 2, 16, torch.float32))
    keys, values = torch.zeros(2, 4, 16, 2, 16)
    new = torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match=message):
        attention.write(new, new, keys, values, attention.step(GroupBatch(slots, torch.tensor([[0]]), [2], [2], 0)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 32, 2, 16), torch.float32), ((4, 16, 3, 16), torch.float32), ((4, 16, 2, 16), torch.bfloat16)],
)
def test_a_cache_of_another_shape_is_refused(
    library: NativeLibrary, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    attention = NativeAttention(library, CacheShape(16, 2, 16, torch.float32))
    step = attention.step(GroupBatch(torch.tensor([0]), torch.tensor([[0]]), [1], [1], 0))
    cache = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match="for blocks of"):
        attention.check(cache, cache, step)
    with pytest.raises(ValueError, match="contiguous"):
        attention.check(cache.transpose(0, 1), cache.transpose(0, 1), step)
    with pytest.raises(ValueError, match="the last one 1"):
        attention.check(cache.transpose(2, 3), cache.transpose(2, 3), step)
