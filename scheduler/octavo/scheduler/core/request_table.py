"""The requests that are held, for which frontend and on which replica; and the progress notices sent besides tokens."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import Outbox, SchedulerObserver
from octavo.scheduler.core.faults.poison import PoisonDetector
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup, SequenceGroup
from octavo.scheduler.core.waiting_queue import QueueTimes, WaitingQueue
from octavo.wire.requests import Notice, NoticeKind, Notices, Rejected, RejectReason, Request

# Finds the positions of groups that wait or are swapped out, each in its queue, from 1 on.
Positions = Callable[[list[RequestGroup]], list[int]]
# The number of waiting groups whose positions are followed, and the least seconds between two notices of a position.
_FOLLOWED = 256
_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _SentNotice:
    """The last notice to a group that waits: its position in the queue, from 1 on, and when it was sent."""

    position: int
    at: float


class ProgressNotices:
    """Collects what happens to groups in a turn, and sends it at the end of the turn: by then every position is final.

    A request gets `QUEUED` once the first pass that planned anything, or found no replica, leaves it waiting, and again
    as its position changes; so does a preempted one, which waits like others. It gets `PREEMPTED` when its blocks are
    lost to other requests or with a failed step, and `RESUMED` only after one of these. The scheduler's own requests
    get none.
    """

    def __init__(self) -> None:
        self._newcomers: dict[RequestGroup, NoticeKind] = {}
        # What the end of the turn is to send.
        self.pending: dict[RequestGroup, NoticeKind] = {}
        # The last notices about groups whose frontends know that they wait.
        self._sent: dict[RequestGroup, _SentNotice] = {}
        self._followed_at = float("-inf")

    def enters(self, group: RequestGroup) -> None:
        """Notes that a new group waits."""
        self._newcomers[group] = NoticeKind.QUEUED

    def passed(self) -> None:
        """Notes that a planning pass is over: new groups that could be admitted have been."""
        self.pending.update(self._newcomers)
        self._newcomers.clear()

    def stops(self, group: RequestGroup, kind: NoticeKind) -> None:
        """Notes that a group has lost its blocks."""
        self.pending[group] = kind

    def runs(self, group: RequestGroup) -> None:
        """Notes that a group has been given its blocks."""
        self._newcomers.pop(group, None)
        if group in self._sent:
            self.pending[group] = NoticeKind.RESUMED

    def forget(self, group: RequestGroup) -> None:
        """Drops all notes about a group that is no longer held."""
        for groups in (self._newcomers, self.pending, self._sent):
            groups.pop(group, None)

    def follow(self, waiting: Iterable[RequestGroup], now: float) -> None:
        """Queues notices of new positions for the first of the waiting groups, at most once a second."""
        if now - self._followed_at < _INTERVAL_S:
            return
        self._followed_at = now
        for position, group in zip(range(1, _FOLLOWED + 1), waiting, strict=False):
            last = self._sent.get(group)
            if last is None or (last.position != position and now - last.at >= _INTERVAL_S):
                self._newcomers.pop(group, None)
                self.pending.setdefault(group, NoticeKind.QUEUED)

    def take(self, positions: Positions, now: float) -> dict[int, list[Notice]]:
        """Returns the notices that are due, by frontend id, and forgets them."""
        pending, self.pending = self.pending, {}
        stopped = [group for group, kind in pending.items() if kind is not NoticeKind.RESUMED]
        places = dict(zip(stopped, positions(stopped), strict=True))
        notices: dict[int, list[Notice]] = {}
        for group, kind in pending.items():
            place = places.get(group, 0)
            notice = Notice(group.request_id, group.request.attempt, kind, place)
            notices.setdefault(group.frontend_id, []).append(notice)
            self._sent.pop(group, None)
            if place:
                self._sent[group] = _SentNotice(place, now)
        return notices


class RequestTable:
    """Holds every request, and moves groups between queues and replicas: every such move goes through here, and so does
    the end of a group, of which `on_end` is told, and every notice about it."""

    def __init__(
        self,
        config: SchedulerConfig,
        outbox: Outbox,
        observer: SchedulerObserver,
        on_end: Callable[[RequestGroup], None],
    ) -> None:
        self.waiting = WaitingQueue(config.tenant_weights)
        # Groups that are held for each registered frontend, by request id.
        self.held: dict[int, dict[str, RequestGroup]] = {}
        # Tokens of work of each frontend's groups, as counted at the frontend's latest renewal: counting walks over all
        # that is held.
        self.work_tokens: dict[int, int] = {}
        self.notices = ProgressNotices()
        self.queue_times = QueueTimes()
        self.suspects = PoisonDetector()
        self._replica_of: dict[RequestGroup, Replica] = {}
        self._outbox = outbox
        self._observer = observer
        self._on_end = on_end

    @property
    def groups(self) -> list[RequestGroup]:
        """Returns all groups that are held for frontends: waiting, running or swapped out."""
        return [group for groups in self.held.values() for group in groups.values()]

    @property
    def num_placed(self) -> int:
        """Counts the groups that run or are swapped out."""
        return len(self._replica_of)

    def replica_of(self, group: RequestGroup) -> Replica | None:
        """Returns the replica where `group` runs or is swapped out; None if it waits."""
        return self._replica_of.get(group)

    def enter(self, frontend_id: int, group: RequestGroup) -> None:
        """Adds a new group, which waits."""
        self.held[frontend_id][group.request_id] = group
        self.waiting.enter(group)
        self.queue_times.add(group)
        self.notices.enters(group)

    def place(self, group: RequestGroup, replica: Replica) -> None:
        """Moves a waiting group to `replica`, where it runs."""
        self.waiting.remove(group)
        self.queue_times.discard(group)
        self._replica_of[group] = replica

    def move(self, group: RequestGroup, replica: Replica) -> None:
        """Moves a group to another replica, which holds its blocks."""
        self._replica_of[group] = replica

    def requeue(self, group: RequestGroup, why: NoticeKind) -> None:
        """Moves a group from its replica back to the waiting queue."""
        del self._replica_of[group]
        self.waiting.resume(group)
        self.stopped(group, why)

    def come_back(self, replica: Replica, group: SequenceGroup) -> None:
        """Lets a group that `replica` has evicted start over: a prefix there, any other group anywhere."""
        if isinstance(group, RequestGroup):
            group.former_replica_id = replica.replica_id
            self.requeue(group, NoticeKind.PREEMPTED)
        else:
            replica.recompute_prefix(group)

    def stopped(self, group: RequestGroup, why: NoticeKind) -> None:
        """Reports that a group has lost its blocks, and `why`."""
        self.notices.stops(group, why)
        self._observer.traced(group.request.traceparent, why.name.lower())

    def finish(self, group: RequestGroup) -> None:
        """Forgets a group that has ended of itself and left its replica."""
        del self._replica_of[group]
        self._forget(group)

    def abandon(self, group: RequestGroup) -> None:
        """Ends a group that no frontend waits for any more."""
        self._observer.aborted()
        self.drop(group)

    def drop(self, group: RequestGroup) -> None:
        """Ends a group, running, swapped out or waiting; its blocks come back once outstanding steps are answered."""
        replica = self._replica_of.pop(group, None)
        if replica is None:
            self.waiting.remove(group)
        else:
            replica.drop(group)
        self._forget(group)

    def _forget(self, group: RequestGroup) -> None:
        self.waiting.leave(group)
        self.queue_times.discard(group)
        self.suspects.forget(group)
        self.notices.forget(group)
        self._observer.ended(group.request.traceparent)
        self._on_end(group)
        del self.held[group.frontend_id][group.request_id]

    def reject(self, group: RequestGroup, reason: RejectReason, detail: str) -> None:
        """Ends a group that was accepted, and reports the reason to its frontend."""
        self.refuse(group.frontend_id, group.request, reason, detail)
        self.drop(group)

    def refuse(self, frontend_id: int, request: Request, reason: RejectReason, detail: str) -> None:
        """Reports to the frontend why a request is not held, or not any more."""
        self._observer.rejected(reason)
        self._observer.ended(request.traceparent, reason)
        rejected = Rejected(self._outbox.epoch, request.request_id, request.attempt, reason, detail)
        self._outbox.to_frontend(frontend_id, rejected)

    def send_notices(self, now: float) -> None:
        """Sends frontends what has happened to their requests since the last call."""
        for frontend_id, notices in self.notices.take(self._positions, now).items():
            self._outbox.to_frontend(frontend_id, Notices(self._outbox.epoch, notices))

    def _positions(self, groups: list[RequestGroup]) -> list[int]:
        """Returns each group's position, from 1 on, in the queue where it waits or is swapped out."""
        waiting = [group for group in groups if group not in self._replica_of]
        found = dict(zip(waiting, self.waiting.positions(waiting), strict=True))
        return [found.get(group) or self._replica_of[group].swapped.index(group) + 1 for group in groups]

    def check(self, num_placed: int) -> None:
        """Asserts that every group is in one place, of `num_placed` on replicas or waiting, and counted with its
        tenant."""
        groups = self.groups
        assert num_placed + len(self.waiting) == len(groups)
        assert sum(tenant.num_groups for tenant in self.waiting.tenants) == len(groups)
        assert all(tenant.num_groups for tenant in self.waiting.tenants), "an account is kept for nobody"
