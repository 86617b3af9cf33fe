"""Every request that is held, for whom, and where: in the waiting queue, or on a replica."""

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.notices import NoticeBoard
from octavo.scheduler.observer import SchedulerObserver
from octavo.scheduler.outbox import Outbox
from octavo.scheduler.queue_times import QueueTimes
from octavo.scheduler.replica import Replica
from octavo.scheduler.sequence import SequenceGroup
from octavo.scheduler.suspects import Suspects
from octavo.scheduler.waiting_queue import WaitingQueue
from octavo.wire.requests import NoticeKind, Notices, Rejected, RejectReason, Request


class Ledger:
    """Every move of a group between queues and replicas goes through here, and its end; so do the words about it."""

    def __init__(self, config: SchedulerConfig, outbox: Outbox, observer: SchedulerObserver) -> None:
        self.waiting = WaitingQueue(config.tenant_weights)
        # What is held for each registered frontend, by request id.
        self.held: dict[int, dict[str, SequenceGroup]] = {}
        # Tokens of work in that, as counted at the frontend's latest renewal: counting walks over all that is held.
        self.work_tokens: dict[int, int] = {}
        self.notices = NoticeBoard()
        self.queue_times = QueueTimes()
        self.suspects = Suspects()
        self._replica_of: dict[SequenceGroup, Replica] = {}
        self._outbox = outbox
        self._observer = observer

    @property
    def groups(self) -> list[SequenceGroup]:
        """All that is held for frontends: waiting, running or swapped out."""
        return [group for groups in self.held.values() for group in groups.values()]

    def replica_of(self, group: SequenceGroup) -> Replica | None:
        """Where the group runs, or is swapped out."""
        return self._replica_of.get(group)

    def enter(self, frontend_id: int, group: SequenceGroup) -> None:
        """A new group waits."""
        self.held[frontend_id][group.request_id] = group
        self.waiting.enter(group)
        self.queue_times.add(group)
        self.notices.enters(group)

    def place(self, group: SequenceGroup, replica: Replica) -> None:
        """A waiting group runs from now on."""
        self.waiting.remove(group)
        self.queue_times.discard(group)
        self._replica_of[group] = replica

    def requeue(self, group: SequenceGroup, why: NoticeKind) -> None:
        """A group that was on a replica waits again."""
        del self._replica_of[group]
        self.waiting.resume(group)
        self.stopped(group, why)

    def come_back(self, replica: Replica, group: SequenceGroup) -> None:
        """A group that its replica has evicted starts over: a prefix there, anything else anywhere."""
        if group.prefix_name is None:
            group.former_replica_id = replica.replica_id
            self.requeue(group, NoticeKind.PREEMPTED)
        else:
            replica.prefixes.append(group)

    def stopped(self, group: SequenceGroup, why: NoticeKind) -> None:
        """A group has lost its blocks."""
        self.notices.stops(group, why)
        self._observer.traced(group.request.traceparent, why.name.lower())

    def finish(self, group: SequenceGroup) -> None:
        """A group has ended of itself, and left its replica."""
        del self._replica_of[group]
        self._forget(group)

    def abandon(self, group: SequenceGroup) -> None:
        """Nobody waits for the group any more."""
        self._observer.aborted()
        self.drop(group)

    def drop(self, group: SequenceGroup) -> None:
        """Ends a group wherever it is; its blocks come back once outstanding steps are answered."""
        replica = self._replica_of.pop(group, None)
        if replica is None:
            self.waiting.remove(group)
        else:
            replica.drop(group)
        self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        self.waiting.leave(group)
        self.queue_times.discard(group)
        self.suspects.forget(group)
        self.notices.forget(group)
        self._observer.ended(group.request.traceparent)
        if group.frontend_id is not None:
            del self.held[group.frontend_id][group.request_id]

    def reject(self, group: SequenceGroup, reason: RejectReason, detail: str) -> None:
        """Ends a group that was accepted."""
        assert group.frontend_id is not None
        self.refuse(group.frontend_id, group.request, reason, detail)
        self.drop(group)

    def refuse(self, frontend_id: int, request: Request, reason: RejectReason, detail: str) -> None:
        """Answers a request that is not held, or not any more."""
        self._observer.rejected(reason)
        self._observer.ended(request.traceparent, reason)
        rejected = Rejected(self._outbox.epoch, request.request_id, request.attempt, reason, detail)
        self._outbox.to_frontend(frontend_id, rejected)

    def send_notices(self, now: float) -> None:
        """Tells frontends what has happened to their requests since the last call."""
        if len(self.notices):
            for frontend_id, notices in self.notices.take(self._positions, now).items():
                self._outbox.to_frontend(frontend_id, Notices(self._outbox.epoch, notices))

    def _positions(self, groups: list[SequenceGroup]) -> list[int]:
        """Where groups that wait, or are swapped out, come in their queues, from 1 on."""
        waiting = [group for group in groups if group not in self._replica_of]
        found = dict(zip(waiting, self.waiting.positions(waiting), strict=True))
        return [found.get(group) or self._replica_of[group].swapped.index(group) + 1 for group in groups]

    def check(self, placed: list[SequenceGroup]) -> None:
        """Asserts that every group is in one place, `placed` on replicas or waiting, and counted with its tenant."""
        groups = self.groups
        assert len([group for group in placed if group.prefix_name is None]) + len(self.waiting) == len(groups)
        assert sum(tenant.num_groups for tenant in self.waiting.tenants) == len(groups)
        assert all(tenant.num_groups for tenant in self.waiting.tenants), "an account is kept for nobody"
