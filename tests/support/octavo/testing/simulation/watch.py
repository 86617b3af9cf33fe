"""Checks what must be true of the scheduler's doings, as they happen, and counts how often each kind of thing
happened."""

from collections import Counter

from octavo.scheduler.core.events import (
    DiskAnswered,
    Effect,
    FrontendLost,
    LossCause,
    PrefixPinned,
    PrefixUnpinned,
    PullAnswered,
    ReplicaDismissed,
    ReplicaHeard,
    ReplicaJoined,
    ReplicaLost,
    RequestsAborted,
    RequestSubmitted,
    SendToFrontend,
    SequenceEnded,
    StepAnswered,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.server.event_log import Began, Handled, Planned, Record
from octavo.testbed.history import Event, HeldLoad, Left, RequestsHeld
from octavo.testbed.judge import Judge
from octavo.testing.oracles.router_index import RouterIndex
from octavo.testing.simulation.device import INJECTED
from octavo.testing.simulation.harm import Harm
from octavo.testing.simulation.network import Network
from octavo.wire.base import NULL_BLOCK
from octavo.wire.requests import LEASE_S, Notices, PinRefused, Rejected, RejectReason
from octavo.wire.steps import StepOutcome, StepPlan, StepResult

# Nothing is done for a client that has been gone for so long, whatever happens; and if nothing does.
_ZOMBIE_S = 20.0
_CALM_ZOMBIE_S = LEASE_S
# How long it takes at most until a worker is lost whose connection has ended.
_UNREACHABLE_S = 0.5
# The longest that a scheduler which is awake lets pass between two turns.
_LONGEST_NAP_S = 0.2
_ROUNDING_MS = 0.001

# Of a request: its frontend, and its name there.
Key = tuple[int, str]


class Watch:
    """Counts and judges. It outlives schedulers."""

    def __init__(self, network: Network, *, is_calm: bool) -> None:
        self.counts = network.counts
        self.harm = Harm(network.clock, network.counts)
        # Before the cell stands a router.
        self.router = RouterIndex()
        self._network = network
        # By incarnation.
        self._place_of: dict[int, str] = {}
        self._judge = Judge(held_s=_CALM_ZOMBIE_S if is_calm else _ZOMBIE_S)
        # How long schedulers were awake: the judge's time, for they can do nothing about a client while they are not.
        self.awake_s = 0.0
        self._turned_at = 0.0
        # Since when replicas cannot be reached.
        self._unreachable: dict[int, float] = {}
        # Attempts that ran, by frontend.
        self._admitted: set[tuple[int, str, int]] = set()
        # Incarnations that a scheduler has given up; and plans that are not answered, by incarnation.
        self._gone: set[int] = set()
        self._outstanding: Counter[int] = Counter()
        # Workers that get nothing new, by name; and incarnations that are to end.
        self._cordoned: set[str] = set()
        self._draining: set[int] = set()

    def see(self, event: Event) -> None:
        """Shows the judge an event. Raises `AssertionError` where that is wrong."""
        self._judge.take(event)
        self._assert_good()

    def went(self, frontend_id: int, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self.harm.went_at = self._network.clock.now
        self.see(Left(self.awake_s, (frontend_id, request_id)))

    def rest(self, core: Scheduler) -> None:
        """The run is over."""
        self._judge.take(
            HeldLoad(self.awake_s, len(core.groups), sum(_num_held(replica) for replica in core.replicas.values()))
        )
        self._judge.end(self.awake_s)
        self._assert_good()

    def _assert_good(self) -> None:
        assert not self._judge.faults, str(self._judge.faults[0])

    def turned(self, core: Scheduler, unreachable: set[int]) -> None:
        """The scheduler has done all that was due. Replicas that it cannot reach are not its own for long."""
        now = self._network.clock.now
        self.awake_s += min(now - self._turned_at, _LONGEST_NAP_S)
        self._turned_at = now
        self._unreachable = {each: self._unreachable.get(each, self.awake_s) for each in unreachable}
        longest_s = self.awake_s - min(self._unreachable.values(), default=self.awake_s)
        assert longest_s <= _UNREACHABLE_S, f"a connection ended {longest_s:.1f} s ago, and its worker is not lost"
        self.see(RequestsHeld(self.awake_s, _held(core)))

    def record(self, record: Record) -> None:
        """Checks a record that the shell writes."""
        match record:
            case Handled(_, StepAnswered(replica_id, result)):
                self._check_current(replica_id)
                self._answered(result)
            case Handled(_, DiskAnswered(replica_id, answer)):
                self._check_current(replica_id)
                self.counts["blocks found on a disk"] += sum(answer.found)
                self.counts["blocks not found on a disk"] += len(answer.found) - sum(answer.found)
            case Handled(_, PullAnswered(replica_id, pull)):
                self._check_current(replica_id)
                self.counts["requests copied" if pull.is_complete else "copies that failed"] += 1
            case Handled(_, ReplicaHeard(replica_id, draining)):
                self._check_current(replica_id)
                self._draining |= {replica_id} if draining else set()
            case Handled(_, ReplicaJoined(hello)):
                self._place_of[hello.incarnation] = hello.worker_id
            case Handled(_, WorkerCordoned() | WorkerDrained() | WorkerReadmitted() as event):
                self.counts[type(event).__name__] += 1
                self._operated(event)
            case Began():
                # An operator's word holds for one scheduler.
                self._cordoned.clear()
                self._draining.clear()
            case Handled(_, RequestSubmitted(_, request)):
                self.counts["resubmissions"] += request.resubmitted
                self.counts["resubmissions with tokens"] += any(known.token_ids for known in request.generated)
            case Handled(_, RequestsAborted() | SequenceEnded() | PrefixPinned() | PrefixUnpinned() as event):
                self.counts[type(event).__name__] += 1
            case Planned(plan):
                self._planned(plan)

    def _operated(self, event: WorkerCordoned | WorkerDrained | WorkerReadmitted) -> None:
        incarnations = {each for each, place in self._place_of.items() if place == event.worker_id}
        match event:
            case WorkerCordoned():
                self._cordoned.add(event.worker_id)
            case WorkerDrained():
                self._draining |= incarnations
            case WorkerReadmitted():
                self._cordoned.discard(event.worker_id)
                self._draining -= incarnations

    def effects(self, effects: list[Effect]) -> None:
        """Checks the effects that the core asks for."""
        for effect in effects:
            match effect:
                case ReplicaLost(replica_id, cause, reason):
                    self._lost(replica_id, cause, reason)
                case ReplicaDismissed(replica_id):
                    self._dismissed(replica_id)
                case FrontendLost():
                    self.counts["frontends lost"] += 1
                case SendToFrontend(_, Notices(_, notices)):
                    self.counts.update(f"told: {notice.kind.value}" for notice in notices)
                case SendToFrontend(frontend_id, Rejected() as message):
                    self._rejected(frontend_id, message)
                case SendToFrontend(_, PinRefused()):
                    self.counts["PinRefused"] += 1

    def admitted(self, group: RequestGroup, replica: Replica, now: float) -> None:
        """A scheduler gives a request to a replica."""
        request = group.request
        is_closed = replica.hello.worker_id in self._cordoned or replica.replica_id in self._draining
        assert not is_closed or group.former_replica_id == replica.replica_id, (
            f"{request.request_id} comes to {replica.hello.worker_id}, which is to get nothing new"
        )
        if request.max_queue_ms is not None and not group.has_run:
            waited_ms = 1000 * (now - group.arrival)
            assert waited_ms <= request.max_queue_ms + _ROUNDING_MS, f"{request.request_id} runs past its time"
        self._admitted.add((group.frontend_id, request.request_id, request.attempt))

    def _rejected(self, frontend_id: int, message: Rejected) -> None:
        self.counts["Rejected"] += 1
        if message.reason is RejectReason.QUEUE_TIMEOUT:
            key = (frontend_id, message.request_id, message.attempt)
            assert key not in self._admitted, f"{message.request_id} ran, and is said to have waited too long"

    def _check_current(self, replica_id: int) -> None:
        assert replica_id not in self._gone, f"replica {replica_id:x} is heard, which was given up"

    def _answered(self, result: StepResult) -> None:
        self._outstanding[result.incarnation] -= 1
        self.counts[f"steps {result.outcome.value}"] += 1
        self.counts["sequences failed"] += len(result.failed)
        self.counts["drafts that were right"] += len(result.further)
        if result.outcome is StepOutcome.FAILED and not result.detail.startswith(INJECTED):
            # Where a plan was lost, what builds on it must fail.
            assert self._was_noisy(result.incarnation), f"a plan failed of itself: {result.detail}"

    def _dismissed(self, replica_id: int) -> None:
        self.counts["replicas dismissed"] += 1
        self._gone.add(replica_id)
        assert not self._outstanding[replica_id], f"replica {replica_id:x} is let go with a step to answer"

    def _lost(self, replica_id: int, cause: LossCause, reason: str) -> None:
        self.counts["replicas lost"] += 1
        self.counts[f"replicas lost: {cause.value}"] += 1
        is_chance = replica_id not in self.harm.poisoned_workers
        self.counts["replicas lost by chance"] += cause.is_death and is_chance
        self.counts["replicas lost by chance over a step"] += cause.is_explained and is_chance
        self._gone.add(replica_id)
        if "not asked" in reason:
            assert self._was_noisy(replica_id), f"replica {replica_id:x} was lost: {reason}"

    def _was_noisy(self, incarnation: int) -> bool:
        return self._network.link(self._place_of[incarnation]).was_noisy

    def _planned(self, plan: StepPlan) -> None:
        self._outstanding[plan.incarnation] += 1
        if plan.disk is not None:
            self.counts["blocks stored on a disk"] += len(plan.disk.store)
            self.counts["disks cleared"] += plan.disk.clear
        self.counts.update(
            {
                "plans": 1,
                "starts": len(plan.starts),
                "forks": len(plan.forks),
                "remaps": len(plan.remaps),
                "copies": len(plan.moves.copy),
                "drafts": len(plan.drafts),
                "proposals": len(plan.proposals),
                "swap outs": len(plan.moves.swap_out),
                "swap ins": len(plan.moves.swap_in),
                "prefix hits": sum(start.num_computed > 0 for start in plan.starts),
                "windows passed": sum(NULL_BLOCK in ids for work in plan.work for ids in work.new_block_ids),
            }
        )


def _held(core: Scheduler) -> list[Key]:
    """The requests that wait, run or are swapped out, each as often as it does."""
    groups = [*core.waiting, *(group for replica in core.replicas.values() for group in replica.requests)]
    return [(group.frontend_id, group.request_id) for group in groups]


def _num_held(replica: Replica) -> int:
    """Blocks, on the device and in CPU memory, that are neither free nor pinned."""
    kv = replica.kv
    # A disk or a worker that never answers keeps what it was given.
    num_reading = kv.num_arriving
    return kv.num_blocks - kv.num_free - kv.num_pinned + kv.num_cpu_blocks - kv.num_cpu_free - num_reading
