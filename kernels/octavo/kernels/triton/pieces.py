"""Tells which queries, and which of their keys, are one piece of attention: the same in every kernel that asks."""

import triton
import triton.language as tl


@triton.jit
def queries_of(
    tile, query_starts, context_lens, first_sequence, last_sequence, exists,
    DECODE: tl.constexpr, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Returns the part of the query that `tile` takes: its sequence, the row and the position of its first query, and
    how many tokens; with none or fewer there is no such tile. `tile` is one, or a tensor of some; of those that do not
    `exists` nothing is right.

    A sequence from `first_sequence` up to `last_sequence` has whole tiles of its own. Where sequence s begins at query
    row r, its tiles begin at r // TILE_TOKENS + s at the earliest, so many that no sequence overlaps the next and that
    the host knows a bound of all without looking. To `DECODE`, every sequence is one tile of one token.
    """
    if DECODE:
        sequence, row, tokens = tile, tile, tile * 0 + 1
        position = tl.load(context_lens + sequence, mask=exists, other=0) - 1
    else:
        origin = tl.load(query_starts + first_sequence)
        sequence, beyond = first_sequence + tile * 0, last_sequence + tile * 0
        # What is between them, at most: many tiles are searched for together.
        span = last_sequence - first_sequence
        while span > 1:
            middle = (sequence + beyond) // 2
            begins = (tl.load(query_starts + middle) - origin) // TILE_TOKENS + middle - first_sequence <= tile
            sequence, beyond = tl.where(begins, middle, sequence), tl.where(begins, beyond, middle)
            span = (span + 1) // 2
        start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
        skipped = (tile - (start - origin) // TILE_TOKENS - (sequence - first_sequence)) * TILE_TOKENS
        row = start + skipped
        tokens = tl.minimum(TILE_TOKENS, end - row)
        position = tl.load(context_lens + sequence) - end + row
    return sequence, row, position, tokens


@triton.jit
def first_visible(position, window):
    """Returns the first key that a query at `position` sees; `window` 0: all."""
    return tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)


@triton.jit
def pieces_of(
    first_position, tokens, window, num_splits,
    TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr,
):  # fmt: skip
    """Returns the keys of `tokens` queries from `first_position` on, and how they are split: the first (a border of
    tiles), the one after the last; the beginning of split 0, the number of keys in each split; the first split with a
    key, and the number of splits from there on, 1 if there is no key.

    Splits of `SPLIT_KEYS` keys have fixed places that are the same for every sequence. With `SPLIT_KEYS` 0 there are
    equal splits of whole tiles, the last perhaps smaller: `num_splits` of them, or with `LEAST_KEYS` fewer, so that
    each has so many keys: as many as the sequence would have alone, whatever stands beside it.
    """
    end = first_position + tokens
    begin = first_visible(first_position, window) // TILE_KEYS * TILE_KEYS
    if SPLIT_KEYS:
        origin, share = begin * 0, begin * 0 + SPLIT_KEYS
    else:
        if LEAST_KEYS:
            num_splits = tl.maximum(1, tl.minimum(num_splits, (end - begin) // LEAST_KEYS))
        origin = begin
        share = tl.maximum(tl.cdiv(tl.cdiv(end - begin, TILE_KEYS), num_splits), 1) * TILE_KEYS
    first = (begin - origin) // share
    return begin, end, origin, share, first, tl.maximum(tl.cdiv(end - origin, share) - first, 1)
