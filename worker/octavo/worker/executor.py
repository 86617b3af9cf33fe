"""Steps on any device, one at a time: each is done before the next is begun."""

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.kernels.backend import GroupBatch
from octavo.wire.steps import BlockMoves, StepTimes
from octavo.worker.batch import Batch, build_batch
from octavo.worker.grammar_masks import masks_of
from octavo.worker.grammars import Grammars
from octavo.worker.kv_cache import KVCache
from octavo.worker.models.decoder import Decoder, PagedStep
from octavo.worker.paging import Paging
from octavo.worker.prompt_logprobs import prompt_logprobs
from octavo.worker.runner import DoneStep, StepOutput
from octavo.worker.sampler import broken, choose
from octavo.worker.sequences import WorkItem


class Executor:
    """Runs steps of `model` over the blocks of `cache`."""

    def __init__(self, model: Decoder, cache: KVCache, paging: Paging, grammars: Grammars) -> None:
        self._model = model
        self._cache = cache
        self._paging = paging
        self._grammars = grammars
        self._device = paging.device

    def launch(self, moves: BlockMoves, items: list[WorkItem]) -> DoneStep:
        return DoneStep(self._execute(moves, items))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """It keeps nothing of them."""

    @torch.inference_mode()
    def _execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        """Carries out `moves`, then computes `items` as one batch.

        A sequence fails alone if it can choose no token, or if what the model gave it is not finite. Raises
        `ValueError` on moves or tables that name no block.
        """
        began = time.monotonic_ns()
        self._cache.move(moves)
        if not items:
            return StepOutput([], [], [], [], StepTimes((self._now() - began) // 1000, 0, 0))
        batch = self.batch(items)
        step = self.paged_step(batch)
        prepared = self._now()
        if not self._paging.attention.masks_unwritten:
            self._cache.clear(batch.fresh_blocks)
        wanted = batch.logit_rows
        hidden = self._model.forward(step)
        counts = [wanted.num_choosing, len(wanted.watched), sum(span.length for span in wanted.prompt_spans)]
        choosing, watched, prompt = torch.split(hidden, counts)
        logits = self._model.logits(choosing)
        computed = self._now()
        masks = masks_of(wanted.choosers, self._grammars)
        choices = choose(_by_chooser(logits, wanted.chooser_rows), wanted.choosers, masks)
        prompts, failed = prompt_logprobs(prompt, wanted.prompt_spans, self._model.logits)
        failed += broken(watched, wanted.watched)
        times = StepTimes(
            prepare_us=(prepared - began) // 1000,
            model_us=(computed - prepared) // 1000,
            sample_us=(self._now() - computed) // 1000,
        )
        return StepOutput(choices.sampled, choices.candidates, prompts, choices.failed, times).without(failed)

    def batch(self, items: list[WorkItem]) -> Batch:
        """The tensors of one step."""
        return build_batch(items, len(self._paging.groups), self._paging.block_size, self._device)

    def paged_step(self, batch: Batch) -> PagedStep:
        """What the model computes of it."""
        groups = (
            GroupBatch(slot_mapping, block_tables, batch.context_lens, batch.query_lens, group.window)
            for group, slot_mapping, block_tables in zip(
                self._paging.groups, batch.slot_mappings, batch.block_tables, strict=True
            )
        )
        return PagedStep(
            input_ids=batch.input_ids,
            positions=batch.positions,
            rows=torch.tensor(batch.logit_rows.rows, dtype=torch.int64, device=self._device),
            attention=self._paging.attention,
            groups=[self._paging.attention.step(group) for group in groups],
            caches=self._cache.layers,
        )

    def _now(self) -> int:
        """Nanoseconds, once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()


def _by_chooser(logits: Tensor, rows: list[int]) -> Tensor:
    """One row per chooser; `logits` itself if each row has just one."""
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
