"""Computes paged attention (paper §4.1) in two kernels.

A program of `attend_kernel` takes a tile of queries, one KV head and a stretch of the keys; `combine_kernel` puts the
stretches together. The rows of a tile are query tokens x the query heads that share the KV head, so that keys are read
once for all of them. A tile of keys has as many keys as suit the machine, from any number of blocks.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.softmax import attend_tiles, finite, normalized


@triton.jit
def queries_of(
    tile, query_starts, context_lens, first_sequence, last_sequence,
    DECODE: tl.constexpr, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Returns the part of the query that `tile` takes: its sequence, the row and the position of its first query, and
    how many tokens; with none or fewer there is no such tile.

    A sequence from `first_sequence` up to `last_sequence` has whole tiles of its own. Where sequence s begins at query
    row r, its tiles begin at r // TILE_TOKENS + s at the earliest, so many that no sequence overlaps the next and that
    the host knows a bound of all without looking. To `DECODE`, every sequence is one tile of one token.
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
    """Returns the first key that a query at `position` sees; `window` 0: all."""
    return tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)


@triton.jit
def splits_of(begin, end, num_splits, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    """Returns how the keys from `begin` (a border of tiles) up to `end` are split: the beginning of split 0, and the
    number of keys in each split.

    Splits of `SPLIT_KEYS` keys have fixed places that are the same for every sequence, the first perhaps without a key.
    With `SPLIT_KEYS` 0 there are `num_splits` equal splits of whole tiles, the last perhaps without a key.
    """
    if SPLIT_KEYS:
        return 0, SPLIT_KEYS
    share = tl.cdiv(tl.cdiv(end - begin, TILE_KEYS), num_splits) * TILE_KEYS
    return begin, tl.maximum(share, TILE_KEYS)


# What differs from step to step must not make Triton compile anew.
_VARYING = ["window", "num_splits", "first_tile", "first_sequence", "last_sequence", "split_rows"]
_UNALIGNED = ["block_tables", "table_rows", "context_lens", "query_starts", "sinks", "alibi_slopes"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def attend_kernel(
    output, split_sums, split_scores, query, key_cache, value_cache, block_tables, table_rows, context_lens,
    query_starts, sinks, alibi_slopes,
    scale, softcap, value_scale, window,
    num_kv_heads, num_splits, first_tile, first_sequence, last_sequence, split_rows,
    query_token_stride, query_head_stride, output_token_stride, output_head_stride,
    block_stride, slot_stride, head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    DECODE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Computes the attention of tiles of queries over splits of the keys.

    Grid: (tiles of queries x KV heads, programs that share the splits of keys). With `split_sums` None there is one
    split, and `output` gets its attention; else `split_sums` ([tiles x KV heads x splits, split_rows, HEAD_DIM] fp32)
    and `split_scores` ([tiles x KV heads x splits, 2, split_rows] fp32: total, largest) get what `combine_kernel`
    needs. There are as many programs as splits, but of `SPLIT_KEYS` each there may be fewer.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    # The last queries of a chunk see most keys: they begin first.
    pair = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, kv_head = first_tile + pair // num_kv_heads, pair % num_kv_heads
    sequence, first_row, first_position, tokens = queries_of(
        tile, query_starts, context_lens, first_sequence, last_sequence, DECODE, TILE_TOKENS
    )
    if tokens <= 0:
        return
    # -- keys --
    end = first_position + tokens
    first_seen = 0
    if WINDOWED:
        first_seen = first_visible(first_position, window)
    begin = first_seen // TILE_KEYS * TILE_KEYS
    last_seen = end - 1
    # Which splits with a key are this program's: every so manieth from the first on.
    split, beyond = tl.program_id(1), tl.num_programs(1)
    origin, share = begin, end - begin
    if split_sums is not None:
        origin, share = splits_of(begin, end, num_splits, TILE_KEYS, SPLIT_KEYS)
        split, beyond = (begin - origin) // share + split, tl.cdiv(end - origin, share)
        if split >= beyond:
            return
    key_head = key_cache + kv_head.to(tl.int64) * head_stride
    value_head = value_cache + kv_head.to(tl.int64) * head_stride
    block_table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride

    # -- queries --
    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + rows % GROUP
    present = rows // GROUP < tokens
    positions = tl.where(present, first_position + rows // GROUP, -1)
    tokens_at = (first_row + rows // GROUP).to(tl.int64)
    elements = present[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (tokens_at * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    queries = tl.load(query + offsets, mask=elements, other=0.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=present, other=0.0)

    # -- sums and output --
    if split_sums is None:
        weighted, total, largest = _sums(
            queries, positions, slopes, begin, end, first_position, first_seen, last_seen,
            key_head, value_head, block_table, block_stride, slot_stride, window, scale, softcap,
            BLOCK_SIZE, HEAD_DIM, TILE_KEYS, WINDOWED, CAPPED, MASK_ALL, DECODE,
        )  # fmt: skip
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=present, other=0.0)
        attended = normalized(weighted, total, largest, sink, value_scale)
        offsets = (tokens_at * output_token_stride + heads * output_head_stride)[:, None] + dims[None, :]
        tl.store(output + offsets, attended.to(output.dtype.element_ty), mask=elements)
    elif SPLIT_KEYS:
        for number in range(split, beyond, tl.num_programs(1)):
            split_begin, split_end = tl.maximum(begin, number * share), tl.minimum(end, (number + 1) * share)
            weighted, total, largest = _sums(
                queries, positions, slopes, split_begin, split_end, first_position, first_seen, last_seen,
                key_head, value_head, block_table, block_stride, slot_stride, window, scale, softcap,
                BLOCK_SIZE, HEAD_DIM, TILE_KEYS, WINDOWED, CAPPED, MASK_ALL, DECODE,
            )  # fmt: skip
            _keep(
                split_sums, split_scores, weighted, total, largest, pair.to(tl.int64) * num_splits + number,
                split_rows, rows, dims, present, elements, HEAD_DIM,
            )  # fmt: skip
    else:
        # One program for each split: there is nothing to loop over.
        weighted, total, largest = _sums(
            queries, positions, slopes, origin + split * share, tl.minimum(end, origin + (split + 1) * share),
            first_position, first_seen, last_seen,
            key_head, value_head, block_table, block_stride, slot_stride, window, scale, softcap,
            BLOCK_SIZE, HEAD_DIM, TILE_KEYS, WINDOWED, CAPPED, MASK_ALL, DECODE,
        )  # fmt: skip
        _keep(
            split_sums, split_scores, weighted, total, largest, pair.to(tl.int64) * num_splits + split,
            split_rows, rows, dims, present, elements, HEAD_DIM,
        )  # fmt: skip


@triton.jit
def _sums(
    queries, positions, slopes, begin, end, first_position, first_seen, last_seen,
    key_head, value_head, block_table, block_stride, slot_stride, window, scale, softcap,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASK_ALL: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Returns the sums over the keys from `begin` (a border of tiles) up to `end`, as `attend_tiles` gives them."""
    weighted = tl.zeros([queries.shape[0], queries.shape[1]], dtype=tl.float32)
    total = tl.zeros([queries.shape[0]], dtype=tl.float32)
    largest = tl.full([queries.shape[0]], float("-inf"), dtype=tl.float32)
    middle = begin
    if not MASK_ALL:
        # Tiles before the first query's position need no mask.
        middle = tl.maximum(begin, tl.minimum(end, first_position + 1) // TILE_KEYS * TILE_KEYS)
        weighted, total, largest = attend_tiles(
            weighted, total, largest, queries, positions, slopes, begin, middle, first_seen, last_seen,
            key_head, value_head, block_table, block_stride, slot_stride, window, scale, softcap,
            BLOCK_SIZE, HEAD_DIM, TILE_KEYS, WINDOWED, CAPPED, False, DECODE,
        )  # fmt: skip
    weighted, total, largest = attend_tiles(
        weighted, total, largest, queries, positions, slopes, middle, end, first_seen, last_seen,
        key_head, value_head, block_table, block_stride, slot_stride, window, scale, softcap,
        BLOCK_SIZE, HEAD_DIM, TILE_KEYS, WINDOWED, CAPPED, True, DECODE,
    )  # fmt: skip
    return weighted, total, largest


@triton.jit
def _keep(
    split_sums, split_scores, weighted, total, largest, place, split_rows, rows, dims, present, elements,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Stores the sums of the split at `place` for `combine_kernel`."""
    scores_at = split_scores + place * 2 * split_rows + rows
    tl.store(scores_at, total, mask=present)
    tl.store(scores_at + split_rows, largest, mask=present)
    sums_at = (place * split_rows + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(split_sums + sums_at, weighted, mask=elements)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def combine_kernel(
    output, split_sums, split_scores, context_lens, query_starts, sinks, value_scale, window,
    num_kv_heads, num_splits, first_tile, first_sequence, last_sequence, split_rows,
    output_token_stride, output_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, DECODE: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combines the splits of each row.

    Grid: (tiles of queries x KV heads, rows of a tile). `TILE_SPLITS` splits are summed at a time, in an order that
    does not depend on how many there may be: splits without a key add nothing, and the sum over one split is that
    split.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    pair, row = tl.program_id(0), tl.program_id(1)
    tile, kv_head = first_tile + pair // num_kv_heads, pair % num_kv_heads
    _, first_row, first_position, tokens = queries_of(
        tile, query_starts, context_lens, first_sequence, last_sequence, DECODE, TILE_TOKENS
    )
    if row // GROUP >= tokens:
        return
    end = first_position + tokens
    begin = first_visible(first_position, window) // TILE_KEYS * TILE_KEYS
    origin, share = splits_of(begin, end, num_splits, TILE_KEYS, SPLIT_KEYS)
    dims = tl.arange(0, PADDED_DIM)
    total = tl.zeros([1], dtype=tl.float32)
    largest = tl.full([1], float("-inf"), dtype=tl.float32)
    weighted = tl.zeros([1, PADDED_DIM], dtype=tl.float32)
    filled = (begin - origin) // share, tl.cdiv(end - origin, share)
    for start in range(filled[0] // TILE_SPLITS * TILE_SPLITS, filled[1], TILE_SPLITS):
        splits = start + tl.arange(0, TILE_SPLITS)
        present = (splits >= filled[0]) & (splits < filled[1])
        programs = pair.to(tl.int64) * num_splits + splits
        scores_at = split_scores + programs * 2 * split_rows + row
        totals = tl.load(scores_at, mask=present, other=0.0)
        maxima = tl.load(scores_at + split_rows, mask=present, other=float("-inf"))
        sums_at = split_sums + (programs * split_rows + row)[:, None] * HEAD_DIM + dims[None, :]
        sums = tl.load(sums_at, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        larger = tl.maximum(largest, tl.max(maxima, axis=0))
        shift = finite(larger)
        weights, rescale = tl.exp2(maxima - shift), tl.exp2(largest - shift)
        total = total * rescale + tl.sum(totals * weights, axis=0)
        weighted = weighted * rescale[:, None] + tl.sum(sums * weights[:, None], axis=0)[None, :]
        largest = larger
    head = kv_head * GROUP + row % GROUP
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head + tl.zeros([1], dtype=tl.int32))
    attended = normalized(weighted, total, largest, sink, value_scale)
    target = output + (first_row + row // GROUP).to(tl.int64) * output_token_stride + head * output_head_stride
    tl.store(target + dims[None, :], attended.to(output.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])
