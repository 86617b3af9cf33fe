"""The frames that the first rank sends to the others: block moves, forward passes, logits, signs of life, the end."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.wire.base import Message
from octavo.wire.steps import BlockMoves
from octavo.worker.step.batch import Batch, LogitRows


class FrameError(Exception):
    """Raised for bytes that are no frame, or a frame whose parts do not fit each other."""


class Move(Message, frozen=True):
    """Blocks to move before anything else is computed."""

    moves: BlockMoves


class Compute(Message, frozen=True):
    """A forward pass, and the logits of its first `num_choosing` wanted rows.

    It is an `octavo.worker.step.batch.Batch` without its sequences, which only the first rank knows. Tensors are the
    bytes of their int64.
    """

    input_ids: bytes
    positions: bytes
    slot_mappings: list[bytes]
    fresh_blocks: bytes
    block_tables: list[bytes]
    context_lens: list[int]
    query_lens: list[int]
    rows: list[int]
    num_choosing: int


class Logits(Message, frozen=True):
    """Asks for the logits of the wanted rows `first` to `last` - 1 of the latest forward pass."""

    first: int
    last: int


class Beat(Message, frozen=True):
    """Says that the first rank lives, and asks whether the others do."""


class EndFrame(Message, frozen=True):
    """Says that there will be no more frames."""


Frame = Move | Compute | Logits | Beat | EndFrame

encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(Frame).decode


def decode(data: bytes) -> Frame:
    """Decodes a frame. Raises `FrameError`."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error


def compute_frame(batch: Batch) -> Compute:
    """Makes the frame that the other ranks need of `batch`."""
    return Compute(
        input_ids=_bytes(batch.input_ids),
        positions=_bytes(batch.positions),
        slot_mappings=[_bytes(slots) for slots in batch.slot_mappings],
        fresh_blocks=_bytes(batch.fresh_blocks),
        block_tables=[_bytes(table) for table in batch.block_tables],
        context_lens=batch.context_lens,
        query_lens=batch.query_lens,
        rows=batch.logit_rows.rows,
        num_choosing=batch.logit_rows.num_choosing,
    )


def batch_of(frame: Compute, num_groups: int, device: torch.device) -> Batch:
    """Makes the batch of a forward pass, without sequences that choose. Raises `FrameError` if its parts do not fit
    each other."""
    tokens, sequences = sum(frame.query_lens), len(frame.query_lens)
    if not tokens or min(frame.query_lens) < 1 or len(frame.context_lens) != sequences:
        raise FrameError(f"{tokens} tokens of {sequences} sequences with {len(frame.context_lens)} lengths")
    if not len(frame.slot_mappings) == len(frame.block_tables) == num_groups:
        raise FrameError(f"{len(frame.slot_mappings)} slot mappings and {len(frame.block_tables)} tables")
    if not all(0 <= row < tokens for row in frame.rows) or not 0 <= frame.num_choosing <= len(frame.rows):
        raise FrameError(f"{len(frame.rows)} rows, {frame.num_choosing} of them to choose from, of {tokens} tokens")
    return Batch(
        input_ids=_numbers(frame.input_ids, (tokens,)).to(device),
        positions=_numbers(frame.positions, (tokens,)).to(device),
        slot_mappings=[_numbers(slots, (tokens,)) for slots in frame.slot_mappings],
        fresh_blocks=_numbers(frame.fresh_blocks, (-1,)).to(device),
        logit_rows=LogitRows(frame.rows, frame.num_choosing, [], [], [], []),
        block_tables=[_numbers(table, (sequences, -1)) for table in frame.block_tables],
        context_lens=frame.context_lens,
        query_lens=frame.query_lens,
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _numbers(data: bytes, shape: Sequence[int]) -> Tensor:
    """Returns the int64 numbers of `data` in this shape, -1 in it for as many as there are."""
    try:
        return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.int64).reshape(shape))
    except ValueError as error:
        raise FrameError(f"{len(data)} bytes are no {list(shape)} numbers") from error
