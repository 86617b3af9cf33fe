"""How large the tiles of paged attention are, and how many warps work on one. Sizes that suit an H200, by arithmetic:
none of them has been measured yet."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

# Most query heads that may share a KV head: they are rows of one tile.
MAX_GROUP = 128
# Keys of a split in exact mode: where splits lie must not depend on the batch. A multiple of every tile's keys.
EXACT_SPLIT_KEYS = 2048

# A tile of keys in decode: two programs per multiprocessor then have 128 KiB under way, thrice what its share of the
# bandwidth (33 KB/us) and a latency of about 1 us ask for, and 4 warps have 16 bytes to load, 8 times over.
_DECODE_TILE_BYTES = 16 << 10
# Tensor cores multiply 16 rows at least, Hopper's wgmma 64.
_LEAST_ROWS = 16
_WGMMA_ROWS = 64
_MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """`rows` of queries (tokens x heads of a group) and `keys` that a program multiplies at a time; `stages`: tiles of
    keys being loaded or multiplied at once."""

    rows: int
    keys: int
    warps: int
    stages: int


@lru_cache
def decode_tiles(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tiles:
    """For one query token per sequence, computed in `dtype`: memory's speed decides."""
    if dtype == torch.float32:
        return _fp32_tiles(group)
    keys = min(_DECODE_TILE_BYTES // (padded(head_dim) * cache_dtype.itemsize), 128)
    rows = _rows(group)
    return Tiles(rows, keys, 8 if rows > _WGMMA_ROWS else 4, stages=3)


@lru_cache
def prefill_tiles(group: int, head_dim: int, dtype: torch.dtype, max_query_len: int) -> Tiles:
    """For chunks of at most `max_query_len` tokens, computed in `dtype`."""
    if dtype == torch.float32:
        return _fp32_tiles(group)
    wanted = group * max_query_len
    if wanted <= _LEAST_ROWS:
        return _tensor_core_tiles(_rows(group), head_dim)
    rows = _WGMMA_ROWS if wanted <= _WGMMA_ROWS and group <= _WGMMA_ROWS else _MOST_ROWS
    return _tensor_core_tiles(rows, head_dim)


@lru_cache
def exact_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """For any query: what a token's sums are made of must depend on its model alone."""
    if dtype == torch.float32:
        return _fp32_tiles(group)
    return _tensor_core_tiles(max(_rows(group), _WGMMA_ROWS), head_dim)


@lru_cache
def fitted(
    tiles: Tiles,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    shared: int,
    *,
    keeps_rows: bool = False,
) -> Tiles:
    """The nearest to `tiles` that `shared` bytes have room for: fewer stages, which change no bit, and then fewer rows,
    unless they are to be kept. If there is none, the least."""
    found = tiles
    for found in _smaller(tiles, 0 if keeps_rows else group):
        if shared_bytes(found, head_dim, dtype, cache_dtype) <= shared:
            break
    return found


def _smaller(tiles: Tiles, group: int) -> Iterator[Tiles]:
    yield tiles
    for stages in range(tiles.stages - 1, 1, -1):
        yield replace(tiles, stages=stages)
    rows = tiles.rows // 2
    while group and rows >= _rows(group):
        yield Tiles(rows, tiles.keys, 8 if rows > _WGMMA_ROWS else 4, min(2, tiles.stages))
        rows //= 2
    yield replace(tiles, stages=1)


def shared_bytes(tiles: Tiles, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    """Queries, the keys and values that are on their way, and of those in fp8 what is widened."""
    width = padded(head_dim)
    loaded = tiles.stages * 2 * tiles.keys * width * cache_dtype.itemsize
    widened = tiles.keys * width * dtype.itemsize if cache_dtype != dtype else 0
    return tiles.rows * width * dtype.itemsize + loaded + widened


def _tensor_core_tiles(rows: int, head_dim: int) -> Tiles:
    """As many keys as leave registers for the sums, and as many warps as have them."""
    return Tiles(rows, 32 if padded(head_dim) > 128 else 64, 8 if rows > _WGMMA_ROWS else 4, stages=3)


def _fp32_tiles(group: int) -> Tiles:
    """No tensor core multiplies true fp32; larger tiles spill registers."""
    rows = _rows(group)
    return Tiles(rows, keys=16, warps=4 if rows == _LEAST_ROWS else 8, stages=2)


def padded(head_dim: int) -> int:
    """The width of a tile: tensor cores and Triton want a power of two."""
    return max(16, next_power_of_2(head_dim))


def _rows(group: int) -> int:
    return max(_LEAST_ROWS, next_power_of_2(group))


def next_power_of_2(number: int) -> int:
    """The least one that is not below `number`. (Triton's own takes microseconds, for every layer of every step.)"""
    return 1 << (number - 1).bit_length()
