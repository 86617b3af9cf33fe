"""The seam between the worker's shell and the model: what runs a step, and what comes back."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.wire.steps import (
    BlockMoves,
    Candidates,
    KVGroup,
    ModelInfo,
    PromptLogprobs,
    SampledToken,
    SequenceFailure,
    StepTimes,
)
from octavo.worker.sequences import WorkItem


@dataclass(frozen=True)
class StepOutput:
    """What a step produced, in the order of its items and of their choosers: tokens for those that sample, candidates
    for beams, prompt logprobs where they are wanted, and sequences of the step that `failed` instead
    (`octavo.wire.steps.StepResult`)."""

    sampled: list[SampledToken]
    candidates: list[Candidates]
    prompt_logprobs: list[PromptLogprobs]
    failed: list[SequenceFailure]
    times: StepTimes

    def without(self, failed: list[SequenceFailure]) -> "StepOutput":
        """The same, but that these have failed, for the reasons given here: of them nothing else is told."""
        if not failed:
            return self
        dead = {failure.sequence_id: failure for failure in (*self.failed, *failed)}
        return StepOutput(
            [each for each in self.sampled if each.sequence_id not in dead],
            [each for each in self.candidates if each.sequence_id not in dead],
            [each for each in self.prompt_logprobs if each.sequence_id not in dead],
            list(dead.values()),
            self.times,
        )


class DeviceLostError(BaseException):
    """The device will do nothing any more: no step can be answered, and the process must end."""


class LaunchedStep(Protocol):
    """A step that a runner has begun."""

    def ready(self) -> bool:
        """Whether `output` would not wait."""

    def output(self) -> StepOutput:
        """What came of it, once it is done. Raises whatever fails the step."""


@dataclass(frozen=True)
class DoneStep:
    """A `LaunchedStep` that was done before its launch came back."""

    result: StepOutput

    def ready(self) -> bool:
        return True

    def output(self) -> StepOutput:
        return self.result


class Runner(Protocol):
    """A model with its paged KV cache of `num_blocks` device blocks and `num_cpu_blocks` CPU blocks of `block_size`
    slots; any of the `kv_groups` may use any block. `kernels` says in words what computes it, on `world_size` ranks.

    `launch` begins a step and may come back before it is done: it carries out `moves`, in their order, then computes
    all `items` (either may be empty) as one batch. It writes the keys and values of every item before it reads any, and
    changes no sequence. Steps are done in the order of their launches; a token that one of them samples may be pending
    (`octavo.worker.sequences.PENDING_TOKEN`) in the items of the next, unless that was `ready` before or a member of
    these `reads_generated`.
    A sequence that cannot go on is told as failed; whatever is raised fails the step and nothing else, but for
    `DeviceLostError`.

    `execute` does the same and waits. `forget` is told of every sequence that will not be in a step again.
    """

    model: ModelInfo
    device: str
    kernels: str
    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    kv_bytes_per_token: int
    kv_groups: list[KVGroup]
    world_size: int

    def launch(self, moves: BlockMoves, items: list[WorkItem]) -> LaunchedStep: ...

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput: ...

    def forget(self, sequence_ids: Iterable[int]) -> None: ...
