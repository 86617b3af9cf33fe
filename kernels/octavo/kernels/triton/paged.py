"""Computes paged attention (paper §4.1) in two kernels.

A piece of the work is a tile of queries, one KV head and a stretch of the keys; a program of `attend_kernel` does one,
or one after the other from a list; `combine_kernel` puts the stretches together. The rows of a tile are query tokens x
the query heads that share the KV head, so that keys are read once for all of them. A tile of keys has as many keys as
suit the machine, from any number of blocks.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.pieces import first_visible, pieces_of, queries_of
from octavo.kernels.triton.softmax import attend_tiles, finite, normalized

# What differs from step to step must not make Triton compile anew.
_VARYING = ["window", "num_splits", "first_tile", "first_sequence", "last_sequence", "split_rows"]
_UNALIGNED = ["block_tables", "table_rows", "context_lens", "query_starts", "sinks", "alibi_slopes"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def attend_kernel(
    output, split_sums, split_scores, pieces, counts, query, key_cache, value_cache, block_tables, table_rows,
    context_lens, query_starts, sinks, alibi_slopes,
    scale, softcap, value_scale, window,
    num_kv_heads, num_splits, first_tile, first_sequence, last_sequence, split_rows,
    query_token_stride, query_head_stride, output_token_stride, output_head_stride,
    block_stride, slot_stride, head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr,
    DECODE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Computes the attention of tiles of queries over splits of the keys.

    Grid: (tiles of queries x KV heads, splits), or with a list of `pieces` (`octavo.kernels.triton.work_list.WorkList`)
    any number of programs, which share it. `output` gets the attention of tiles whose keys are one piece; of others
    `split_sums` ([tiles x KV heads x splits, split_rows, HEAD_DIM] fp32) and `split_scores` ([tiles x KV heads x
    splits, 2, split_rows] fp32: total, largest) get what `combine_kernel` needs. With `split_sums` None there is one
    split.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    if pieces is None:
        # The last queries of a chunk see most keys: they begin first.
        pair = tl.num_programs(0) - 1 - tl.program_id(0)
        tile, kv_head, split = pair // num_kv_heads, pair % num_kv_heads, tl.program_id(1)
        sequence, first_row, first_position, tokens = queries_of(
            first_tile + tile, query_starts, context_lens, first_sequence, last_sequence, tile >= 0, DECODE, TILE_TOKENS
        )
        if tokens <= 0:
            return
        if split_sums is not None:
            _, _, _, _, first, count = pieces_of(
                first_position, tokens, window, num_splits, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS
            )
            split += first
            if split >= first + count:
                return
        _attend_piece(
            output, split_sums, split_scores, query, key_cache, value_cache, block_tables, table_rows, sinks,
            alibi_slopes, tile, kv_head, split, sequence, first_row, first_position, tokens,
            scale, softcap, value_scale, window, num_kv_heads, num_splits, split_rows,
            query_token_stride, query_head_stride, output_token_stride, output_head_stride,
            block_stride, slot_stride, head_stride, table_stride,
            GROUP, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_ROWS, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS,
            DECODE, WINDOWED, CAPPED, MASK_ALL,
        )  # fmt: skip
    else:
        total = tl.load(counts) * num_kv_heads
        number = tl.atomic_add(counts + 1, 1, sem="relaxed")
        while number < total:
            piece = tl.load(pieces + number // num_kv_heads)
            tile, kv_head, split = piece // num_splits, number % num_kv_heads, piece % num_splits
            sequence, first_row, first_position, tokens = queries_of(
                first_tile + tile, query_starts, context_lens, first_sequence, last_sequence, tile >= 0,
                DECODE, TILE_TOKENS,
            )  # fmt: skip
            _attend_piece(
                output, split_sums, split_scores, query, key_cache, value_cache, block_tables, table_rows, sinks,
                alibi_slopes, tile, kv_head, split, sequence, first_row, first_position, tokens,
                scale, softcap, value_scale, window, num_kv_heads, num_splits, split_rows,
                query_token_stride, query_head_stride, output_token_stride, output_head_stride,
                block_stride, slot_stride, head_stride, table_stride,
                GROUP, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_ROWS, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS,
                DECODE, WINDOWED, CAPPED, MASK_ALL,
            )  # fmt: skip
            number = tl.atomic_add(counts + 1, 1, sem="relaxed")


@triton.jit
def _attend_piece(
    output, split_sums, split_scores, query, key_cache, value_cache, block_tables, table_rows, sinks,
    alibi_slopes, tile, kv_head, split, sequence, first_row, first_position, tokens,
    scale, softcap, value_scale, window, num_kv_heads, num_splits, split_rows,
    query_token_stride, query_head_stride, output_token_stride, output_head_stride,
    block_stride, slot_stride, head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr,
    DECODE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Computes the attention of the tile of `tokens` queries in `kv_head` over the keys of `split`."""
    # -- keys --
    begin, end, origin, share, _, count = pieces_of(
        first_position, tokens, window, num_splits, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS
    )
    first_seen = 0
    if WINDOWED:
        first_seen = first_visible(first_position, window)
    last_seen = end - 1
    if split_sums is not None:
        begin, end = tl.maximum(begin, origin + split * share), tl.minimum(end, origin + (split + 1) * share)
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
    weighted, total, largest = _sums(
        queries, positions, slopes, begin, end, first_position, first_seen, last_seen,
        key_head, value_head, block_table, block_stride, slot_stride, window, scale, softcap,
        BLOCK_SIZE, HEAD_DIM, TILE_KEYS, WINDOWED, CAPPED, MASK_ALL, DECODE,
    )  # fmt: skip
    offsets = (tokens_at * output_token_stride + heads * output_head_stride)[:, None] + dims[None, :]
    # Whether there are splits at all is known when the kernel is compiled.
    if split_sums is None:  # noqa: SIM114
        _put(output + offsets, weighted, total, largest, sinks, heads, value_scale, present, elements)
    elif count == 1:
        _put(output + offsets, weighted, total, largest, sinks, heads, value_scale, present, elements)
    else:
        place = (tile * num_kv_heads + kv_head).to(tl.int64) * num_splits + split
        scores_at = split_scores + place * 2 * split_rows + rows
        tl.store(scores_at, total, mask=present)
        tl.store(scores_at + split_rows, largest, mask=present)
        sums_at = (place * split_rows + rows)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(split_sums + sums_at, weighted, mask=elements)


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
def _put(places, weighted, total, largest, sinks, heads, value_scale, present, elements):
    """Stores the attention of a tile whose keys were all summed up."""
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=present, other=0.0)
    attended = normalized(weighted, total, largest, sink, value_scale)
    tl.store(places, attended.to(places.dtype.element_ty), mask=elements)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def combine_kernel(
    output, split_sums, split_scores, counts, context_lens, query_starts, sinks, value_scale, window,
    num_kv_heads, num_splits, first_tile, first_sequence, last_sequence, split_rows,
    output_token_stride, output_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr,
    DECODE: tl.constexpr, TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combines the splits of each row whose keys are in several, and sets `counts` back for the next layer.

    Grid: (tiles of queries x KV heads, rows of a tile). `TILE_SPLITS` splits are summed at a time, in an order that
    does not depend on how many there may be: splits without a key add nothing, and the sum over one split, which is
    not computed here, would be that split.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    pair, row = tl.program_id(0), tl.program_id(1)
    tile, kv_head = first_tile + pair // num_kv_heads, pair % num_kv_heads
    if counts is not None:
        tl.store(counts + 1, 0, mask=(pair == 0) & (row == 0))
    _, first_row, first_position, tokens = queries_of(
        tile, query_starts, context_lens, first_sequence, last_sequence, tile >= 0, DECODE, TILE_TOKENS
    )
    if row // GROUP >= tokens:
        return
    _, _, _, _, first, count = pieces_of(first_position, tokens, window, num_splits, TILE_KEYS, SPLIT_KEYS, LEAST_KEYS)
    if count == 1:
        return
    dims = tl.arange(0, PADDED_DIM)
    total = tl.zeros([1], dtype=tl.float32)
    largest = tl.full([1], float("-inf"), dtype=tl.float32)
    weighted = tl.zeros([1, PADDED_DIM], dtype=tl.float32)
    for start in range(first // TILE_SPLITS * TILE_SPLITS, first + count, TILE_SPLITS):
        splits = start + tl.arange(0, TILE_SPLITS)
        present = (splits >= first) & (splits < first + count)
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
