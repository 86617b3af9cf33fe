"""Defines the messages between frontend and scheduler: requests, deltas, and the lease that ties them together.

A frontend says hello, then submits requests and renews the full set of its live ones every second; a request that it
stops renewing is dropped. The scheduler streams deltas and answers each renewal with the ids it does not hold, which
the frontend then submits again from its journal. Every message carries the scheduler's `epoch`; a message with another
epoch is answered `Unregistered` (towards the scheduler) or dropped (towards the frontend).
"""

import enum
from typing import Annotated

from msgspec import Meta, field

from octavo.wire.base import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    Count,
    Fenced,
    Identity,
    Message,
    Name,
    Text,
    TokenId,
    TokenIds,
    ToldCount,
    TraceParent,
    Value,
    since,
)
from octavo.wire.pooling import OutputBytes, PoolingParams
from octavo.wire.sampling import MAX_PARALLEL, Logprobs, SamplingParams
from octavo.wire.steps import ModelInfo

RENEW_INTERVAL_S = 1.0
LEASE_S = 5.0
# A load that has changed is told after so many seconds at the latest, and at most so often.
LOAD_INTERVAL_S = 0.5

MAX_LIVE_REQUESTS = 1 << 16
MAX_REPLICAS = 1 << 14
Attempt = Annotated[int, Meta(ge=1, le=2**53)]
RequestIds = Annotated[list[Name], Meta(max_length=MAX_LIVE_REQUESTS)]

# Tokens of an answer that may be longer; most end long before their limit.
EXPECTED_ANSWER = 1024

MAX_PREFIXES = 256
MAX_PRIORITY = 100
Priority = Annotated[
    int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description=f"between -{MAX_PRIORITY} and {MAX_PRIORITY}")
]
SequenceIndex = Annotated[int, Meta(ge=0, lt=MAX_PARALLEL)]


class FinishReason(enum.StrEnum):
    """Says why a sequence ended: at a stop token or EOS (`STOP`), or at its limit (`LENGTH`). A stop string is the
    frontend's to find, and `STOP` too: see `EndSequence`."""

    STOP = "stop"
    LENGTH = "length"


class RejectReason(enum.StrEnum):
    """Says why the scheduler will not, or can no longer, run a request."""

    DUPLICATE_ID = "duplicate_id"
    EMPTY_PROMPT = "empty_prompt"
    ALREADY_COMPLETE = "already_complete"
    NEVER_FITS_KV = "never_fits_kv"
    TOO_MANY_SEQUENCES = "too_many_sequences"
    PROMPT_TOO_LONG = "prompt_too_long"
    BAD_TOKEN_ID = "bad_token_id"
    MODEL_MISMATCH = "model_mismatch"
    QUEUE_FULL = "queue_full"
    STEP_FAILED = "step_failed"
    NOT_FINITE = "not_finite"
    NO_TOKEN_LEFT = "no_token_left"
    BAD_GRAMMAR = "bad_grammar"
    QUEUE_TIMEOUT = "queue_timeout"
    OUT_OF_MEMORY = "out_of_memory"
    QUARANTINED = "quarantined"
    WRONG_TASK = "wrong_task"


class GeneratedSequence(Value, frozen=True):
    """Holds the tokens that one sequence of a request has generated and its frontend has accepted."""

    token_ids: TokenIds
    finished: bool

    def is_over(self, max_tokens: int) -> bool:
        """Returns whether nothing is left to generate."""
        return self.finished or len(self.token_ids) >= max_tokens


def answer_work(max_tokens: int, num_generated: int) -> int:
    """Estimates the tokens that a sequence which has not ended will generate yet: one at least."""
    return max(1, min(max_tokens, EXPECTED_ANSWER) - num_generated)


class CacheKey(Value, frozen=True):
    """Identifies what two requests must have in common, besides their tokens, to share KV: the adapter in use (empty:
    none) and a client's salt (empty: none). The first `salted_from` tokens, those of a pinned prefix, are shared
    whatever the salt."""

    adapter: Annotated[str, Meta(max_length=256)] = ""
    salt: Annotated[str, Meta(max_length=256)] = ""
    salted_from: Count = 0


NO_CACHE_KEY = CacheKey()


class Request(Value, frozen=True):
    """Holds all that is needed to run a request from any point of its life, so that a replay is a submission.

    `prompt_token_ids` and what was `generated` before (by sequence index; empty at first, and always for a beam search,
    which starts over) are never joined: sampling positions, limits and usage need the border. They mean nothing to
    another model than that of `model_fingerprint`. A higher `priority` runs first; `tenant` is who shares the service
    fairly with others. `age_ms` is the time since the request first arrived, so that one submitted again keeps its
    place.

    `attempt` grows with every submission of a frontend, whatever the request, so that no answer to an earlier one can
    be taken for an answer to this. `resubmitted` says that the request was submitted before: it may have been accepted,
    and waits for what it needs rather than being refused.

    `max_queue_ms` (None: no limit) is the age at which the request is rejected if it has never been admitted to a
    replica. `traceparent` names the frontend's span of it. `predicted_token_ids` are what the client expects the answer
    to be: guesses, which may make it faster and change nothing else. With `pooling` the request ends with an output of
    the model in place of tokens, and its `sampling` means nothing.
    """

    request_id: Name
    attempt: Attempt
    resubmitted: bool
    model_fingerprint: Name
    prompt_token_ids: TokenIds
    generated: Annotated[list[GeneratedSequence], Meta(max_length=MAX_PARALLEL)]
    sampling: SamplingParams
    priority: Priority
    tenant: Annotated[str, Meta(max_length=256)]
    cache_key: CacheKey
    age_ms: Count
    max_queue_ms: Count | None = None
    traceparent: TraceParent = ""
    predicted_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS, extra={"since": 9})] = field(
        default_factory=list
    )
    pooling: Annotated[PoolingParams | None, since(9)] = None

    @property
    def longest(self) -> int:
        """Returns the tokens, with the prompt's, that a sequence of the request can grow to."""
        return len(self.prompt_token_ids) + (self.sampling.max_tokens if self.pooling is None else 0)

    def __post_init__(self) -> None:
        if self.cache_key.salted_from > len(self.prompt_token_ids):
            raise ValueError("the salt begins behind the prompt; it must count from one of its tokens, or its end, on")


class FrontendHello(Message, frozen=True):
    """Opens a frontend's connection; `frontend_id` is drawn at process start."""

    schema_version: Count
    frontend_id: Identity


class Submit(Fenced, frozen=True):
    """Run this request; replaces a copy with a lower attempt."""

    request: Request


class Lease(Value, frozen=True):
    """Claims one request for a frontend that still has a reader of it, by the request's latest attempt."""

    request_id: Name
    attempt: Attempt


class Renew(Fenced, frozen=True):
    """Names all live requests of the frontend. The scheduler drops those it holds that are not named."""

    live: Annotated[list[Lease], Meta(max_length=MAX_LIVE_REQUESTS)]


class Abort(Fenced, frozen=True):
    """Drop these requests now instead of at the end of their lease. Unknown ids are ignored."""

    request_ids: RequestIds


class EndSequence(Fenced, frozen=True):
    """One sequence of a request has ended by a rule that only the frontend can see, a stop string. The others go on."""

    request_id: Name
    attempt: Attempt
    sequence_index: SequenceIndex


class Prefix(Value, frozen=True):
    """Holds the beginning of many prompts, kept computed under a name (paper §4.4)."""

    name: Name
    token_ids: Annotated[TokenIds, Meta(min_length=1)]


class PinPrefixes(Fenced, frozen=True):
    """Names the prefixes that the frontend knows of, from its file or an earlier scheduler. Those pinned already are
    left alone."""

    prefixes: Annotated[list[Prefix], Meta(max_length=MAX_PREFIXES)]


class ResetPrefixCache(Fenced, frozen=True):
    """Let no later request find what is cached now: all (None), or what is behind a salt. The answer has the same
    `serial`."""

    serial: Count
    salt: Annotated[str, Meta(min_length=1, max_length=256)] | None


class BlockUse(Value, frozen=True):
    """Counts the KV blocks of one size in tokens, on all replicas with such blocks; used are those that are not free,
    whether or not free ones hold cached content."""

    block_size: Annotated[int, Meta(ge=1)]
    num_blocks: Count
    num_used: Count


class ServiceLoad(Value, frozen=True):
    """Counts the requests of all frontends that wait, for a replica or swapped out, and those that run; and the KV
    blocks of each size."""

    waiting: Count
    running: Count
    blocks: Annotated[list[BlockUse], Meta(max_length=MAX_REPLICAS)]


class ServiceStatus(Value, frozen=True):
    """Tells a frontend what it must know of the service to admit or refuse requests.

    `capacity_tokens` is what the largest live replica can hold for one sequence; 0 with no replica. Sequences that run
    side by side share it in blocks of `block_size` tokens; `max_parallel` is how many of one request can. `work_tokens`
    are still to be computed of all that is held, as of each frontend's latest renewal: see `answer_work`. `stalled`: a
    replica has work and answers no step, and there is none that would do better with a new request. `load` is that of
    now.
    """

    replicas: Count
    model: ModelInfo | None
    capacity_tokens: Count
    max_parallel: Count
    block_size: Annotated[int, Meta(ge=1)] = 1
    work_tokens: Count = 0
    stalled: Annotated[bool, since(9)] = False
    load: Annotated[ServiceLoad | None, since(9)] = None


class FrontendWelcome(Fenced, frozen=True):
    """The frontend is known; `epoch` names this start of the scheduler."""

    status: ServiceStatus


class StatusChanged(Fenced, frozen=True):
    """Reports that a replica came or went, or stands still, or no longer; or that the load has changed."""

    status: ServiceStatus


class PrefixesChanged(Fenced, frozen=True):
    """Lists all prefixes that are pinned now; sent after the welcome and with every change."""

    prefixes: Annotated[list[Prefix], Meta(max_length=MAX_PREFIXES)]


class PinRefused(Fenced, frozen=True):
    """Says that a prefix which a frontend named is not pinned, and why."""

    name: Name
    detail: Text


class PrefixCacheReset(Fenced, frozen=True):
    """Answer to `ResetPrefixCache`: so many cached blocks are found no more, some of them in use by requests, which
    keep them; and so many pinned prefixes are computed anew."""

    serial: Count
    num_blocks: Count
    num_in_use: Count
    num_prefixes: Count


class Renewed(Fenced, frozen=True):
    """Answer to `Renew`: of what it named, what the scheduler does not hold and wants submitted again."""

    unknown: Annotated[list[Lease], Meta(max_length=MAX_LIVE_REQUESTS)]
    status: ServiceStatus


class Delta(Value, frozen=True):
    """Holds new tokens of one sequence of a request.

    `start_index` counts the sequence's generated tokens before these; `previous_hash` is their rolling hash
    (`octavo.wire.history`), so a frontend accepts only what continues its own journal. `cached_prompt_tokens` were
    found computed when this attempt was first admitted. `preemptions` counts how often the request has lost its device
    blocks so far, `swaps` how many of these times they were kept in CPU memory.

    `logprobs`, where wanted, has one entry per token; `prompt_logprobs` comes with the first token of sequence 0, one
    entry per prompt token but the first. The sequences of a beam search come whole, best first, when it ends, with
    their `cumulative_logprob`.

    `drafted` counts the guesses of this sequence's tokens that steps have checked so far, in this attempt, `accepted`
    those that were right; `accepted_predictions` and `rejected_predictions` those of them that the client gave.

    The one delta of a request with `pooling` brings its output, `pooled`, in place of tokens.
    """

    request_id: Name
    attempt: Attempt
    sequence_index: SequenceIndex
    start_index: Count
    previous_hash: Identity
    token_ids: TokenIds
    finish_reason: FinishReason | None
    preemptions: ToldCount
    swaps: ToldCount
    cached_prompt_tokens: ToldCount
    logprobs: Annotated[list[Logprobs], Meta(max_length=MAX_TOKENS)] = field(default_factory=list)
    prompt_logprobs: Annotated[list[Logprobs], Meta(max_length=MAX_TOKENS)] = field(default_factory=list)
    cumulative_logprob: float | None = None
    drafted: Annotated[ToldCount, since(9)] = 0
    accepted: Annotated[ToldCount, since(9)] = 0
    accepted_predictions: Annotated[ToldCount, since(9)] = 0
    rejected_predictions: Annotated[ToldCount, since(9)] = 0
    pooled: Annotated[OutputBytes, since(9)] = b""


class Deltas(Fenced, frozen=True):
    """Holds all that one step produced for one frontend."""

    deltas: Annotated[list[Delta], Meta(max_length=MAX_SEQUENCES)]


class NoticeKind(enum.StrEnum):
    """Says what has happened to a request besides output: it waits behind others; it lost its blocks to others; its
    replica was lost; it runs again after one of these."""

    QUEUED = "queued"
    PREEMPTED = "preempted"
    WORKER_LOST = "worker_lost"
    RESUMED = "resumed"


class Notice(Value, frozen=True):
    """Reports progress of one request. `queue_position` counts from 1 where the request waits in a queue, and is 0
    elsewhere."""

    request_id: Name
    attempt: Attempt
    kind: NoticeKind
    queue_position: ToldCount


class Notices(Fenced, frozen=True):
    """Reports to one frontend the progress of its requests besides their tokens."""

    notices: Annotated[list[Notice], Meta(max_length=MAX_LIVE_REQUESTS)]


class Rejected(Fenced, frozen=True):
    """The request will not run; nothing is held for it."""

    request_id: Name
    attempt: Attempt
    reason: RejectReason
    detail: Text


class Refused(Message, frozen=True):
    """The hello is not acceptable (another schema version); the process must not go on."""

    detail: Text


class Unregistered(Fenced, frozen=True):
    """The scheduler does not know the sender, or the sender does not know this scheduler: say hello again."""


FromFrontend = FrontendHello | Submit | Renew | Abort | EndSequence | PinPrefixes | ResetPrefixCache
ToFrontend = (
    FrontendWelcome
    | StatusChanged
    | PrefixesChanged
    | PinRefused
    | PrefixCacheReset
    | Renewed
    | Deltas
    | Notices
    | Rejected
    | Refused
    | Unregistered
)
