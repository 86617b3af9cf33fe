"""Chooses tile sizes, warps and key splits of paged attention by arithmetic, for an H200."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

# Most query heads that may share a KV head: they are rows of one tile.
MAX_GROUP = 128
# Keys of a split in exact mode: where splits lie must not depend on the batch. A multiple of every tile's keys.
EXACT_SPLIT_KEYS = 2048
# The least keys of a split in decode: its sums, which go to the L2 cache and back, are then 1 % of what it reads.
DECODE_SPLIT_KEYS = 512

# A tile of keys in decode: two programs per multiprocessor then have 128 KiB under way, thrice what its share of the
# bandwidth (33 KB/us) and a latency of about 1 us ask for, and 4 warps have 16 bytes to load, 8 times over.
_DECODE_TILE_BYTES = 16 << 10
# Tensor cores multiply 16 rows at least, Hopper's wgmma 64.
_LEAST_ROWS = 16
_WGMMA_ROWS = 64
_MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """Describes a program's tile: `rows` of queries (tokens x heads of a group) and `keys` that it multiplies at a
    time; `stages` tiles of keys are loaded or multiplied at once."""

    rows: int
    keys: int
    warps: int
    stages: int


@lru_cache
def decode_tiles(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tiles:
    """Returns the tiles for one query token per sequence, computed in `dtype`: memory's speed decides."""
    if dtype == torch.float32:
        return _fp32_tiles(group)
    keys = min(_DECODE_TILE_BYTES // (padded(head_dim) * cache_dtype.itemsize), 128)
    rows = _rows(group)
    return Tiles(rows, keys, 8 if rows > _WGMMA_ROWS else 4, stages=3)


@lru_cache
def prefill_tiles(group: int, head_dim: int, dtype: torch.dtype, max_query_len: int) -> Tiles:
    """Returns the tiles of chunks of at most `max_query_len` tokens, computed in `dtype`."""
    if dtype == torch.float32:
        return _fp32_tiles(group)
    wanted = group * max_query_len
    if wanted <= _LEAST_ROWS:
        return _tensor_core_tiles(_rows(group), head_dim)
    rows = _WGMMA_ROWS if wanted <= _WGMMA_ROWS and group <= _WGMMA_ROWS else _MOST_ROWS
    return _tensor_core_tiles(rows, head_dim)


@lru_cache
def exact_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Returns the tiles for any query in exact mode: what a token's sums are made of must depend on its model alone."""
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
    """Returns the nearest to `tiles` that `shared` bytes have room for: fewer stages, which change no bit, and then
    fewer rows, unless they are to be kept. If there is none, it returns the least."""
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
    """Returns the bytes of queries, of the keys and values that are on their way, and of the widened copies of those in
    fp8."""
    width = padded(head_dim)
    loaded = tiles.stages * 2 * tiles.keys * width * cache_dtype.itemsize
    widened = tiles.keys * width * dtype.itemsize if cache_dtype != dtype else 0
    return tiles.rows * width * dtype.itemsize + loaded + widened


def _tensor_core_tiles(rows: int, head_dim: int) -> Tiles:
    """Takes as many keys as leave registers for the sums, and as many warps as have these registers."""
    return Tiles(rows, 32 if padded(head_dim) > 128 else 64, 8 if rows > _WGMMA_ROWS else 4, stages=3)


def _fp32_tiles(group: int) -> Tiles:
    """Returns the tiles of true fp32, which no tensor core multiplies; larger tiles would spill registers."""
    rows = _rows(group)
    return Tiles(rows, keys=16, warps=4 if rows == _LEAST_ROWS else 8, stages=2)


def padded(head_dim: int) -> int:
    """Returns the width of a tile: tensor cores and Triton want a power of two."""
    return max(16, next_power_of_2(head_dim))


def _rows(group: int) -> int:
    return max(_LEAST_ROWS, next_power_of_2(group))


def next_power_of_2(number: int) -> int:
    """Returns the least power of two that is not below `number`. (Triton's own takes microseconds, for every layer of
    every step.)"""
    return 1 << (number - 1).bit_length()


# The keys of a sequence are split into stretches, so that a few sequences keep a whole GPU busy, and a long one does
# not hold up the others. The constants come from arithmetic and are to be replaced by measured ones.

# The share of multiprocessors that programs in one pass must occupy: alone on a multiprocessor, one has 64 KiB under
# way, twice what saturates memory, and a second kernel costs some 3 us.
_OCCUPIED = 0.75
# Programs of attention that a multiprocessor holds at once; those of a list of pieces may be more than that: who comes
# late finds nothing to do.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_LISTED_PROGRAMS_PER_MULTIPROCESSOR = 4
# Keys for which another split of a chunk's is worth its part of the sums.
_LEAST_KEYS = 256
_MOST_SPLITS = 128


def num_splits(programs: int, max_keys: int, multiprocessors: int) -> int:
    """Splits for `programs` (tiles of queries x KV heads) that see up to `max_keys` keys each; 1: one pass.

    Never more programs in all than run at once, unless one pass has more.
    """
    if programs >= _OCCUPIED * multiprocessors:
        return 1
    return _most_splits(programs, max_keys, _LEAST_KEYS, multiprocessors)


def num_decode_splits(kv_heads: int, max_keys: int, multiprocessors: int) -> int:
    """Returns the splits of a decode that sees `max_keys` keys: as many as suit it when it is alone. What a sequence's
    sums are made of does not depend on what stands beside it."""
    return _most_splits(kv_heads, max_keys, DECODE_SPLIT_KEYS, multiprocessors)


def _most_splits(programs: int, max_keys: int, least_keys: int, multiprocessors: int) -> int:
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(1, programs)
    return max(1, min(wanted, max_keys // least_keys, _MOST_SPLITS))


def listed_programs(pieces: int, multiprocessors: int) -> int:
    """Returns the number of programs that share a list of up to `pieces` pieces of work in each KV head."""
    return max(1, min(pieces, _LISTED_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors))
