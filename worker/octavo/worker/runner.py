"""The interface between the worker's loop and the model: a runner computes steps and returns what they produced."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.wire.pooling import PooledOutput
from octavo.wire.steps import (
    BlockMoves,
    Candidates,
    FurtherTokens,
    KVGroup,
    ModelInfo,
    PromptLogprobs,
    SampledToken,
    SequenceDraft,
    SequenceFailure,
    StepTimes,
)
from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.loan import Parts, Payload
from octavo.worker.sequences import WorkItem


@dataclass(frozen=True)
class StepOutput:
    """Holds what a step produced, in the order of its items and of their choosers.

    These are tokens for choosers that sample, and `further` ones that drafts have brought, candidates for beams,
    `pooled` outputs for those that ask for one, prompt logprobs where they are wanted, the sequences of the step that
    `failed` instead, and what is `proposed` to come next (`octavo.wire.steps.StepResult`).
    """

    sampled: list[SampledToken]
    candidates: list[Candidates]
    prompt_logprobs: list[PromptLogprobs]
    failed: list[SequenceFailure]
    times: StepTimes
    further: list[FurtherTokens] = field(default_factory=list)
    proposed: list[SequenceDraft] = field(default_factory=list)
    pooled: list[PooledOutput] = field(default_factory=list)

    def without(self, failed: list[SequenceFailure]) -> "StepOutput":
        """Returns this output with the sequences of `failed` as failures and without anything else of these
        sequences."""
        if not failed:
            return self
        dead = {failure.sequence_id: failure for failure in (*self.failed, *failed)}
        return StepOutput(
            [each for each in self.sampled if each.sequence_id not in dead],
            [each for each in self.candidates if each.sequence_id not in dead],
            [each for each in self.prompt_logprobs if each.sequence_id not in dead],
            list(dead.values()),
            self.times,
            [each for each in self.further if each.sequence_id not in dead],
            [each for each in self.proposed if each.sequence_id not in dead],
            [each for each in self.pooled if each.sequence_id not in dead],
        )


class DeviceLostError(BaseException):
    """Raised if the device has stopped working: no step can be answered, and the process must end."""


class LaunchedStep(Protocol):
    """A step that a runner has launched and that may still be under way."""

    def ready(self) -> bool:
        """Tells whether `output` would return without waiting."""

    def output(self) -> StepOutput:
        """Waits until the step is done and returns what it produced. Raises the error that failed the step."""


Settle = Callable[[], None]


def nothing_pending() -> None:
    """Settles nothing: no token is pending."""


@dataclass(frozen=True)
class DoneStep:
    """A `LaunchedStep` that was done when its launch returned."""

    result: StepOutput

    def ready(self) -> bool:
        return True

    def output(self) -> StepOutput:
        return self.result


@dataclass(frozen=True)
class BlockContents:
    """The bytes of some device blocks, as they are before the step that is launched next, in the order asked for, each
    in one part or several. There may be fewer than were asked for.

    If they are `here`, the parts are the blocks themselves, and change with them. Else call `blocks` once that step's
    output has been taken: they are copies. `is_sound` tells of such parts whether their numbers are finite; any thread
    may call it, and it may say anything of parts that change meanwhile.
    """

    here: bool
    blocks: Callable[[], Iterable[Parts]]
    is_sound: Callable[[Parts], bool]


class Runner(Protocol):
    """A model with its paged KV cache of `num_blocks` device blocks and `num_cpu_blocks` CPU blocks of `block_size`
    slots.

    Any of the `kv_groups` may use any block; a model that keeps nothing between steps has neither. `kv_cache_dtype` is
    the type of keys and values; `kernels` names the kernels in words; the model is spread over `world_size` ranks;
    `draft_model` names the one that makes proposals, if there is one.

    `launch` begins a step and may return before the step is done. The step carries out `moves`, in their order, then
    computes all `items` as one batch; either may be empty. It writes the keys and values of every item before it reads
    any, and changes no sequence. Of a draft it may check fewer tokens than there are, or none, and propose fewer than
    are asked for. Steps are done in the order of their launches. A token that a step samples may be pending
    (`octavo.worker.sequences.PENDING_TOKEN`) in the items of the next step, unless the first step was `ready` before
    that. A runner that must read such a token, because the sequence `reads_generated`, calls `settle` first: it waits
    for the steps before, and then the tokens are known of all sequences without a `failure`. What `settle` raises ends
    the launch.

    A sequence that cannot go on is reported as failed. An exception fails the step and nothing else, except for
    `DeviceLostError`.

    `execute` launches a step and waits for its output. `forget` names every sequence that will not be in a step again.

    `kv_identity` says for whom the bytes of a block are of use, and how many they are. `read_blocks` gives what is in
    device blocks, and `fill_cpu_block` writes such bytes into a CPU block, which no step that is under way may use.
    `peek_blocks` gives the bytes of blocks as they are, of the device or `in_cpu`, on any thread; None where there are
    no such blocks, or where the device has a memory of its own.
    """

    model: ModelInfo
    device: str
    kernels: str
    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    kv_bytes_per_token: int
    kv_cache_dtype: str
    kv_groups: list[KVGroup]
    world_size: int
    draft_model: str | None

    @property
    def kv_identity(self) -> StoreIdentity: ...

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> LaunchedStep: ...

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput: ...

    def forget(self, sequence_ids: Iterable[int]) -> None: ...

    def read_blocks(self, block_ids: Sequence[int]) -> BlockContents: ...

    def fill_cpu_block(self, block_id: int, payload: Payload) -> None: ...

    def peek_blocks(self, block_ids: Sequence[int], *, in_cpu: bool) -> list[Payload] | None: ...
