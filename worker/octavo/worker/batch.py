"""Work items to tensors: all tokens of a step in one row, sequence after sequence, nothing padded but block tables."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker.sequences import WorkItem


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, flattened.

    On the device, int64: `input_ids`, `positions`, `slot_mapping` ([tokens]; slot = block id * block size + offset),
    `fresh_blocks` (blocks whose first slot this step writes) and `sample_rows` (the tokens whose logits are needed).
    On the CPU, by sequence: `block_tables` ([sequences, blocks] int64, rows padded with zeros), `context_lens` (tokens
    in the cache once this step has written its own) and `query_lens` (tokens of this step).
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    fresh_blocks: Tensor
    sample_rows: Tensor
    block_tables: Tensor
    context_lens: list[int]
    query_lens: list[int]


def build_batch(items: list[WorkItem], block_size: int, device: torch.device) -> Batch:
    """The batch of `items`, in their order. Every position of an item must have its block in the sequence's table."""
    query_lens = [item.num_tokens for item in items]
    lengths = np.array(query_lens, dtype=np.int64)
    ends = np.cumsum(lengths)
    starts = np.array([item.start for item in items], dtype=np.int64)
    owners = np.repeat(np.arange(len(items)), lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths) + np.repeat(starts, lengths)
    context_lens = [item.start + item.num_tokens for item in items]
    tables = _block_tables(items, -(-max(context_lens) // block_size))
    blocks, offsets = tables[owners, positions // block_size], positions % block_size
    samples = np.array([item.samples for item in items])
    return Batch(
        input_ids=_tensor(_token_ids(items), device),
        positions=_tensor(positions, device),
        slot_mapping=_tensor(blocks * block_size + offsets, device),
        fresh_blocks=_tensor(blocks[offsets == 0], device),
        sample_rows=_tensor(ends[samples] - 1, device),
        block_tables=torch.from_numpy(tables),
        context_lens=context_lens,
        query_lens=query_lens,
    )


def _token_ids(items: list[WorkItem]) -> npt.NDArray[np.int64]:
    return np.array(
        [token_id for item in items for token_id in item.sequence.token_ids[item.start : item.start + item.num_tokens]],
        dtype=np.int64,
    )


def _block_tables(items: list[WorkItem], width: int) -> npt.NDArray[np.int64]:
    tables = np.zeros((len(items), width), dtype=np.int64)
    for row, item in zip(tables, items, strict=True):
        block_ids = item.sequence.block_ids[:width]
        row[: len(block_ids)] = block_ids
    return tables


def _tensor(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
