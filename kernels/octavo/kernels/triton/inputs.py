"""Makes a step's inputs on the device, from what the device holds of its sequences and the little that the host
says."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant

_BLOCK = 128
# What differs from step to step must not make Triton compile anew: counts, and where arrays begin in larger ones.
_VARYING = ["num_tokens", "padded_tokens", "capacity", "slots_stride"]
_UNALIGNED = ["tokens", "positions", "rows", "input_ids", "positions_out", "slots", "rows_out", "context_lens"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _prepare(
    tokens,
    positions,
    rows,
    next_tokens,
    tables,
    input_ids,
    positions_out,
    slots,
    rows_out,
    context_lens,
    num_tokens,
    padded_tokens,
    num_groups,
    capacity,
    width,
    slots_stride,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, written = token < num_tokens, token < padded_tokens
    row = tl.load(rows + token, mask=real, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=real, other=0).to(tl.int64)
    known = tl.load(tokens + token, mask=real, other=0).to(tl.int64)
    pending = real & (known < 0)
    sampled = tl.load(next_tokens + row, mask=pending, other=0)
    tl.store(input_ids + token, tl.where(pending, sampled, known), mask=written)
    tl.store(positions_out + token, position, mask=written)
    for group in range(num_groups):
        entry = (row + group * capacity) * width + position // BLOCK_SIZE
        block = tl.load(tables + entry, mask=real, other=0).to(tl.int64)
        slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slots + group * slots_stride + token, slot, mask=written)
    if DECODE:
        tl.store(rows_out + token, row.to(tl.int32), mask=written)
        tl.store(context_lens + token, tl.where(real, position + 1, 0).to(tl.int32), mask=written)


def prepare(
    tokens: Tensor,
    positions: Tensor,
    rows: Tensor,
    next_tokens: Tensor,
    tables: Tensor,
    block_size: int,
    *,
    input_ids: Tensor,
    positions_out: Tensor,
    slots: Tensor,
    decode: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fills `input_ids` and `positions_out` ([padded tokens] int64) and `slots` ([groups, padded tokens] int64).

    `tokens`, `positions` and `rows` ([tokens] int32) are the step's: a negative token is taken from `next_tokens`
    ([capacity] int64) at its row, and a slot comes of the block in `tables` ([groups, capacity, width] int32) that the
    position falls into. Padding is token 0 at position 0 without a slot (-1). With `decode` ([padded tokens] int32
    each), the rows of the tokens' sequences and their context lengths, 0 for padding, are filled too.
    """
    padded = len(input_ids)
    rows_out, context_lens = decode or (rows, rows)
    groups, capacity, width = tables.shape
    _prepare[(triton.cdiv(padded, _BLOCK),)](
        tokens, positions, rows, next_tokens, tables, input_ids, positions_out, slots, rows_out, context_lens,
        len(tokens), padded, groups, capacity, width, slots.stride(0), block_size, decode is not None, _BLOCK,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Yields every configuration of `prepare`."""
    signature = {
        "tokens": "*i32",
        "positions": "*i32",
        "rows": "*i32",
        "next_tokens": "*i64",
        "tables": "*i32",
        "input_ids": "*i64",
        "positions_out": "*i64",
        "slots": "*i64",
        "rows_out": "*i32",
        "context_lens": "*i32",
        **dict.fromkeys(("num_tokens", "padded_tokens", "num_groups", "capacity", "width", "slots_stride"), "i32"),
    }
    for block_size, decode in ((1, True), (16, True), (16, False), (256, False)):
        constants = {"BLOCK_SIZE": block_size, "DECODE": decode, "BLOCK": _BLOCK}
        yield Variant(f"prepare of {block_size}{' to decode' * decode}", _prepare, signature, constants)
