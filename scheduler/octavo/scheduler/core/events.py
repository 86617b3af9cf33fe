"""The core's input and output: events in, effects out. Both are values only, so that a run can be recorded and
replayed."""

import enum

from octavo.wire.base import Value
from octavo.wire.requests import Lease, Prefix, Request, ToFrontend
from octavo.wire.steps import BlocksFetched, BlocksPulled, DiskUse, StepResult, ToWorker, WorkerHello


class LossCause(enum.StrEnum):
    """Causes for which a replica is removed from the books."""

    GOODBYE = "goodbye"
    # No message reaches the worker: its process or the way to it is gone.
    UNREACHABLE = "unreachable"
    # The worker is silent, or late with a step.
    OVERDUE = "overdue"
    # A worker of the same name registered anew, in another process or in the same.
    RETURNED = "returned"
    RECONNECTED = "reconnected"
    # The worker answered a step it was not asked for.
    CONFUSED = "confused"
    # The worker repeatedly gave nothing finite to any request of a step.
    BROKEN = "broken"

    @property
    def is_death(self) -> bool:
        """Tells whether the worker may have died of what it was computing."""
        return self not in (LossCause.GOODBYE, LossCause.RECONNECTED, LossCause.BROKEN)

    @property
    def is_explained(self) -> bool:
        """Tells whether a death needs no other witness: nobody from outside makes a process hang over a step, or
        err."""
        return self in (LossCause.OVERDUE, LossCause.CONFUSED)


class FrontendJoined(Value, frozen=True, tag=True):
    """A frontend said hello, for the first time or again."""

    frontend_id: int


class RequestSubmitted(Value, frozen=True, tag=True):
    """A frontend wants a request run."""

    frontend_id: int
    request: Request


class LeaseRenewed(Value, frozen=True, tag=True):
    """A frontend named all its live requests."""

    frontend_id: int
    live: list[Lease]


class RequestsAborted(Value, frozen=True, tag=True):
    """A frontend no longer wants these requests."""

    frontend_id: int
    request_ids: list[str]


class SequenceEnded(Value, frozen=True, tag=True):
    """A frontend found the end of one sequence of a request."""

    frontend_id: int
    request_id: str
    attempt: int
    sequence_index: int


class PrefixesNamed(Value, frozen=True, tag=True):
    """A frontend names prefixes that are to be pinned."""

    frontend_id: int
    prefixes: list[Prefix]


class PrefixPinned(Value, frozen=True, tag=True):
    """An operator pins a prefix, for which `PrefixPins.refusal` has returned None."""

    prefix: Prefix


class PrefixUnpinned(Value, frozen=True, tag=True):
    """An operator unpins a prefix that is pinned."""

    name: str


class CacheReset(Value, frozen=True, tag=True):
    """An operator, or a frontend for one, wants nothing cached to be found any more: all, or what is behind a salt. A
    frontend gets an answer with the `serial` of its question."""

    salt: str | None
    frontend_id: int | None = None
    serial: int = 0


class ReplicaJoined(Value, frozen=True, tag=True):
    """A worker said hello; `hello.incarnation` becomes the replica's id."""

    hello: WorkerHello


class ReplicaLeft(Value, frozen=True, tag=True):
    """A worker said goodbye, or cannot be reached."""

    replica_id: int
    cause: LossCause
    reason: str


class ReplicaHeard(Value, frozen=True, tag=True):
    """A worker sent a heartbeat; `draining` if its process is to end. `disk` is what it said of its disk."""

    replica_id: int
    draining: bool = False
    disk: DiskUse | None = None


class WorkerCordoned(Value, frozen=True, tag=True):
    """An operator gives a worker no new requests, under this registration or a later one."""

    worker_id: str


class WorkerDrained(Value, frozen=True, tag=True):
    """An operator wants a worker to end once it holds nothing, and moves what runs there for longer than `grace_s`
    (None: the scheduler's own)."""

    worker_id: str
    grace_s: float | None


class WorkerReadmitted(Value, frozen=True, tag=True):
    """An operator takes a cordon back, or a drain that is not over."""

    worker_id: str


class QuarantineCleared(Value, frozen=True, tag=True):
    """An operator accepts a quarantined payload again, by its hash, or all of them (None)."""

    payload: str | None


class StepAnswered(Value, frozen=True, tag=True):
    """A worker sent the result of a step."""

    replica_id: int
    result: StepResult


class DiskAnswered(Value, frozen=True, tag=True):
    """A worker's disk has read what a step had it fetch."""

    replica_id: int
    answer: BlocksFetched


class PullAnswered(Value, frozen=True, tag=True):
    """A worker has copied blocks of another one, or could not."""

    replica_id: int
    answer: BlocksPulled


class Tick(Value, frozen=True, tag=True):
    """Time has passed: leases and deadlines are to be checked."""


Event = (
    FrontendJoined
    | RequestSubmitted
    | LeaseRenewed
    | RequestsAborted
    | SequenceEnded
    | PrefixesNamed
    | PrefixPinned
    | PrefixUnpinned
    | CacheReset
    | ReplicaJoined
    | ReplicaLeft
    | ReplicaHeard
    | WorkerCordoned
    | WorkerDrained
    | WorkerReadmitted
    | QuarantineCleared
    | StepAnswered
    | DiskAnswered
    | PullAnswered
    | Tick
)


class SendToFrontend(Value, frozen=True, tag=True):
    """A message is to be sent to a frontend."""

    frontend_id: int
    message: ToFrontend


class SendToReplica(Value, frozen=True, tag=True):
    """A message is to be sent to a replica."""

    replica_id: int
    message: ToWorker


class FrontendLost(Value, frozen=True, tag=True):
    """The frontend's lease ran out; nothing of it is held any more."""

    frontend_id: int


class ReplicaLost(Value, frozen=True, tag=True):
    """The replica is gone from the books; whatever it still says is stale."""

    replica_id: int
    cause: LossCause
    reason: str
    worker_id: str


class ReplicaDismissed(Value, frozen=True, tag=True):
    """The replica held nothing and is gone from the books, as it or an operator wanted."""

    replica_id: int
    worker_id: str


class ReplicaStalled(Value, frozen=True, tag=True):
    """The replica stands still: it has work and answers no step; the request should have been in one."""

    replica_id: int
    request_id: str
    reason: str


class ReplicaMovedOn(Value, frozen=True, tag=True):
    """The replica no longer stands still."""

    replica_id: int
    worker_id: str


class RequestQuarantined(Value, frozen=True, tag=True):
    """Workers have died over the request, and whoever asks the same is refused for a while."""

    request_id: str
    reason: str


class PrefixGivenUp(Value, frozen=True, tag=True):
    """The replica goes on without a pinned prefix, which it could not compute."""

    replica_id: int
    name: str
    reason: str


Effect = (
    SendToFrontend
    | SendToReplica
    | FrontendLost
    | ReplicaLost
    | ReplicaDismissed
    | ReplicaStalled
    | ReplicaMovedOn
    | RequestQuarantined
    | PrefixGivenUp
)


class Outbox:
    """Collects effects in the order in which they came about, until they are taken. `epoch` is the one that messages
    name."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def to_frontend(self, frontend_id: int, message: ToFrontend) -> None:
        self._effects.append(SendToFrontend(frontend_id, message))

    def to_replica(self, replica_id: int, message: ToWorker) -> None:
        self._effects.append(SendToReplica(replica_id, message))

    def take(self) -> list[Effect]:
        """Returns all effects since the last call."""
        effects, self._effects = self._effects, []
        return effects


class SchedulerObserver:
    """Watches what the core does; this base class ignores it, `SchedulerMetrics` counts it. The core never asks an
    observer anything. It is called inside the core's turns, must be quick and must not raise. Times are in seconds of
    the core's clock."""

    def admitted(self, waited_s: float) -> None:
        """A request runs for the first time, `waited_s` after it first came to its frontend."""

    def preempted(self, *, swapped: bool) -> None:
        """A request lost its blocks to others: kept in CPU memory, or to be computed again."""

    def replica_lost(self, cause: str) -> None:
        """A worker counts as lost; `cause` is the value of a `LossCause`."""

    def stalled(self, worker_ids: list[str]) -> None:
        """Exactly these workers stand still: they have work and answer no step."""

    def rejected(self, reason: str) -> None:
        """A request was refused, or given up later; `reason` is the value of a `RejectReason`."""

    def finished(self, reason: str) -> None:
        """One sequence of a request has ended, or its frontend has found its end; `reason` is the value of a
        `FinishReason`."""

    def aborted(self) -> None:
        """A request was dropped before its end: its frontend no longer wants it, or is lost."""

    def traced(self, traceparent: str, event: str) -> None:
        """The request with this `traceparent` was admitted ("admitted"), or `event` is the name of a `NoticeKind`."""

    def ended(self, traceparent: str, error: str = "") -> None:
        """The request with this `traceparent` is no longer held; `error` is why, if it was rejected."""

    def prefix_lookup(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time here; `cached_tokens` of its prompt were found computed."""

    def moved(self, num_blocks: int) -> None:
        """A request goes on on another worker, with so many blocks."""

    def prefix_copied(self, num_blocks: int, num_found: int, *, is_late: bool) -> None:
        """A worker has copied so many blocks of prefixes from another one, of which `num_found` can be found there;
        where it `is_late`, nobody waited for them any more."""

    def drafted(self, source: str, guesses: int, accepted: int) -> None:
        """A step has checked so many guesses of a sequence's next tokens, of which `accepted` became its tokens;
        `source` is the value of a `DraftSource`."""

    def step(self, tokens_computed: int, tokens_sampled: int, sequences: int, seconds: float) -> None:
        """A worker has answered a step that is done, `seconds` after it could begin with it."""
