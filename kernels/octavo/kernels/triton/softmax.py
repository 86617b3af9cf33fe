"""Computes softmax over keys that come tile by tile, in powers of two, with a running maximum (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023)."""

import triton
import triton.language as tl

from octavo.kernels.triton.language import dot

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(largest):
    """Returns a maximum to subtract: 0 where there is none yet, since -inf less -inf is no number."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def normalized(weighted, total, largest, sink, value_scale):
    """Returns the attention of what was summed up; zeros where nothing was. A `sink` is one more score, of a value of
    zero."""
    if sink is not None:
        sink = sink.to(tl.float32) * _LOG2_E
        shift = tl.maximum(largest, sink)
        weighted = weighted * tl.exp2(largest - shift)[:, None]
        total = total * tl.exp2(largest - shift) + tl.exp2(sink - shift)
    return tl.div_rn(weighted, tl.where(total == 0, 1.0, total)[:, None]) * value_scale


@triton.jit
def _capped(scores, softcap):
    """Returns softcap * tanh(scores / softcap)."""
    return softcap * (1 - 2 / (1 + tl.exp2(scores * (2 * _LOG2_E / softcap))))


@triton.jit
def _blocks_at(keys_at, block_table, first_seen, last_seen, BLOCK_SIZE: tl.constexpr):
    """Returns the blocks of keys that are seen, 0 for others."""
    readable = (keys_at >= first_seen) & (keys_at <= last_seen)
    return tl.load(block_table + keys_at // BLOCK_SIZE, mask=readable, other=0)


@triton.jit
def _widened(cached, dtype: tl.constexpr):
    """Returns values of a cache of `dtype` or fp8 as `dtype`."""
    if cached.dtype != dtype:
        # Straight to bf16, Hopper would convert number by number.
        cached = cached.to(tl.float32).to(dtype)
    return cached


@triton.jit
def attend_tiles(
    weighted, total, largest, queries, positions, slopes,
    begin, end, first_seen, last_seen, key_head, value_head, block_table, block_stride, slot_stride, window,
    scale, softcap,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `begin` (a border of tiles) up to `end` to the sums over the keys before, and returns the new
    sums.

    `weighted` [rows, dims], `total` and `largest` [rows]: values and ones weighted by powers of two of the scores less
    the `largest`. Queries at `positions` ([rows]) see the keys up to their own, `window` many; between them, those from
    `first_seen` to `last_seen`: no other slot of the cache is read. Not `MASKED`: all queries see all keys. `DECODE`:
    all queries are at one position.
    """
    dims = tl.arange(0, queries.shape[1])[None, :]
    blocks = _blocks_at(begin + tl.arange(0, TILE_KEYS), block_table, first_seen, last_seen, BLOCK_SIZE)
    for start in range(begin, end, TILE_KEYS):
        keys_at = start + tl.arange(0, TILE_KEYS)
        loaded = dims < HEAD_DIM
        if MASKED:
            loaded &= ((keys_at >= first_seen) & (keys_at <= last_seen))[:, None]
        slots = blocks.to(tl.int64) * block_stride + keys_at % BLOCK_SIZE * slot_stride
        blocks = _blocks_at(keys_at + TILE_KEYS, block_table, first_seen, last_seen, BLOCK_SIZE)
        # Zeros for what must not be read: a weight of zero times a stranger's NaN would be NaN.
        keys = _widened(tl.load(key_head + slots[:, None] + dims, mask=loaded, other=0.0), queries.dtype)
        values = _widened(tl.load(value_head + slots[:, None] + dims, mask=loaded, other=0.0), queries.dtype)
        zeros = tl.zeros([queries.shape[0], TILE_KEYS], dtype=tl.float32)
        scores = dot(queries, tl.trans(keys), zeros)
        if CAPPED:
            scores = _capped(scores * scale, softcap)
        if slopes is not None:
            distances = (keys_at[None, :] - positions[:, None]).to(tl.float32)
            scores = (scores if CAPPED else scores * scale) + slopes[:, None] * distances
        # Scores that are products as they come get their scale where the maximum is subtracted.
        unit = _LOG2_E if CAPPED or slopes is not None else scale * _LOG2_E
        if MASKED:
            seen = keys_at[None, :] <= positions[:, None]
            if WINDOWED:
                seen &= keys_at[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
            if not DECODE:
                # What some of the queries do not see yet may be infinite, and times a weight of zero no number.
                numbers = values.to(tl.float32)
                unsound = tl.max((numbers - numbers != 0).to(tl.int32), axis=1) > 0
                values = tl.where(unsound[:, None], 0.0, numbers).to(queries.dtype)
                is_spoiled = tl.max((seen & unsound[None, :]).to(tl.int32), axis=1) > 0
                weighted = tl.where(is_spoiled[:, None], float("nan"), weighted)
        larger = tl.maximum(largest, tl.max(scores, axis=1) * unit)
        shift = finite(larger)
        weights = tl.exp2(scores * unit - shift[:, None])
        rescale = tl.exp2(largest - shift)
        total = total * rescale + tl.sum(weights, axis=1)
        weighted = dot(weights.to(queries.dtype), values, weighted * rescale[:, None])
        largest = larger
    return weighted, total, largest
