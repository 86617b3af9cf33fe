"""A model over the blocks of its cache: the part of a step that every rank of a replica computes."""

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
    """Whose keys and values are where, and what computes attention over them."""

    attention: AttentionBackend
    groups: Sequence[KVGroup]
    block_size: int
    max_model_len: int
    device: torch.device


# A model over the blocks of its cache: the part of a step that every rank of a replica computes.


class PagedModel:
    """`model` with the keys and values of `cache`."""

    def __init__(self, model: Decoder, cache: KVCache, paging: Paging) -> None:
        self._model = model
        self._cache = cache
        self._paging = paging

    @property
    def device(self) -> torch.device:
        return self._paging.device

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return len(self._paging.groups)

    def move(self, moves: BlockMoves) -> None:
        """Raises `ValueError` on moves that name no block."""
        self._cache.move(moves)

    def step(self, batch: Batch) -> PagedStep:
        """What the model computes of it. Raises `ValueError` on tables that do not fit its lengths."""
        groups = (
            GroupBatch(slot_mapping, block_tables, batch.context_lens, batch.query_lens, group.window)
            for group, slot_mapping, block_tables in zip(
                self._paging.groups, batch.slot_mappings, batch.block_tables, strict=True
            )
        )
        return PagedStep(
            input_ids=batch.input_ids,
            positions=batch.positions,
            rows=torch.tensor(batch.logit_rows.rows, dtype=torch.int64, device=self.device),
            attention=self._paging.attention,
            groups=[self._paging.attention.step(group) for group in groups],
            caches=self._cache.layers,
        )

    def forward(self, batch: Batch, step: PagedStep) -> Tensor:
        """The last hidden states of the wanted rows of `batch`, of which `step` was made: [rows, hidden_size]."""
        if not self._paging.attention.masks_unwritten:
            self._cache.clear(batch.fresh_blocks)
        return self._model.forward(step)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size], float, of some of them; on other ranks than the first, nothing. The next call may write
        to the same memory."""
        return self._model.logits(hidden)
