"""The seam between the worker's shell and the model: what runs a step, and what comes back."""

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
        """The same, but that these have failed too: of them nothing else is told."""
        if not failed:
            return self
        dead = {failure.sequence_id: failure for failure in (*failed, *self.failed)}
        return StepOutput(
            [each for each in self.sampled if each.sequence_id not in dead],
            [each for each in self.candidates if each.sequence_id not in dead],
            [each for each in self.prompt_logprobs if each.sequence_id not in dead],
            list(dead.values()),
            self.times,
        )


class Runner(Protocol):
    """A model with its paged KV cache of `num_blocks` device blocks and `num_cpu_blocks` CPU blocks of `block_size`
    slots; any of the `kv_groups` may use any block. `kernels` says in words what computes it.

    `execute` carries out `moves`, in their order, then computes all `items` (either may be empty) as one batch. It
    writes the keys and values of every item before it reads any, and changes no sequence. A sequence that cannot go on
    is told as failed; whatever `execute` raises fails the step and nothing else.
    """

    model: ModelInfo
    device: str
    kernels: str
    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    kv_bytes_per_token: int
    kv_groups: list[KVGroup]

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput: ...
