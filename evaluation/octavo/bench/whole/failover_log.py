"""What a scheduler's event log tells of replicas that were lost: when, and what became of their requests."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.scheduler.core.events import Effect, ReplicaLost, SendToFrontend, SendToReplica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.event_log import Began, EventLogError, Handled, Record, Scheduled
from octavo.wire.requests import Deltas
from octavo.wire.steps import StepPlan


@dataclass
class Moved:
    """When a request was in a plan again, and when it had its next token; 0 before."""

    planned_at: float = 0.0
    answered_at: float = 0.0


@dataclass(frozen=True)
class Loss:
    """A replica that was lost at a time, and the requests that ran there."""

    at: float
    moved: dict[str, Moved] = field(default_factory=dict)


def read_losses(records: Iterable[Record]) -> Iterator[Loss]:
    """Feeds a log to a fresh core; gives each loss once all is over. Raises `EventLogError` if it is none."""
    began, *others = records
    if not isinstance(began, Began):
        raise EventLogError("the log does not begin with what made its core")
    reader = _Reader(Scheduler(began.config, began.epoch))
    for record in others:
        reader.take(record)
    yield from reader.losses


class _Reader:
    def __init__(self, core: Scheduler) -> None:
        self.losses: list[Loss] = []
        self._core = core
        # Where requests run, by replica, as it was after the last plan.
        self._running: dict[int, list[str]] = {}

    def take(self, record: Record) -> None:
        match record:
            case Handled(now, event):
                self._follow(self._core.handle(event, now), now)
            case Scheduled(now):
                self._follow(self._core.schedule(now), now)

    def _follow(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case ReplicaLost(replica_id):
                    moved = {request_id: Moved() for request_id in self._running.get(replica_id, [])}
                    self.losses.append(Loss(now, moved))
                case SendToReplica(replica_id, StepPlan() as plan):
                    self._planned(replica_id, plan, now)
                case SendToFrontend(_, Deltas(_, deltas)):
                    for delta in deltas:
                        self._answered(delta.request_id, now)

    def _planned(self, replica_id: int, plan: StepPlan, now: float) -> None:
        groups = self._core.replicas[replica_id].running
        self._running[replica_id] = [group.request_id for group in groups]
        begun = {start.sequence_id for start in plan.starts}
        for group in groups:
            if begun.intersection(sequence.sequence_id for sequence in group.live):
                for loss in self.losses:
                    if (moved := loss.moved.get(group.request_id)) and not moved.planned_at:
                        moved.planned_at = now

    def _answered(self, request_id: str, now: float) -> None:
        for loss in self.losses:
            if (moved := loss.moved.get(request_id)) and not moved.answered_at:
                moved.answered_at = now
