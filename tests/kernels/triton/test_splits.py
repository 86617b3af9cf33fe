"""How attention is cut up: decisions in plain code."""

import pytest
import torch

from octavo.kernels.triton.devices import shared_limit
from octavo.kernels.triton.tiles import (
    MAX_GROUP,
    decode_tiles,
    exact_tiles,
    fitted,
    listed_programs,
    num_decode_splits,
    num_splits,
    prefill_tiles,
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


def test_a_decode_is_split_as_if_it_were_alone() -> None:
    """With 8 KV heads, until two pieces are there for each multiprocessor."""
    assert [num_decode_splits(8, keys, H200) for keys in (0, 1023, 1024, 8192, 40960, 131072)] == [1, 1, 2, 16, 33, 33]
    assert num_decode_splits(1, 131072, H200) == 128


def test_a_list_is_shared_by_no_more_programs_than_a_gpu_has_use_for() -> None:
    assert [listed_programs(pieces, H200) for pieces in (0, 1, 100, 131072)] == [1, 1, 100, 4 * H200]


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
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
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
        if capability in (90, 100):
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
