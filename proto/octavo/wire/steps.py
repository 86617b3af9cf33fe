"""Scheduler and worker: registration, plans, results, heartbeats.

A worker says hello with what it is and holds, and is welcomed into an epoch or refused. The scheduler then sends
`StepPlan`s, up to `MAX_STEPS_IN_FLIGHT` ahead of the results; the worker runs them in order and answers each with one
`StepResult`. Whatever carries another epoch or incarnation than the current ones is dropped.
"""

import enum
from typing import Annotated

from msgspec import Meta

from octavo.wire.base import (
    MAX_BLOCKS_PER_SEQUENCE,
    MAX_SEQUENCES,
    MAX_TOKENS,
    BlockId,
    Count,
    Identity,
    Message,
    Name,
    Text,
    TokenId,
    TokenIds,
    Value,
)
from octavo.wire.sampling import SamplingParams

MAX_STEPS_IN_FLIGHT = 2
HEARTBEAT_INTERVAL_S = 0.25
MAX_BLOCK_SIZE = 256


class ModelInfo(Value, frozen=True):
    """What must be equal on every replica, and what a frontend needs to check a request at the door.

    `fingerprint` identifies the model directory (`octavo.wire.model_directory`); `dtype` is that of the computation.
    """

    name: Name
    fingerprint: Name
    dtype: Name
    vocab_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class WorkerHello(Message, frozen=True):
    """A worker offers itself. `worker_id` names the process's place and outlives it; `incarnation` is drawn anew for
    every registration and stands for one life of its (empty) block pool."""

    schema_version: Count
    worker_id: Name
    incarnation: Identity
    model: ModelInfo
    device: Name
    rank: Annotated[int, Meta(ge=0, le=1023)]
    world_size: Annotated[int, Meta(ge=1, le=1024)]
    num_blocks: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    kv_bytes_per_token: Count


class WorkerWelcome(Message, frozen=True):
    """The worker's replica will get plans of this epoch."""

    epoch: Identity


class WorkerRefused(Message, frozen=True):
    """The worker does not fit here (another model, another schema version); it must exit with `detail`."""

    detail: Text


class WorkerUnregistered(Message, frozen=True):
    """The scheduler does not hold this incarnation: forget every block and say hello with a new one."""

    epoch: Identity


class Heartbeat(Message, frozen=True):
    """Sent by the worker's main loop, never by a thread beside it, while no step is being computed."""

    epoch: Identity
    incarnation: Identity
    last_step_id: Count


class WorkerGoodbye(Message, frozen=True):
    """The worker is leaving; its sequences are to be recomputed elsewhere."""

    epoch: Identity
    incarnation: Identity


class SequenceStart(Value, frozen=True):
    """A sequence the worker has not seen, or has been told to forget: its tokens and how to sample, once.

    The KV of its first `num_computed` tokens is in the first of the blocks that its first work item brings; never of
    all, so there is something to compute. `sequence_index` is its place in its request (for the sampling key);
    the position of a sampled token in the sequence of generated ones is part of that key too, which is why prompt
    and generated ids stay apart.
    """

    sequence_id: Identity
    sequence_index: Annotated[int, Meta(ge=0, le=MAX_SEQUENCES)]
    prompt_token_ids: TokenIds
    generated_token_ids: TokenIds
    num_computed: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    sampling: SamplingParams


class SequenceWork(Value, frozen=True):
    """One known sequence's share of a step: compute its next `num_tokens` tokens.

    Its block table first grows by `new_block_ids`. A work item that reaches the last known token samples the next
    one, which the worker appends itself: the scheduler need not know it to plan the step after.
    """

    sequence_id: Identity
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    new_block_ids: Annotated[list[BlockId], Meta(max_length=MAX_BLOCKS_PER_SEQUENCE)]


class StepPlan(Message, frozen=True):
    """One forward pass: first forget, then start, then compute all work as one batch.

    `answered_step_id` is the last step whose result the scheduler had when it made this plan (0: none). After a failed
    step the worker skips every plan made without knowing of the failure.
    """

    epoch: Identity
    incarnation: Identity
    step_id: Annotated[int, Meta(ge=1, le=2**53)]
    answered_step_id: Count
    forget: Annotated[list[Identity], Meta(max_length=MAX_SEQUENCES)]
    starts: Annotated[list[SequenceStart], Meta(max_length=MAX_SEQUENCES)]
    work: Annotated[list[SequenceWork], Meta(max_length=MAX_SEQUENCES)]


class StepOutcome(enum.StrEnum):
    """How a plan ended: computed; raised in the worker; or not tried, because one before it had failed."""

    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class SampledToken(Value, frozen=True):
    """The token a sequence sampled in a step."""

    sequence_id: Identity
    token_id: TokenId


class StepTimes(Value, frozen=True):
    """Where a step's time went in the worker, in microseconds: batch building, model, sampling."""

    prepare_us: Count
    model_us: Count
    sample_us: Count


class StepResult(Message, frozen=True):
    """The answer to one plan; `sampled` in the order of the plan's work. `detail` says why a step failed."""

    epoch: Identity
    incarnation: Identity
    step_id: Count
    outcome: StepOutcome
    sampled: Annotated[list[SampledToken], Meta(max_length=MAX_SEQUENCES)]
    times: StepTimes
    detail: Text


FromWorker = WorkerHello | StepResult | Heartbeat | WorkerGoodbye
ToWorker = WorkerWelcome | WorkerRefused | WorkerUnregistered | StepPlan
