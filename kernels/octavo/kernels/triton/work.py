"""Which queries and which keys a program of paged attention takes: integers only, the same for every layer."""

import triton
import triton.language as tl


@triton.jit
def queries_of(
    tile, query_starts, context_lens, first_sequence, last_sequence,
    DECODE: tl.constexpr, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """What the tile of queries takes: its sequence, the row of its first query, that one's position, and how many
    tokens (none or fewer: there is no such tile).

    A sequence from `first_sequence` up to `last_sequence` has whole tiles of its own. Where sequence s begins at query
    row r, its tiles begin at r // TILE_TOKENS + s at the earliest, so many that no sequence overlaps the next and
    that the host knows a bound of all without looking. To `DECODE`, every sequence is one tile of one token.
    """
    if DECODE:
        sequence, row, tokens = tile, tile, 1
        position = tl.load(context_lens + sequence) - 1
    else:
        origin = tl.load(query_starts + first_sequence)
        sequence, beyond = first_sequence, last_sequence
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            begins = (tl.load(query_starts + middle) - origin) // TILE_TOKENS + middle - first_sequence <= tile
            sequence, beyond = tl.where(begins, middle, sequence), tl.where(begins, beyond, middle)
        start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
        skipped = (tile - (start - origin) // TILE_TOKENS - (sequence - first_sequence)) * TILE_TOKENS
        row = start + skipped
        tokens = tl.minimum(TILE_TOKENS, end - row)
        position = tl.load(context_lens + sequence) - end + row
    return sequence, row, position, tokens


@triton.jit
def first_visible(position, window):
    """The first key that a query at `position` sees; `window` 0: all."""
    return tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)


@triton.jit
def splits_of(begin, end, num_splits, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    """How the keys from `begin` (a border of tiles) up to `end` are split: where split 0 begins, and the keys of each.

    Splits of `SPLIT_KEYS` lie where they lie for every sequence, the first perhaps without a key; 0: `num_splits` equal
    ones of whole tiles, the last perhaps without a key.
    """
    if SPLIT_KEYS:
        return 0, SPLIT_KEYS
    share = tl.cdiv(tl.cdiv(end - begin, TILE_KEYS), num_splits) * TILE_KEYS
    return begin, tl.maximum(share, TILE_KEYS)
