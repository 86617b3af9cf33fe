"""A model over the blocks of its cache, which every rank of a replica computes, with the paging it uses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.backend import AttentionBackend, GroupBatch
from octavo.wire.steps import BlockMoves, KVGroup
from octavo.worker.models.decoder import Decoder, PagedStep
from octavo.worker.step.batch import Batch
from octavo.worker.step.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Paging:
    """Describes the paged keys and values: their KV groups and block size, the device, and the attention backend."""

    attention: AttentionBackend
    groups: Sequence[KVGroup]
    block_size: int
    max_model_len: int
    device: torch.device


class PagedModel:
    """Computes `model` over the keys and values of `cache`."""

    def __init__(self, model: Decoder, cache: KVCache, paging: Paging) -> None:
        self._model = model
        self._cache = cache
        self._paging = paging

    @property
    def device(self) -> torch.device:
        return self._paging.device

    @property
    def num_groups(self) -> int:
        """Returns the number of KV groups."""
        return len(self._paging.groups)

    def move(self, moves: BlockMoves) -> None:
        """Carries out block moves. Raises `ValueError` on moves that name no block."""
        self._cache.move(moves)

    def step(self, batch: Batch) -> PagedStep:
        """Builds the model's input from `batch`. Raises `ValueError` on tables that do not fit the batch's lengths."""
        return PagedStep(
            input_ids=batch.input_ids,
            positions=batch.positions,
            rows=torch.tensor(batch.logit_rows.rows, dtype=torch.int64, device=self.device),
            attention=self._paging.attention,
            groups=[self._paging.attention.step(group) for group in self._group_batches(batch)],
            caches=self._cache.layers,
        )

    def _group_batches(self, batch: Batch) -> list[GroupBatch]:
        """Returns `batch` as the layers of each KV group see it."""
        return [
            GroupBatch(slot_mapping, block_tables, batch.context_lens, batch.query_lens, group.window)
            for group, slot_mapping, block_tables in zip(
                self._paging.groups, batch.slot_mappings, batch.block_tables, strict=True
            )
        ]

    def forward(self, batch: Batch, step: PagedStep) -> Tensor:
        """Computes the last hidden states, [rows, hidden_size], of the wanted rows of `batch`; `step` was built from
        it."""
        if not self._paging.attention.masks_unwritten:
            self._cache.clear(batch.fresh_blocks)
        return self._model.forward(step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, vocab_size] float, of some of the hidden states; other ranks than the first get
        nothing.

        The next call may write to the same memory.
        """
        return self._model.logits(hidden)
