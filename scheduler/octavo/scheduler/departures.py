"""Workers that get no new requests, for as long as an operator says or until they are let go."""

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.fleet import Fleet
from octavo.scheduler.ledger import Ledger
from octavo.scheduler.replica import Replica
from octavo.scheduler.sequence import SequenceGroup
from octavo.wire.requests import NoticeKind


class Departures:
    """Cordons, and drains from their beginning to the dismissal."""

    def __init__(self, config: SchedulerConfig, ledger: Ledger, fleet: Fleet) -> None:
        self._config = config
        self._ledger = ledger
        self._fleet = fleet

    def cordon(self, worker_id: str) -> None:
        """The worker of this name gets nothing new, under this registration or a later one."""
        self._fleet.cordoned.add(worker_id)
        if replica := self._fleet.of_worker(worker_id):
            replica.is_cordoned = True

    def drain(self, worker_id: str, grace_s: float | None, now: float) -> None:
        """The worker of this name gets nothing new and is let go once it holds nothing; what runs there for longer than
        `grace_s` is moved."""
        if replica := self._fleet.of_worker(worker_id):
            replica.drain_until = now + (self._config.drain_grace_s if grace_s is None else grace_s)

    def wants_to_leave(self, replica: Replica, now: float) -> None:
        """The worker says, at every beat, that it is to end."""
        replica.wants_to_leave = True
        if replica.drain_until is None:
            replica.drain_until = now + self._config.drain_grace_s

    def readmit(self, worker_id: str) -> None:
        """The worker of this name gets requests again."""
        self._fleet.cordoned.discard(worker_id)
        if replica := self._fleet.of_worker(worker_id):
            replica.is_cordoned = replica.is_paused = False
            replica.drain_until = None

    def see_off(self, now: float) -> None:
        """Takes every drain as far as it goes now."""
        for replica in [each for each in self._fleet.replicas.values() if each.drain_until is not None]:
            self._see_off(replica, now)

    def _see_off(self, replica: Replica, now: float) -> None:
        assert replica.drain_until is not None
        moving = self._movable(replica) if now >= replica.drain_until else []
        # What moves, and a worker that ends, must be in no step.
        replica.is_paused = bool(moving) or self._is_done(replica)
        if not replica.is_paused or replica.outstanding:
            return
        for group in moving:
            self._move(replica, group)
        # What is left can go on at once.
        replica.is_paused = False
        if self._is_done(replica):
            self._fleet.dismiss(replica)

    def _movable(self, replica: Replica) -> list[SequenceGroup]:
        return [group for group in replica.requests if self._fleet.has_ready_home(group)]

    def _is_done(self, replica: Replica) -> bool:
        """Whether it holds no request, and none waits that has lost its blocks there and can go on nowhere else."""
        return not replica.requests and not any(self._fleet.takes(replica, group) for group in self._ledger.waiting)

    def _move(self, replica: Replica, group: SequenceGroup) -> None:
        group.preemptions += 1
        replica.evict(group)
        self._ledger.requeue(group, NoticeKind.PREEMPTED)
