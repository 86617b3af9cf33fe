"""Requests that workers have died over: whose doing it may be, and whose it must be.

A request that was being computed when a worker died is accused; at its second death it is a suspect, and from then on
computed alone. What dies over a suspect alone is that one's doing. A request is cleared by computing on: what has
chosen tokens in `STEPS_TO_CLEAR` steps since the last death has passed the point at which that came. And what was taken
for a death is none if the same process comes back: its connection had ended, not the worker.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.scheduler.replica import OutstandingStep
from octavo.scheduler.sequence import SequenceGroup

DEATHS_TO_SUSPECT = 2
STEPS_TO_CLEAR = 8


@dataclass(slots=True)
class _Record:
    """Processes that died over a request, None where that is past doubt; and steps since the last in which it has
    chosen tokens."""

    deaths: list[int | None] = field(default_factory=list)
    steps: int = 0


class Suspects:
    """All requests that are accused. Pinned prefixes never are."""

    def __init__(self) -> None:
        self._records: dict[SequenceGroup, _Record] = {}

    def __contains__(self, group: SequenceGroup) -> bool:
        """Whether the group is to be computed alone."""
        record = self._records.get(group)
        return record is not None and len(record.deaths) >= DEATHS_TO_SUSPECT

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (group for group in self._records if group in self)

    def died(self, steps: Iterable[OutstandingStep], process: int | None = None) -> SequenceGroup | None:
        """A worker has died with these steps outstanding, unless its `process` comes back; the suspect whose doing it
        is, if that is certain."""
        groups = list(dict.fromkeys(group for step in steps for group in step.groups))
        if len(groups) == 1 and groups[0] in self:
            return groups[0]
        for group in groups:
            if group.prefix_name is None and not group.is_finished:
                record = self._records.setdefault(group, _Record())
                record.deaths.append(process)
                record.steps = 0
        return None

    def absolve(self, process: int) -> None:
        """The process has not died."""
        for group, record in list(self._records.items()):
            record.deaths = [death for death in record.deaths if death != process]
            if not record.deaths:
                del self._records[group]

    def computed(self, step: OutstandingStep) -> None:
        """A step is done."""
        if self._records:
            for group in dict.fromkeys(group for group, _ in (*step.samplers, *step.beams)):
                self._credit(group)

    def _credit(self, group: SequenceGroup) -> None:
        if record := self._records.get(group):
            record.steps += 1
            if record.steps >= STEPS_TO_CLEAR:
                del self._records[group]

    def forget(self, group: SequenceGroup) -> None:
        """The group has ended."""
        self._records.pop(group, None)
