"""What the core is told and what it answers: values only, so that a run can be written down and fed again."""

import enum

from octavo.wire.base import Value
from octavo.wire.requests import Lease, Prefix, Request, ToFrontend
from octavo.wire.steps import StepResult, ToWorker, WorkerHello


class LossCause(enum.StrEnum):
    """How a replica came to be gone from the books."""

    GOODBYE = "goodbye"
    # No message reaches it: its process or the way to it is gone.
    UNREACHABLE = "unreachable"
    # Silent, or late with a step.
    OVERDUE = "overdue"
    # A worker of its name registered anew, in another process or in the same.
    RETURNED = "returned"
    RECONNECTED = "reconnected"
    # It answered what it was not asked.
    CONFUSED = "confused"
    # Again and again it gave nothing finite to whatever it computed.
    BROKEN = "broken"

    @property
    def is_death(self) -> bool:
        """Whether what it was computing may have killed it."""
        return self not in (LossCause.GOODBYE, LossCause.RECONNECTED, LossCause.BROKEN)

    @property
    def is_explained(self) -> bool:
        """Whether a death needs no other witness: nobody from outside makes a process hang over a step, or err."""
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
    """A frontend no longer wants these."""

    frontend_id: int
    request_ids: list[str]


class SequenceEnded(Value, frozen=True, tag=True):
    """A frontend found the end of one sequence of a request."""

    frontend_id: int
    request_id: str
    attempt: int
    sequence_index: int


class PrefixesNamed(Value, frozen=True, tag=True):
    """A frontend knows of prefixes that are to be pinned."""

    frontend_id: int
    prefixes: list[Prefix]


class PrefixPinned(Value, frozen=True, tag=True):
    """An operator pins a prefix, which `PrefixPins.refusal` lets pass."""

    prefix: Prefix


class PrefixUnpinned(Value, frozen=True, tag=True):
    """An operator unpins a prefix that is pinned."""

    name: str


class ReplicaJoined(Value, frozen=True, tag=True):
    """A worker said hello; `hello.incarnation` becomes the replica's id."""

    hello: WorkerHello


class ReplicaLeft(Value, frozen=True, tag=True):
    """A worker said goodbye, or cannot be reached."""

    replica_id: int
    cause: LossCause
    reason: str


class ReplicaHeard(Value, frozen=True, tag=True):
    """A worker's heartbeat; `draining` if its process is to end."""

    replica_id: int
    draining: bool = False


class WorkerCordoned(Value, frozen=True, tag=True):
    """An operator lets a worker have nothing new, under this registration or a later one."""

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
    """An operator takes what is refused again: the payload of this name, or all."""

    payload: str | None


class StepAnswered(Value, frozen=True, tag=True):
    """A worker's result."""

    replica_id: int
    result: StepResult


class Tick(Value, frozen=True, tag=True):
    """Time has passed; leases and deadlines are looked at."""


Event = (
    FrontendJoined
    | RequestSubmitted
    | LeaseRenewed
    | RequestsAborted
    | SequenceEnded
    | PrefixesNamed
    | PrefixPinned
    | PrefixUnpinned
    | ReplicaJoined
    | ReplicaLeft
    | ReplicaHeard
    | WorkerCordoned
    | WorkerDrained
    | WorkerReadmitted
    | QuarantineCleared
    | StepAnswered
    | Tick
)


class SendToFrontend(Value, frozen=True, tag=True):
    """A message for a frontend."""

    frontend_id: int
    message: ToFrontend


class SendToReplica(Value, frozen=True, tag=True):
    """A message for a replica."""

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


# Effects on their way out of the core.


class Outbox:
    """Effects in the order in which they came about, until they are taken. `epoch` is the one to be named in them."""

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
        """All since the last call."""
        effects, self._effects = self._effects, []
        return effects


# Who is told what the core does. Does nothing by itself; metrics do. The core never asks it anything.


class SchedulerObserver:
    """Called inside the core's turns; must be quick and must not raise. Times are in seconds of the core's clock."""

    def admitted(self, waited_s: float) -> None:
        """A request runs for the first time, so long after it first came to its frontend."""

    def preempted(self, *, swapped: bool) -> None:
        """A request lost its blocks to others: kept in CPU memory, or to be computed again."""

    def replica_lost(self, cause: str) -> None:
        """A worker counts as lost; the value of a `LossCause`."""

    def stalled(self, worker_ids: list[str]) -> None:
        """These workers stand still, and no others: they have work and answer no step."""

    def rejected(self, reason: str) -> None:
        """A request was refused, or given up later; the value of a `RejectReason`."""

    def finished(self, reason: str) -> None:
        """One sequence of a request has ended, or its frontend has found its end; the value of a `FinishReason`."""

    def aborted(self) -> None:
        """A request was dropped before its end: its frontend no longer wants it, or is lost."""

    def traced(self, traceparent: str, event: str) -> None:
        """What has become of the request that is traced by this name: admitted, or the name of a `NoticeKind`."""

    def ended(self, traceparent: str, error: str = "") -> None:
        """Nothing is held any more of the request that is traced by this name; `error` is why, if it was rejected."""

    def prefix_lookup(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time here; so much of its prompt was found computed."""

    def step(self, tokens_computed: int, tokens_sampled: int, sequences: int, seconds: float) -> None:
        """A worker has answered a step that is done, so long after it could begin with it."""
