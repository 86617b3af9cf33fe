"""The executor of steps on any device, one at a time: each step is done before the next one begins."""

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.wire.steps import BlockMoves, PromptLogprobs, SequenceFailure, StepTimes
from octavo.worker.models.decoder import PagedStep
from octavo.worker.runner import DoneStep, Settle, StepOutput, nothing_pending
from octavo.worker.sampling.grammar_masks import masks_of
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sampling.logprobs import prompt_logprobs
from octavo.worker.sampling.sampler import broken, choose
from octavo.worker.sequences import WorkItem
from octavo.worker.step.batch import Batch, LogitRows, build_batch
from octavo.worker.step.draft_model import DraftModel
from octavo.worker.step.forward import PagedModel, Paging
from octavo.worker.tensor_parallel.leader import NO_FOLLOWERS, Followers


class Executor:
    """Runs the steps of `model`. If other ranks share it, they are sent each step through `followers`. A `draft_model`
    makes the proposals of steps, and follows them meanwhile."""

    def __init__(
        self,
        model: PagedModel,
        paging: Paging,
        grammars: Grammars,
        followers: Followers = NO_FOLLOWERS,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._draft_model = draft_model
        self._model = model
        self._paging = paging
        self._grammars = grammars
        self._followers = followers
        self._device = paging.device

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> DoneStep:
        if not self._paging.attention.masks_unwritten:
            # A guess that overflows would spoil all that is computed over its slot, until that is written to again.
            items = [item.without_draft() for item in items]
        return DoneStep(self._execute(moves, items))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Does nothing: this executor keeps nothing of a sequence."""

    @torch.inference_mode()
    def _execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        """Carries out `moves`, then computes `items` as one batch.

        A sequence fails alone if it can choose no token, or if the model's output for it is not finite. Raises
        `ValueError` on moves or tables that name no block.
        """
        began = time.monotonic_ns()
        self._model.move(moves)
        self._followers.move(moves)
        if self._draft_model is not None:
            self._draft_model.move(moves)
        if not items:
            return StepOutput([], [], [], [], StepTimes((self._now() - began) // 1000, 0, 0))
        batch = self.batch(items)
        step = self.paged_step(batch)
        prepared = self._now()
        wanted = batch.logit_rows
        with self._followers.computing(batch):
            hidden = self._model.forward(batch, step)
            logits = self._model.logits(hidden[: wanted.num_choosing])
            computed = self._now()
        masks = masks_of(wanted.choosers, self._grammars)
        choices = choose(_by_chooser(logits, wanted.chooser_rows), wanted.choosers, masks)
        failed = broken(hidden[wanted.num_choosing : wanted.first_of_prompts], wanted.watched)
        prompts, not_finite = self._prompt_logprobs(hidden, wanted)
        times = StepTimes(
            prepare_us=(prepared - began) // 1000,
            model_us=(computed - prepared) // 1000,
            sample_us=(self._now() - computed) // 1000,
            grammars=masks.times,
        )
        output = StepOutput(choices.sampled, choices.candidates, prompts, choices.failed, times, choices.further)
        output = output.without([*not_finite, *failed])
        return output if self._draft_model is None else self._draft_model.follow(items, output)

    def batch(self, items: list[WorkItem]) -> Batch:
        """Builds the tensors of one step."""
        return build_batch(items, len(self._paging.groups), self._paging.block_size, self._device)

    def paged_step(self, batch: Batch) -> PagedStep:
        """Builds the model's input from `batch`."""
        return self._model.step(batch)

    def _prompt_logprobs(self, hidden: Tensor, wanted: LogitRows) -> tuple[list[PromptLogprobs], list[SequenceFailure]]:
        def logits_of(first: int, last: int) -> Tensor:
            first, last = first + wanted.first_of_prompts, last + wanted.first_of_prompts
            with self._followers.taking_logits(first, last):
                return self._model.logits(hidden[first:last])

        return prompt_logprobs(wanted.prompt_spans, logits_of)

    def _now(self) -> int:
        """Returns the time in nanoseconds once the device has done its work so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()


def _by_chooser(logits: Tensor, rows: list[int]) -> Tensor:
    """Returns one row of `logits` per chooser; `logits` itself if each row has just one chooser."""
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
