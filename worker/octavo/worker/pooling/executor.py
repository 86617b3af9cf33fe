"""The executor of steps of a decoder whose output of whole texts is wanted in place of tokens."""

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from octavo.wire.pooling import PooledOutput
from octavo.wire.steps import BlockMoves, SequenceFailure, StepTimes
from octavo.worker.pooling.gathering import GatheredText, gathers
from octavo.worker.pooling.heads import EmbeddingHead
from octavo.worker.runner import StepOutput
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sampling.sampler import broken
from octavo.worker.sequences import WorkItem
from octavo.worker.step.batch import LogitRows
from octavo.worker.step.executor import Executor
from octavo.worker.step.failures import not_finite
from octavo.worker.step.forward import PagedModel, Paging


class PoolingExecutor(Executor):
    """Runs the steps of `model`, which has no LM head. What `head` needs of a text is gathered step by step, until the
    text is forgotten."""

    def __init__(self, model: PagedModel, paging: Paging, grammars: Grammars, head: EmbeddingHead) -> None:
        super().__init__(model, paging, grammars)
        self._head = head
        self._gathers = gathers(head.modes)
        self._texts: dict[int, GatheredText] = {}

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._texts.pop(sequence_id, None)

    @torch.inference_mode()
    def _execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        """Carries out `moves`, then computes `items` as one batch; those that reach their last token get an output.

        Raises `ValueError` on moves or tables that name no block, and on a text that does not go on where it was left.
        """
        began = time.monotonic_ns()
        self._model.move(moves)
        if not items:
            return StepOutput([], [], [], [], StepTimes((self._now() - began) // 1000, 0, 0))
        texts = [self._text(item) for item in items]
        counts = [item.num_tokens if self._gathers else 1 for item in items]
        batch = self.batch(items)
        batch = replace(batch, logit_rows=LogitRows(_last_rows(items, counts), 0, [], [], [], []))
        step = self.paged_step(batch)
        prepared = self._now()
        states = self._model.forward(batch, step).float().split_with_sizes(counts)
        computed = self._now()
        pooled, failed = self._pool(items, texts, states)
        times = StepTimes((prepared - began) // 1000, (computed - prepared) // 1000, (self._now() - computed) // 1000)
        return StepOutput([], [], [], failed, times, pooled=pooled)

    def _text(self, item: WorkItem) -> GatheredText:
        """Returns what was gathered of an item's text so far."""
        text = self._texts.get(item.sequence.sequence_id) or GatheredText(self._head.modes)
        if self._gathers and item.sequence.pooling is not None and text.num_tokens != item.start:
            raise ValueError(
                f"{item.sequence} goes on at token {item.start}, and {text.num_tokens} were computed here; an output of"
                " all tokens takes all"
            )
        return text

    def _pool(
        self, items: list[WorkItem], texts: list[GatheredText], states: Iterable[Tensor]
    ) -> tuple[list[PooledOutput], list[SequenceFailure]]:
        """Adds the states to the texts, and makes the outputs of those that are whole."""
        pooled: list[PooledOutput] = []
        failed: list[SequenceFailure] = []
        for item, text, added in zip(items, texts, states, strict=True):
            sequence = item.sequence
            if sequence.pooling is None:
                continue
            text.add(added, item.end - len(added))
            if not item.choosers:
                # Whoever has broken keys or values shows that in every row.
                failed += broken(added[-1:], [sequence])
                self._texts[sequence.sequence_id] = text
                continue
            output = self._head.finish(text.parts())
            if bool(torch.isfinite(output).all()):
                pooled.append(PooledOutput(sequence.sequence_id, output.numpy().astype("<f4").tobytes()))
            else:
                failed.append(not_finite(sequence.sequence_id))
        return pooled, failed


def _last_rows(items: list[WorkItem], counts: list[int]) -> list[int]:
    """Returns the rows of the last `counts` tokens of each item."""
    ends = accumulate(item.num_tokens for item in items)
    return [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
