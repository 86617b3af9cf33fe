"""Groups that wait for a replica, first come first served."""

import bisect
from collections.abc import Iterator

from octavo.scheduler.sequence import SequenceGroup


class WaitingQueue:
    """Ordered by arrival: a preempted or resubmitted group goes back in front of those that came after it.

    A sorted list: insertion and removal move pointers, which for thousands of groups costs microseconds.
    """

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def add(self, group: SequenceGroup) -> None:
        bisect.insort(self._groups, group, key=lambda waiting: waiting.order)

    def remove(self, group: SequenceGroup) -> None:
        """Raises `ValueError` if the group does not wait."""
        position = bisect.bisect_left(self._groups, group.order, key=lambda waiting: waiting.order)
        if position == len(self._groups) or self._groups[position] is not group:
            raise ValueError(f"request {group.request.request_id} is not waiting")
        del self._groups[position]
