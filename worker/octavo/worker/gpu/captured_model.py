"""The decode steps of a model that several ranks share, as CUDA graphs: on all ranks or on none."""

import logging

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.triton.launch import TritonStep, check_batch
from octavo.worker.gpu.graphs import CapturePlace, Outputs, StepGraphs, graph_sizes
from octavo.worker.gpu.transfer import upload
from octavo.worker.models.decoder import Decoder, PagedStep
from octavo.worker.step.batch import Batch
from octavo.worker.step.forward import PagedModel, Paging
from octavo.worker.step.kv_cache import KVCache
from octavo.worker.tensor_parallel.group import ShardGroup

logger = logging.getLogger(__name__)


class CapturedModel(PagedModel):
    """Computes steps of one token each of up to `max_batch` sequences by graphs, and all others as they come.

    All ranks of `group` make one at the same time. They are given the same batches, and the lengths in a batch alone
    say whether a graph computes it and which one: so all replay, or none does, as NCCL demands. The sums of ranks are
    in the graphs, where torch's watchdog of NCCL does not see them; logits, which ranks gather, are computed after
    them, and if a rank is gone it is that gathering which takes too long.
    """

    def __init__(self, model: Decoder, cache: KVCache, paging: Paging, group: ShardGroup, max_batch: int) -> None:
        super().__init__(model, cache, paging)
        device = paging.device
        width = -(-paging.max_model_len // paging.block_size)
        num_groups = len(paging.groups)
        self._input_ids, self._positions = torch.zeros(2, max_batch, dtype=torch.int64, device=device)
        # A capture before the first step must write nowhere.
        self._slots = torch.full((num_groups, max_batch), -1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(num_groups, max_batch, width, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._every = torch.arange(max_batch + 1, device=device)
        self._starts = self._every.int()
        sizes, place = graph_sizes(max_batch), CapturePlace(device, is_watched=True)
        self._graphs = StepGraphs(self._compute, sizes, place, captured=device.type == "cuda")
        self._largest = max_batch if self._capture(group, sizes) else 0

    def step(self, batch: Batch) -> PagedStep:
        size = self._padded(batch)
        if not size:
            return super().step(batch)
        for group in self._group_batches(batch):
            check_batch(group, self._paging.block_size)
        return self._decode_step(size)

    def forward(self, batch: Batch, step: PagedStep) -> Tensor:
        size = self._padded(batch)
        if not size:
            return super().forward(batch, step)
        self._fill(batch, size)
        [hidden] = self._graphs.replay(size)
        rows = batch.logit_rows.rows
        if rows == list(range(len(rows))):
            return hidden[: len(rows)]
        return hidden.index_select(0, upload(np.array(rows, dtype=np.int64), self.device))

    def _capture(self, group: ShardGroup, sizes: list[int]) -> bool:
        """Captures all sizes, the largest first. Returns whether all ranks could.

        A rank that fails while it queues a step for the first time leaves the others waiting for its sums, and the
        replica ends, as with any step. Capturing waits for nobody: whoever fails there can tell the others.
        """
        for size in reversed(sizes):
            failure: RuntimeError | None = None
            try:
                self._graphs.capture(size)
            except RuntimeError as error:
                failure = error
            if not all(group.exchange(int(failure is None))):
                self._graphs.drop()
                logger.warning(
                    "steps of this model are not captured, and run slower for it: %s",
                    failure or "another rank cannot capture them",
                )
                return False
        return True

    def _compute(self, size: int) -> Outputs:
        return (self._model.forward(self._decode_step(size)),)

    def _padded(self, batch: Batch) -> int:
        """Returns the size of the graph that computes `batch`, 0 if none does."""
        num_tokens = len(batch.context_lens)
        if num_tokens > self._largest or any(length != 1 for length in batch.query_lens):
            return 0
        return self._graphs.padded(num_tokens)

    def _decode_step(self, size: int) -> PagedStep:
        """Returns the step over the first `size` places of the buffers, whatever these hold when it is computed."""
        paging = self._paging
        groups = [
            TritonStep(
                slot_mapping=self._slots[index, :size],
                block_tables=self._tables[index],
                table_rows=self._starts[:size],
                context_lens=self._context_lens[:size],
                query_starts=self._starts[: size + 1],
                num_decodes=size,
                max_query_len=0,
                num_tokens=size,
                max_context_len=paging.max_model_len,
                window=group.window,
            )
            for index, group in enumerate(paging.groups)
        ]
        input_ids, positions, every = self._input_ids[:size], self._positions[:size], self._every[:size]
        return PagedStep(input_ids, positions, every, paging.attention, groups, self._cache.layers)

    def _fill(self, batch: Batch, size: int) -> None:
        """Puts `batch` into the first places of the buffers, and padding, which reads and writes nothing, into the rest
        of `size`."""
        count, width = batch.block_tables[0].shape
        num_groups = len(batch.block_tables)
        slots = np.full((num_groups, size), -1, dtype=np.int64)
        slots[:, :count] = [each.numpy() for each in batch.slot_mappings]
        context_lens = np.zeros(size, dtype=np.int64)
        context_lens[:count] = batch.context_lens
        tables = np.stack([each.numpy() for each in batch.block_tables])
        sections = [slots.reshape(-1), context_lens, tables.reshape(-1)]
        packed = upload(np.concatenate(sections), self.device)
        own_slots, own_lens, own_tables = torch.split(packed, [len(section) for section in sections])
        self._slots[:, :size].copy_(own_slots.view(num_groups, size))
        self._context_lens[:size].copy_(own_lens)
        self._tables[:, :count, :width].copy_(own_tables.view(num_groups, count, width))
        for buffer, given in ((self._input_ids, batch.input_ids), (self._positions, batch.positions)):
            buffer[:count].copy_(given)
            buffer[count:size].zero_()
