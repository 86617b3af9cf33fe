"""The seam between the worker's shell and the model: what runs a step, and what comes back."""

from dataclasses import dataclass
from typing import Protocol

from octavo.wire.steps import BlockMoves, Candidates, KVGroup, ModelInfo, PromptLogprobs, SampledToken, StepTimes
from octavo.worker.sequences import WorkItem


@dataclass(frozen=True)
class StepOutput:
    """What a step produced, in the order of its items and of their choosers: tokens for those that sample, candidates
    for beams, and prompt logprobs where they are wanted (`octavo.wire.steps.StepResult`)."""

    sampled: list[SampledToken]
    candidates: list[Candidates]
    prompt_logprobs: list[PromptLogprobs]
    times: StepTimes


class Runner(Protocol):
    """A model with its paged KV cache of `num_blocks` device blocks and `num_cpu_blocks` CPU blocks of `block_size`
    slots; any of the `kv_groups` may use any block.

    `execute` carries out `moves`, in their order, then computes all `items` (either may be empty) as one batch. It
    writes the keys and values of every item before it reads any, and changes no sequence. Whatever it raises fails
    the step and nothing else.
    """

    model: ModelInfo
    device: str
    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    kv_bytes_per_token: int
    kv_groups: list[KVGroup]

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput: ...
