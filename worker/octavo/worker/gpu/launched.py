"""Steps that a GPU was given, and their outputs, which are read once the GPU is past them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from octavo.wire.steps import GrammarTime, PromptLogprobs, StepTimes
from octavo.worker.gpu.logprobs import DevicePromptLogprobs
from octavo.worker.gpu.sampler import DeviceBroken, DeviceChoices
from octavo.worker.gpu.transfer import Mark
from octavo.worker.runner import DeviceLostError, StepOutput
from octavo.worker.sequences import WorkItem

# The beginnings of torch's and Triton's messages about an error of the device.
_LOST = ("CUDA error", "Triton Error [CUDA]")


@dataclass(frozen=True, slots=True)
class Part:
    """The queued work of some of a step's items, and the results to come.

    The mark `began` comes once the inputs are there, `computed` before tokens are chosen; `grammars` holds the host's
    time for masks in between.
    """

    began: Mark
    computed: Mark
    choices: DeviceChoices
    broken: DeviceBroken
    prompts: list[DevicePromptLogprobs]
    grammars: list[GrammarTime]

    def output(self, times: StepTimes) -> StepOutput:
        choices = self.choices.choices()
        prompts = [each.listed() for each in self.prompts if each.is_finite]
        failed = [*self.broken.failures(), *(each.failure for each in self.prompts if not each.is_finite)]
        output = StepOutput(choices.sampled, choices.candidates, prompts, choices.failed, times, choices.further)
        return output.without(failed)


class GpuStep:
    """A `octavo.worker.runner.LaunchedStep` in `parts`, mostly one, which the device computes one after the other."""

    def __init__(self, items: list[WorkItem], parts: list[Part], prepare_us: int, ended: Mark):
        self._items = items
        self._parts = parts
        self._prepare_us = prepare_us
        self._ended = ended

    def ready(self) -> bool:
        with device_errors():
            return self._ended.passed()

    def output(self) -> StepOutput:
        with device_errors():
            self._ended.wait()
        began, computed = self._parts[0].began, self._parts[-1].computed
        times = StepTimes(
            self._prepare_us,
            computed.microseconds_since(began),
            self._ended.microseconds_since(computed),
            [taken for part in self._parts for taken in part.grammars],
        )
        return _in_order(self._items, [part.output(times) for part in self._parts], times)


@dataclass(frozen=True)
class Moves:
    """A launched step that only moves blocks."""

    ended: Mark

    def ready(self) -> bool:
        with device_errors():
            return self.ended.passed()

    def output(self) -> StepOutput:
        with device_errors():
            self.ended.wait()
        return StepOutput([], [], [], [], StepTimes(0, 0, 0))


def _in_order(items: list[WorkItem], outputs: list[StepOutput], times: StepTimes) -> StepOutput:
    """Joins the outputs of all parts, in the order of `items`."""
    members = (sequence.sequence_id for item in items for sequence in item.members)
    place = {sequence_id: index for index, sequence_id in enumerate(members)}

    def ordered(answers: Iterable[Any]) -> list[Any]:
        return sorted(answers, key=lambda answer: place[answer.sequence_id])

    failed = {failure.sequence_id: failure for output in outputs for failure in output.failed}
    return StepOutput(
        ordered(each for output in outputs for each in output.sampled),
        ordered(each for output in outputs for each in output.candidates),
        ordered(_joined(each for output in outputs for each in output.prompt_logprobs)),
        [],
        times,
        ordered(each for output in outputs for each in output.further),
    ).without(ordered(failed.values()))


def _joined(parts: Iterable[PromptLogprobs]) -> Iterable[PromptLogprobs]:
    """Yields one entry for each sequence: halves of a prompt come one after the other."""
    found: dict[int, PromptLogprobs] = {}
    for part in parts:
        before = found.get(part.sequence_id)
        logprobs = [*before.logprobs, *part.logprobs] if before else part.logprobs
        found[part.sequence_id] = PromptLogprobs(part.sequence_id, (before or part).start, logprobs)
    return found.values()


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises `DeviceLostError` for an error of the device within the block.

    After such an error a CUDA device does nothing more for this process. A lack of memory is no such error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(said in str(error) for said in _LOST):
            raise DeviceLostError(str(error)) from error
        raise
