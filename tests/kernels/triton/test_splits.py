"""How attention is cut up: decisions in plain code."""

import pytest
import torch

from octavo.kernels.triton.devices import shared_limit
from octavo.kernels.triton.tiles import (
    MAX_GROUP,
    decode_tiles,
    exact_tiles,
    fitted,
    num_splits,
    prefill_tiles,
    programs_of_splits,
    shared_bytes,
)

H200 = 132
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_many_sequences_take_one_pass() -> None:
    """More than 512 sequences x query heads, which share KV heads by fours."""
    assert num_splits(17 * 8, 8192, H200) == 1
    assert num_splits(512 * 8, 40960, H200) == 1


def test_a_short_context_takes_one_pass() -> None:
    assert num_splits(8, 511, H200) == 1
    assert num_splits(8, 512, H200) == 2
    assert num_splits(0, 0, H200) == 1


@pytest.mark.parametrize("sequences", range(1, 13))
def test_a_few_sequences_fill_the_gpu_once(sequences: int) -> None:
    programs = sequences * 8
    splits = num_splits(programs, 40960, H200)
    assert H200 < programs * splits <= 2 * H200


def test_more_multiprocessors_ask_for_more_splits() -> None:
    assert [num_splits(8, 40960, count) for count in (16, 64, 132)] == [4, 16, 33]


def test_splits_that_lie_still_take_no_more_programs_than_a_gpu_has_use_for() -> None:
    """At 131,072 tokens there are 64 of them, most without a key."""
    assert programs_of_splits(1 * 8, 64, H200) == 64
    assert programs_of_splits(16 * 8, 64, H200) == 9
    assert programs_of_splits(256 * 8, 64, H200) == 1
    assert programs_of_splits(8, 1, H200) == programs_of_splits(0, 1, H200) == 1
    for sequences in range(1, 513):
        assert sequences * 8 * programs_of_splits(sequences * 8, 64, H200) <= max(sequences * 8, 16 * H200)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 17, 71, MAX_GROUP])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
def test_tiles_hold_a_token_of_every_group(head_dim: int, group: int, dtype: torch.dtype) -> None:
    chosen = [decode_tiles(group, head_dim, dtype, dtype), exact_tiles(group, head_dim, dtype)]
    chosen += [prefill_tiles(group, head_dim, dtype, length) for length in (1, 2, 9, 500)]
    for tiles in chosen:
        assert group <= tiles.rows <= MAX_GROUP
        assert tiles.rows & (tiles.rows - 1) == tiles.keys & (tiles.keys - 1) == 0
        assert min(tiles.rows, tiles.keys) >= 16


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_tiles_fit_the_shared_memory_that_there_is(
    group: int, head_dim: int, capability: int, cache: torch.dtype
) -> None:
    bf16, limit = torch.bfloat16, shared_limit(capability)
    exact = exact_tiles(group, head_dim, bf16)
    for tiles in (decode_tiles(group, head_dim, bf16, cache), prefill_tiles(group, head_dim, bf16, 500), exact):
        found = fitted(tiles, group, head_dim, bf16, cache, limit)
        assert shared_bytes(found, head_dim, bf16, cache) <= limit
        assert group <= found.rows
        if capability == 90:
            assert found == tiles
    # In exact mode rows and keys are of the model alone; how many are on their way changes no bit.
    found = fitted(exact, group, head_dim, bf16, cache, limit, keeps_rows=True)
    assert shared_bytes(found, head_dim, bf16, cache) <= limit
    assert (found.rows, found.keys, found.warps) == (exact.rows, exact.keys, exact.warps)


def test_longer_chunks_take_larger_tiles() -> None:
    assert [prefill_tiles(4, 128, torch.bfloat16, length).rows for length in (4, 16, 17)] == [16, 64, 128]


@pytest.mark.parametrize("group", [1, 4, 7, 64])
def test_exact_tiles_are_rows_of_one_warp_group(group: int) -> None:
    tiles = exact_tiles(group, 128, torch.bfloat16)
    assert (tiles.rows, tiles.warps) == (64, 4)


@pytest.mark.parametrize("group", [1, 4, 7])
def test_a_query_head_more_or_less_makes_no_other_tile_of_keys(group: int) -> None:
    assert decode_tiles(group, 128, torch.bfloat16, torch.bfloat16).keys == 64
    assert decode_tiles(group, 128, torch.bfloat16, torch.float8_e4m3fn).keys == 128
