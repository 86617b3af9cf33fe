"""What must be true of the scheduler's doings, looked at as they happen; and how often each kind of thing happened."""

from collections import Counter

from octavo.scheduler.event_log import Handled, Planned, Record
from octavo.scheduler.events import (
    Effect,
    FrontendLost,
    PrefixPinned,
    PrefixUnpinned,
    ReplicaJoined,
    ReplicaLost,
    RequestsAborted,
    RequestSubmitted,
    SendToFrontend,
    SequenceEnded,
    StepAnswered,
)
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import SequenceGroup
from octavo.testing.simulation.network import Network
from octavo.testing.simulation.worker_process import INJECTED
from octavo.wire.base import NULL_BLOCK
from octavo.wire.requests import Notices, PinRefused, Rejected, RejectReason
from octavo.wire.steps import StepOutcome, StepPlan, StepResult
from octavo.worker.sequences import WorkerSequence

# Nothing is done for a client that has been gone for so long.
_ZOMBIE_S = 20.0
# The longest that a scheduler which is awake lets pass between two turns.
_LONGEST_NAP_S = 0.2
_ROUNDING_MS = 0.001

# Of a request: its frontend, and its name there.
Key = tuple[int, str]


class Watch:
    """Counts and judges. It outlives schedulers."""

    def __init__(self, network: Network) -> None:
        self.counts = network.counts
        self._network = network
        # By incarnation.
        self._place_of: dict[int, str] = {}
        # When clients went, in seconds that schedulers were awake.
        self._gone: dict[Key, float] = {}
        self._awake_s = 0.0
        # Prompts and seeds of sequences that got NaN.
        self._spoiled: set[tuple[tuple[int, ...], int]] = set()
        self._turned_at = 0.0
        # Attempts that ran, by frontend.
        self._admitted: set[tuple[int, str, int]] = set()

    def came(self, frontend_id: int, request_id: str) -> None:
        """A client waits for this request."""
        self._gone.pop((frontend_id, request_id), None)

    def went(self, frontend_id: int, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self._gone[frontend_id, request_id] = self._awake_s

    def spoiled(self, sequence: WorkerSequence) -> None:
        """A device has spoiled what it computed of a sequence."""
        self.counts["sequences spoiled"] += 1
        self._spoiled.add((tuple(sequence.token_ids[: sequence.prompt_length]), sequence.sampling.seed))

    def was_spoiled(self, prompt_token_ids: list[int], seed: int) -> bool:
        """Whether that ever happened to a request with this prompt and seed."""
        return (tuple(prompt_token_ids), seed) in self._spoiled

    def turned(self, core: Scheduler) -> None:
        """The scheduler has done all that was due."""
        now = self._network.clock.now
        self._awake_s += min(now - self._turned_at, _LONGEST_NAP_S)
        self._turned_at = now
        for key, count in _held(core).items():
            assert count == 1, f"{key} is held {count} times"
            gone_s = self._awake_s - self._gone.get(key, self._awake_s)
            assert gone_s <= _ZOMBIE_S, f"{key} is still held, but for {gone_s:.1f} s nobody has waited for it"

    def record(self, record: Record) -> None:
        """What the shell writes down."""
        match record:
            case Handled(_, StepAnswered(_, result)):
                self._answered(result)
            case Handled(_, ReplicaJoined(hello)):
                self._place_of[hello.incarnation] = hello.worker_id
            case Handled(_, RequestSubmitted(_, request)):
                self.counts["resubmissions"] += request.resubmitted
                self.counts["resubmissions with tokens"] += any(known.token_ids for known in request.generated)
            case Handled(_, RequestsAborted() | SequenceEnded() | PrefixPinned() | PrefixUnpinned() as event):
                self.counts[type(event).__name__] += 1
            case Planned(plan):
                self._planned(plan)

    def effects(self, effects: list[Effect]) -> None:
        """What the core wants done."""
        for effect in effects:
            match effect:
                case ReplicaLost(replica_id, reason):
                    self._lost(replica_id, reason)
                case FrontendLost():
                    self.counts["frontends lost"] += 1
                case SendToFrontend(_, Notices(_, notices)):
                    self.counts.update(f"told: {notice.kind.value}" for notice in notices)
                case SendToFrontend(frontend_id, Rejected() as message):
                    self._rejected(frontend_id, message)
                case SendToFrontend(_, PinRefused()):
                    self.counts["PinRefused"] += 1

    def admitted(self, group: SequenceGroup, now: float) -> None:
        """A scheduler gives a request to a replica."""
        request = group.request
        assert group.frontend_id is not None
        if request.max_queue_ms is not None and not group.has_run:
            waited_ms = 1000 * (now - group.arrival)
            assert waited_ms <= request.max_queue_ms + _ROUNDING_MS, f"{request.request_id} runs past its time"
        self._admitted.add((group.frontend_id, request.request_id, request.attempt))

    def _rejected(self, frontend_id: int, message: Rejected) -> None:
        self.counts["Rejected"] += 1
        if message.reason is RejectReason.QUEUE_TIMEOUT:
            key = (frontend_id, message.request_id, message.attempt)
            assert key not in self._admitted, f"{message.request_id} ran, and is said to have waited too long"

    def _answered(self, result: StepResult) -> None:
        self.counts[f"steps {result.outcome.value}"] += 1
        self.counts["sequences failed"] += len(result.failed)
        if result.outcome is StepOutcome.FAILED and not result.detail.startswith(INJECTED):
            # Where a plan was lost, what builds on it must fail.
            assert self._was_noisy(result.incarnation), f"a plan failed of itself: {result.detail}"

    def _lost(self, replica_id: int, reason: str) -> None:
        self.counts["replicas lost"] += 1
        if "not asked" in reason:
            assert self._was_noisy(replica_id), f"replica {replica_id:x} was lost: {reason}"

    def _was_noisy(self, incarnation: int) -> bool:
        return self._network.link(self._place_of[incarnation]).was_noisy

    def _planned(self, plan: StepPlan) -> None:
        self.counts.update(
            {
                "plans": 1,
                "starts": len(plan.starts),
                "forks": len(plan.forks),
                "remaps": len(plan.remaps),
                "copies": len(plan.moves.copy),
                "swap outs": len(plan.moves.swap_out),
                "swap ins": len(plan.moves.swap_in),
                "prefix hits": sum(start.num_computed > 0 for start in plan.starts),
                "windows passed": sum(NULL_BLOCK in ids for work in plan.work for ids in work.new_block_ids),
            }
        )


def _held(core: Scheduler) -> Counter[Key]:
    """How often each request waits, runs or is swapped out."""
    placed = [group for replica in core.replicas.values() for group in (*replica.running, *replica.swapped)]
    groups = (*core.waiting, *placed)
    return Counter((group.frontend_id, group.request_id) for group in groups if group.frontend_id is not None)
