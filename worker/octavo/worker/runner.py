"""The seam between the worker's shell and the model: what runs a step, and what comes back."""

from dataclasses import dataclass
from typing import Protocol

from octavo.wire.steps import ModelInfo, StepTimes
from octavo.worker.sequences import WorkItem


@dataclass(frozen=True)
class StepOutput:
    """What a step produced: `sampled` holds one token id per item that samples, in the order of the items."""

    sampled: list[int]
    times: StepTimes


class Runner(Protocol):
    """A model with its paged KV cache of `num_blocks` blocks of `block_size` slots.

    `execute` computes all `items` (at least one) as one batch. It writes the keys and values of every item before it
    reads any, and changes no sequence. Whatever it raises fails the step and nothing else.
    """

    model: ModelInfo
    device: str
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int

    def execute(self, items: list[WorkItem]) -> StepOutput: ...
