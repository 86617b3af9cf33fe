"""What requests are told besides their tokens: that they wait and where, that they lost their blocks, that they run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.scheduler.sequence import SequenceGroup
from octavo.wire.requests import Notice, NoticeKind

# Of groups that wait or are swapped out, each in its queue, from 1 on.
Positions = Callable[[list[SequenceGroup]], list[int]]
# Waiting groups whose positions are followed, and the least time between two notices of one's position, in seconds.
_FOLLOWED = 256
_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Told:
    """What a group that waits was told last."""

    position: int
    at: float


class NoticeBoard:
    """Collects what happens in a turn, and says it at its end: by then every position is what it will stay.

    A request is told `QUEUED` once the first pass that planned anything, or found no replica, leaves it waiting; again
    as its position changes, and so is one that was preempted, which waits like others. `PREEMPTED` is told when blocks
    are lost to other requests or with a failed step, `RESUMED` only after something else. The scheduler's own requests
    are told nothing.
    """

    def __init__(self) -> None:
        self._newcomers: dict[SequenceGroup, NoticeKind] = {}
        self._pending: dict[SequenceGroup, NoticeKind] = {}
        # Groups whose frontends know that they wait.
        self._told: dict[SequenceGroup, _Told] = {}
        self._followed_at = float("-inf")

    def __len__(self) -> int:
        return len(self._pending)

    def enters(self, group: SequenceGroup) -> None:
        """A new group waits."""
        self._newcomers[group] = NoticeKind.QUEUED

    def passed(self) -> None:
        """New groups that could be admitted have been."""
        self._pending.update(self._newcomers)
        self._newcomers.clear()

    def stops(self, group: SequenceGroup, kind: NoticeKind) -> None:
        """The group has lost its blocks."""
        if group.frontend_id is not None:
            self._pending[group] = kind

    def runs(self, group: SequenceGroup) -> None:
        """The group has been given its blocks."""
        self._newcomers.pop(group, None)
        if group in self._told:
            self._pending[group] = NoticeKind.RESUMED

    def forget(self, group: SequenceGroup) -> None:
        """Nothing is held for the group any more."""
        for groups in (self._newcomers, self._pending, self._told):
            groups.pop(group, None)

    def follow(self, waiting: Iterable[SequenceGroup], now: float) -> None:
        """Tells the first of those that wait where they are by now, if it is time to."""
        if now - self._followed_at < _INTERVAL_S:
            return
        self._followed_at = now
        for position, group in zip(range(1, _FOLLOWED + 1), waiting, strict=False):
            told = self._told.get(group)
            if told is None or (told.position != position and now - told.at >= _INTERVAL_S):
                self._newcomers.pop(group, None)
                self._pending.setdefault(group, NoticeKind.QUEUED)

    def take(self, positions: Positions, now: float) -> dict[int, list[Notice]]:
        """All that there is to say, by frontend."""
        pending, self._pending = self._pending, {}
        stopped = [group for group, kind in pending.items() if kind is not NoticeKind.RESUMED]
        places = dict(zip(stopped, positions(stopped), strict=True))
        notices: dict[int, list[Notice]] = {}
        for group, kind in pending.items():
            assert group.frontend_id is not None
            place = places.get(group, 0)
            notice = Notice(group.request_id, group.request.attempt, kind, place)
            notices.setdefault(group.frontend_id, []).append(notice)
            self._told.pop(group, None)
            if place:
                self._told[group] = _Told(place, now)
        return notices
