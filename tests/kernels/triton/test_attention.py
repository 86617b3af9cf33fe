"""Paged attention in Triton as a worker calls it, against the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.backend import AttentionBackend, CacheShape, GroupBatch
from octavo.kernels.triton import launch
from octavo.kernels.triton.attention import TritonAttention, TritonStep
from octavo.kernels.triton.work_list import WorkList, list_work
from octavo.testing.depth import deep, deep_unless
from octavo.testing.oracles.paged_batches import PagedBatch, on_a_gpu, random_paged_batch

# In 16 bits the weights of the values are rounded too.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
RAGGED = [(1, 3), (1, 90), (1, 31), (1, 32), (1, 1)]
MIXED = [(1, 50), (1, 16), (20, 20), (1, 1), (9, 64)]
CHUNKS = [(1, 40), (13, 30)]
CASES: dict[str, dict[str, Any]] = {
    "one token": {"lengths": [(1, 1)]},
    "one full block": {"lengths": [(1, 16)]},
    "ragged decode": {"lengths": RAGGED},
    "prompts": {"lengths": [(7, 7), (16, 16), (33, 33)]},
    "chunks over history": {"lengths": [(5, 40), (16, 17), (2, 33)]},
    "mixed": {"lengths": MIXED},
    "blocks of 1": {"lengths": [(1, 20), (9, 30)], "block_size": 1},
    "blocks of 3": {"lengths": [(1, 20), (9, 30)], "block_size": 3},
    "blocks of 256": {"lengths": [(1, 300), (20, 270)], "block_size": 256, "kv_heads": 1},
    **{f"{group} heads per KV head": {"lengths": CHUNKS, "group": group, "kv_heads": 1} for group in (1, 4, 7, 8, 17)},
    **{f"heads of {size}": {"lengths": CHUNKS, "head_dim": size, "kv_heads": 1} for size in (8, 80, 96, 128, 256)},
    **{f"window of {window}": {"lengths": MIXED, "window": window, "kv_heads": 1} for window in (1, 15, 16, 17, 200)},
    "window and blocks of 32": {"lengths": RAGGED, "block_size": 32, "window": 33},
    "soft cap": {"lengths": MIXED, "softcap": 2.0},
    "sinks": {"lengths": MIXED, "sinks": True},
    "alibi": {"lengths": MIXED, "alibi": True},
    "soft cap and alibi": {"lengths": MIXED, "softcap": 2.0, "alibi": True},
    "all at once": {"lengths": MIXED, "softcap": 2.0, "sinks": True, "alibi": True, "window": 19, "head_dim": 48},
}


# In the interpreter they take minutes. Each feature of the kernels is in one of these; the others vary its sizes.
SHALLOW = (
    *("one full block", "mixed", "blocks of 3", "17 heads per KV head", "heads of 80", "window of 15", "all at once"),
)


def random_batch(
    *,
    lengths: Sequence[tuple[int, int]],
    block_size: int = 16,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    **options: Any,
) -> PagedBatch:
    batch = random_paged_batch(lengths, block_size=block_size, **options)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch.query.shape[1], generator=generator) if sinks else None
    slopes = torch.rand(batch.query.shape[1], generator=generator) if alibi else None
    return replace(batch, softcap=softcap, sinks=logits, alibi_slopes=slopes)


def backend(batch: PagedBatch, *, exact: bool = False) -> TritonAttention:
    _, block_size, kv_heads, head_dim = batch.key_cache.shape
    shape = CacheShape(block_size, kv_heads, head_dim, batch.key_cache.dtype)
    return TritonAttention(shape, batch.query.device, exact=exact)


def step_of(batch: PagedBatch) -> TritonStep:
    slots = [batch.slots(row, context - batch.query_lens[row]) for row, context in enumerate(batch.context_lens)]
    group = GroupBatch(torch.cat(slots), batch.block_tables, batch.context_lens, batch.query_lens, batch.window)
    return backend(batch).step(group)


def attend(batch: PagedBatch, step: TritonStep | None = None, *, exact: bool = False, **scales: float) -> Tensor:
    """Of a batch whose caches lie as on a GPU."""
    return backend(batch, exact=exact).attend(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        step or step_of(batch),
        batch.scale,
        softcap=batch.softcap,
        sinks=batch.sinks,
        alibi_slopes=batch.alibi_slopes,
        **scales,
    )


def cut(patch: pytest.MonkeyPatch, splits: int, least_keys: int = 1) -> None:
    """Has keys cut into up to so many splits, in decode of at least so many keys."""
    for decides in ("num_splits", "num_decode_splits"):
        patch.setattr(f"octavo.kernels.triton.attention.{decides}", lambda programs, keys, multiprocessors: splits)
    patch.setattr("octavo.kernels.triton.attention.DECODE_SPLIT_KEYS", least_keys)


def assert_attends_as_the_oracle(batch: PagedBatch, device: torch.device, **options: Any) -> None:
    tolerance = TOLERANCE[batch.query.dtype]
    attended = attend(on_a_gpu(batch, device), **options)
    torch.testing.assert_close(attended.cpu(), batch.attended(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("case", deep_unless(SHALLOW.__contains__, CASES))
def test_equals_the_reference(case: str, exact: bool, device: torch.device) -> None:
    assert_attends_as_the_oracle(random_batch(**CASES[case]), device, exact=exact)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *deep(torch.float16)])
def test_equals_the_reference_in_16_bits(dtype: torch.dtype, exact: bool, device: torch.device) -> None:
    batch = random_batch(lengths=MIXED, dtype=dtype, head_dim=64, window=40, sinks=True)
    assert_attends_as_the_oracle(batch, device, exact=exact)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_8_bits_is_read_times_its_scales(dtype: torch.dtype, exact: bool, device: torch.device) -> None:
    batch = random_batch(lengths=MIXED, sinks=True, softcap=3.0)
    placed = on_a_gpu(replace(batch, query=batch.query.to(dtype)), device, torch.float8_e4m3fn)
    attended = attend(placed, exact=exact, key_scale=0.5, value_scale=3.0)
    keys, values = (cache.to(torch.float8_e4m3fn).float() for cache in (batch.key_cache, batch.value_cache))
    expected = replace(batch, query=batch.query.to(dtype).float(), key_cache=0.5 * keys, value_cache=3 * values)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(attended.cpu().float(), expected.attended(), atol=tolerance, rtol=tolerance)


@pytest.mark.deep
@settings(max_examples=16)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([1, 1, 2, 15, 24]), st.integers(0, 70)), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 3, 16, 32, 64]),
    group=st.sampled_from([1, 3, 4, 7, 8, 16]),
    head_dim=st.sampled_from([8, 24, 64, 80]),
    window=st.sampled_from([0, 0, 1, 2, 15, 16, 17, 33, 90]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    alibi=st.booleans(),
    exact=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_reference_on_any_batch(
    device: torch.device, lengths: list[tuple[int, int]], exact: bool, **options: Any
) -> None:
    chunks = [(query, history + query) for query, history in lengths]
    assert_attends_as_the_oracle(random_batch(lengths=chunks, kv_heads=1, **options), device, exact=exact)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_padding_attends_to_nothing_and_leaves_the_others_alone(
    exact: bool, splits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    cut(monkeypatch, splits)
    monkeypatch.setattr("octavo.kernels.triton.attention.EXACT_SPLIT_KEYS", 48 // splits)
    batch = on_a_gpu(random_batch(lengths=[(1, 40), (1, 33), (1, 7)], sinks=True), device)
    alone, step = attend(batch, exact=exact), step_of(batch)
    contexts = step.context_lens.clone()
    contexts[1] = 0
    padded = attend(batch, replace(step, context_lens=contexts), exact=exact)
    assert not padded[1].any()
    assert torch.equal(padded[::2], alone[::2])


def test_a_sequence_has_its_row_of_the_table_wherever_that_is(device: torch.device) -> None:
    batch = on_a_gpu(random_batch(lengths=[(1, 40), (1, 33), (9, 20)]), device)
    step = step_of(batch)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    tables = torch.full((6, step.block_tables.shape[1] + 3), -7, dtype=torch.int32, device=device)
    tables[rows.long(), : step.block_tables.shape[1]] = step.block_tables
    assert torch.equal(attend(batch, replace(step, block_tables=tables, table_rows=rows)), attend(batch, step))


def test_queries_may_be_a_slice_of_a_fused_product(device: torch.device) -> None:
    batch = on_a_gpu(random_batch(lengths=MIXED), device)
    fused = torch.cat((batch.query, torch.full_like(batch.query, torch.nan)), dim=1)
    assert torch.equal(attend(replace(batch, query=fused[:, :6])), attend(batch))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_a_broken_sequence_shows_and_stays_alone(exact: bool, device: torch.device) -> None:
    batch = on_a_gpu(random_batch(lengths=[(1, 40), (1, 33), (9, 20), (9, 9)]), device)
    alone = attend(batch, exact=exact)
    for row in (1, 2):
        batch.value_cache[batch.block_tables[row, 0], 3] = torch.nan
        batch.key_cache[batch.block_tables[row, 0], 3] = torch.inf
    attended = attend(batch, exact=exact)
    assert attended[1:11].isnan().all()
    assert torch.equal(attended[[0, *range(11, 20)]], alone[[0, *range(11, 20)]])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, *deep(torch.bfloat16)])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_what_a_token_does_not_see_yet_may_be_no_number(exact: bool, dtype: torch.dtype, device: torch.device) -> None:
    batch = on_a_gpu(random_batch(lengths=[(1, 40), (9, 40), (5, 5)], kv_heads=1, dtype=dtype), device)
    expected = attend(batch, exact=exact)
    # The fourth and a later token of the second sequence.
    for place, broken in ((7, torch.inf), (3, torch.nan)):
        slot = int(batch.slots(1, 31 + place)[0])
        batch.value_cache[slot // 16, slot % 16] = broken
        attended = attend(batch, exact=exact)
        assert torch.equal(attended[: 1 + place], expected[: 1 + place])
        assert torch.equal(attended[10:], expected[10:])
        assert attended[1 + place : 10].isnan().all()


@settings(max_examples=5)
@given(
    lengths=st.lists(st.sampled_from([(1, 1), (1, 100), (1, 48), (5, 70), (16, 16)]), min_size=1, max_size=3),
    splits=st.integers(2, 9),
    window=st.sampled_from([0, 0, 35]),
    seed=st.integers(0, 2**31),
)
def test_splits_add_up(
    device: torch.device, lengths: list[tuple[int, int]], splits: int, window: int, seed: int
) -> None:
    batch = random_batch(lengths=sorted(lengths), window=window, sinks=True, kv_heads=1, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, splits)
        patch.setattr("octavo.kernels.triton.tiles._DECODE_TILE_BYTES", 1)
        assert_attends_as_the_oracle(batch, device)


RAGGED_DECODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 41},
    "sinks, soft cap and alibi": {"sinks": True, "softcap": 2.0, "alibi": True},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "sinks": True},
}


@pytest.mark.parametrize("case", RAGGED_DECODES)
def test_a_decode_has_the_same_bits_alone_and_in_a_ragged_batch(
    case: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Its keys are split as they would be if it were alone."""
    options = dict(RAGGED_DECODES[case])
    cache_dtype = options.pop("cache_dtype", None)
    cut(monkeypatch, 4, least_keys=32)
    # One piece, two, four of two tiles and less; and a whole batch of short ones beside a long one.
    batch = random_batch(lengths=[(1, 12), (1, 70), (1, 120), (1, 63), (1, 1)], kv_heads=1, **options)
    placed = on_a_gpu(batch, device, cache_dtype)
    together = attend(placed)
    if cache_dtype is None:
        torch.testing.assert_close(together.cpu(), batch.attended(), atol=2e-5, rtol=2e-5)
    for row in (1, 2, 3):
        alone = replace(
            placed,
            query=placed.query[row : row + 1],
            block_tables=placed.block_tables[row : row + 1],
            context_lens=placed.context_lens[row : row + 1],
            query_lens=[1],
        )
        assert torch.equal(attend(alone), together[row : row + 1])


def test_the_first_layer_of_a_step_lists_its_work(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Each layer leaves the list as it was, with nothing taken."""
    made = []

    def keep(*arguments: Any) -> WorkList:
        made.append(list_work(*arguments))
        return made[-1]

    monkeypatch.setattr(launch, "list_work", keep)
    cut(monkeypatch, 3, least_keys=16)
    batch = on_a_gpu(random_batch(lengths=[(1, 60), (1, 20)], kv_heads=1), device)
    step = step_of(batch)
    assert torch.equal(attend(batch, step), attend(batch, step))
    assert [work.counts.tolist() for work in made] == [[3, 0]]
    attend(batch, replace(step, max_context_len=61))
    assert len(made) == 2


def test_work_whose_splits_need_too_much_room_is_cut_into_launches(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    batch = random_batch(lengths=[(1, 40), (1, 20), (1, 1), (9, 20), (20, 35)], kv_heads=1)
    cut(monkeypatch, 2)
    placed = on_a_gpu(batch, device)
    whole = attend(placed)
    monkeypatch.setattr(launch, "_SCRATCH_BYTES", 1)
    assert torch.equal(attend(placed), whole)
    torch.testing.assert_close(whole.cpu(), batch.attended())


def test_tables_need_no_block_before_the_window_and_all_in_it(device: torch.device) -> None:
    batch = on_a_gpu(random_batch(lengths=[(1, 40), (5, 40)], block_size=4, window=9), device)
    batch.block_tables[:, :6] = -1
    step_of(batch)
    batch.block_tables[1, 8] = -1
    with pytest.raises(ValueError, match="no block where a query looks"):
        step_of(batch)


def test_a_step_says_how_its_sequences_begin() -> None:
    step = step_of(random_batch(lengths=MIXED))
    assert (step.num_decodes, step.max_query_len, step.num_tokens, step.max_context_len) == (2, 20, 32, 64)
    assert step.query_starts.tolist() == [0, 1, 2, 22, 23, 32]
    decodes = step_of(random_batch(lengths=RAGGED))
    assert (decodes.num_decodes, decodes.max_query_len) == (5, 0)


def test_writes_what_it_then_attends_to(device: torch.device) -> None:
    batch = random_batch(lengths=MIXED)
    placed, step = on_a_gpu(batch, device), step_of(on_a_gpu(batch, device))
    slots = step.slot_mapping.cpu()
    places = slots // 16, slots % 16
    key, value = (cache[places].to(device) for cache in (batch.key_cache, batch.value_cache))
    for cache in (placed.key_cache, placed.value_cache):
        cache[tuple(place.to(device) for place in places)] = torch.nan
    backend(placed).write(key, value, placed.key_cache, placed.value_cache, step)
    torch.testing.assert_close(attend(placed, step).cpu(), batch.attended(), atol=2e-5, rtol=2e-5)


def test_is_an_attention_backend() -> None:
    attention: AttentionBackend = TritonAttention(CacheShape(16, 2, 64, torch.bfloat16), torch.device("cpu"))
    assert (attention.name, attention.masks_unwritten) == ("triton", True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 6, 16)}, r"expected \[2, query_heads, 16\]"),
        ({"query": torch.zeros(2, 5, 16)}, "5 query heads do not share 2 KV heads"),
        ({"query": torch.zeros(2, 6, 8)}, r"expected \[2, query_heads, 16\]"),
        ({"query": torch.zeros(2, 6, 16, dtype=torch.bfloat16)}, "a cache of torch.float32 for torch.bfloat16"),
        ({"query": torch.zeros(2, 6, 16, dtype=torch.float64)}, "not in torch.float64"),
        ({"query": torch.zeros(2, 2 * 129, 16)}, "129 query heads share a KV head"),
        ({"value_cache": torch.zeros(1, 4, 2, 16)}, "differ"),
        ({"softcap": -1.0}, "a soft cap of -1"),
        ({"sinks": torch.zeros(5)}, r"sinks \[5\]"),
        ({"alibi_slopes": torch.zeros(5)}, r"alibi slopes \[5\]"),
        ({"scale": 0.0}, "must be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str, device: torch.device) -> None:
    batch = random_batch(lengths=[(2, 3)], block_size=4)
    step = step_of(batch)
    with pytest.raises(ValueError, match=message):
        attend(replace(batch, **change), step)


def test_scales_that_do_not_fit_the_cache_are_refused() -> None:
    batch = random_batch(lengths=[(2, 3)], block_size=4)
    with pytest.raises(ValueError, match="only fp8 has some"):
        attend(batch, key_scale=2.0)
    with pytest.raises(ValueError, match="must be positive"):
        attend(on_a_gpu(batch, torch.device("cpu"), torch.float8_e4m3fn), value_scale=0.0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (CacheShape(16, 2, 100, torch.bfloat16), "heads of 100"),
        (CacheShape(16, 2, 512, torch.bfloat16), "heads of 512"),
        (CacheShape(16, 2, 64, torch.float64), "keys and values of torch.float64"),
    ],
)
def test_a_cache_that_the_kernels_do_not_take_is_refused(shape: CacheShape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TritonAttention(shape, torch.device("cpu"))


@dataclass(frozen=True)
class Large:
    """Shapes as models have them."""

    lengths: list[tuple[int, int]]
    kv_heads: int
    group: int
    head_dim: int
    window: int = 0


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize(
    "large",
    [
        Large([(1, 500 * i + 1) for i in range(12)], 8, 4, 128),
        Large([(1, 9000)], 4, 7, 128),
        Large([(1, 3000), (700, 700), (300, 2500), (3, 1000)], 8, 4, 128),
        Large([(1, 3000), (700, 1700)], 2, 4, 256, window=1024),
        Large([(1, 3000), (700, 1700)], 3, 3, 64),
    ],
)
def test_large_batches_equal_the_reference(large: Large, exact: bool, gpu: torch.device) -> None:
    batch = random_batch(
        lengths=large.lengths,
        kv_heads=large.kv_heads,
        group=large.group,
        head_dim=large.head_dim,
        window=large.window,
        dtype=torch.bfloat16,
    )
    assert_attends_as_the_oracle(batch, gpu, exact=exact)
