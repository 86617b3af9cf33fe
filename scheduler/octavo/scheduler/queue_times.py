"""Requests that wait for their first admission, and only for so long."""

import bisect
from collections.abc import Collection

from octavo.scheduler.admission import obstacle
from octavo.scheduler.draft import Draft
from octavo.scheduler.replica import Replica
from octavo.scheduler.sequence import SequenceGroup


class QueueTimes:
    """Sorted by the end of their time: to add or remove one moves pointers.

    The age counts from the request's first arrival at its frontend, through all submissions. One that comes again with
    tokens has run before, and may wait; one that comes again without any counts as never admitted, since nothing has
    come of it. (So does a beam search, whose tokens all come at its end.)
    """

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def add(self, group: SequenceGroup) -> None:
        """A group begins to wait; if its time is limited, it is kept in mind."""
        if group.request.max_queue_ms is not None and not group.has_run:
            bisect.insort(self._groups, group, key=_end)

    def discard(self, group: SequenceGroup) -> None:
        """The group is admitted, or dropped."""
        if group.request.max_queue_ms is None or not self._groups:
            return
        place = bisect.bisect_left(self._groups, _end(group), key=_end)
        if place < len(self._groups) and self._groups[place] is group:
            del self._groups[place]

    def overdue(self, now: float) -> list[SequenceGroup]:
        """Those that have waited longer than they may, in the order in which their time ran out."""
        count = 0
        while count < len(self._groups) and _end(self._groups[count])[0] < now:
            count += 1
        return self._groups[:count]


def _end(group: SequenceGroup) -> tuple[float, int]:
    """When it will have waited long enough, on the scheduler's clock; and its own count of submissions."""
    return group.arrival + (group.request.max_queue_ms or 0) / 1000.0, group.order[1]


def describe_wait(group: SequenceGroup, position: int, replicas: Collection[Replica], now: float) -> str:
    """How long a group waited that is `position` in the queue, and for what."""
    limit_s = (group.request.max_queue_ms or 0) / 1000.0
    return (
        f"waited {now - group.arrival:.1f} s of at most {limit_s:.1f} s {_cause(group, position, replicas)}; try again"
        " later, or allow more time in the queue"
    )


def _cause(group: SequenceGroup, position: int, replicas: Collection[Replica]) -> str:
    ready = [replica for replica in replicas if replica.is_ready]
    if not ready:
        return "for a worker: there is none that takes requests"
    if position > 1:
        return f"behind {position - 1} other requests"
    obstacles = [(replica, obstacle(Draft(replica, replica.token_budget), group)) for replica in ready]
    lacking = [
        f"{found.kind.value} of worker {replica.hello.worker_id} ({found.needed} needed, {found.available} available)"
        for replica, found in obstacles
        if found is not None
    ]
    return f"for {', '.join(lacking)}" if lacking else "for its turn"
