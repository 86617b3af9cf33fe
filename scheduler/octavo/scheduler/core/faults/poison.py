"""Requests that workers have died over: who is a suspect, who is guilty, and which payloads are refused for a while."""

import enum
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.wire.requests import Request
from octavo.wire.steps import Ending, Predecessor

# Beyond this many the oldest are let go.
MAX_PAYLOADS = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """A payload that is refused: its hash in hexadecimal, the request that asked for it, the length of its prompt, and
    until when (scheduler's clock) and why."""

    payload: str
    request_id: str
    num_prompt_tokens: int
    until: float
    why: str


class Quarantine:
    """Payloads that are refused for `seconds` each, by hash: under whatever id and for whichever frontend they come
    again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Entries expire in the order in which they were added.
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self, now: float) -> list[Entry]:
        """Returns the payloads that are refused now, the oldest first."""
        self._release(now)
        return list(self._entries.values())

    def add(self, request: Request, now: float, why: str) -> None:
        """Refuses the payload of `request` from now on."""
        payload = _payload(request)
        self._entries.pop(payload, None)
        entry = Entry(payload.hex(), request.request_id, len(request.prompt_token_ids), now + self._seconds, why)
        self._entries[payload] = entry
        if len(self._entries) > MAX_PAYLOADS:
            del self._entries[next(iter(self._entries))]

    def clear(self, payload: str | None) -> None:
        """Accepts the payload of this hash again, or every one if it is None. An unknown hash changes nothing."""
        self._entries = {key: entry for key, entry in self._entries.items() if payload not in (None, entry.payload)}

    def refusal(self, request: Request, now: float) -> str | None:
        """Returns why `request` is refused; None if it is not."""
        self._release(now)
        # Hashing takes time, and there is hardly ever a reason.
        entry = self._entries.get(_payload(request)) if self._entries else None
        if entry is None:
            return None
        return (
            "workers have died over the same prompt with the same parameters, at last over nothing else;"
            f" it is refused for another {math.ceil(entry.until - now)} s, unless an operator clears {entry.payload}"
        )

    def _release(self, now: float) -> None:
        while self._entries and self._entries[oldest := next(iter(self._entries))].until <= now:
            del self._entries[oldest]


def _payload(request: Request) -> bytes:
    """Hashes what is computed for a request, without the seed: every submission may draw another."""
    content = request.prompt_token_ids, msgspec.structs.replace(request.sampling, seed=0), request.cache_key.adapter
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


# A request that was being computed when a worker died is accused; at its second death it is a suspect, and from then on
# computed alone. A request is cleared by computing on: once it has chosen tokens in `STEPS_TO_CLEAR` steps since the
# last death, it has passed the point at which that came.
#
# How a worker died is mostly not known when it is gone. A worker that hung, or erred, did so over what it computed. If
# its connection has ended, the next worker of its name reports how (`Predecessor`): it crashed, and that accuses; or
# something killed it from outside, or the same process comes back, and then nobody is accused. A suspect that may be
# guilty waits for that report. Where it does not come in time, or nobody knows, the death is unexplained; so is the
# death of a worker that was killed while its step had taken long, for it may have been killed because it hung.
#
# A suspect is guilty of the death of a worker that computed nothing else, if that worker crashed, and if different
# workers have crashed wherever more than one took the suspect: one alone may be broken itself. Unexplained deaths may
# all come from outside, so it takes `UNEXPLAINED_TO_CONVICT` before they count as well: a request that ends every
# worker it meets must end at last.


DEATHS_TO_SUSPECT = 2
DEATHS_TO_CONVICT = 3
UNEXPLAINED_TO_CONVICT = 6
STEPS_TO_CLEAR = 8


class Verdict(enum.Enum):
    """States of the question whether the computation may have killed the worker: OPEN until someone has reported how it
    died; CRASHED if it crashed or hung, so that it may; UNEXPLAINED if nobody will ever report it."""

    OPEN = enum.auto()
    CRASHED = enum.auto()
    UNEXPLAINED = enum.auto()


@dataclass(eq=False, slots=True)
class Death:
    """The death of a worker that registered as `process`, and `how` it died as far as that is known."""

    worker_id: str
    process: int
    at: float
    how: str
    verdict: Verdict = Verdict.OPEN
    # The worker's step had taken long by then: it may have been killed because it hung.
    is_late: bool = False
    # One request alone was being computed.
    is_alone: bool = False

    def __str__(self) -> str:
        return f"{self.worker_id} ({self.how})"


@dataclass(slots=True)
class _Record:
    """A group's deaths; the steps in which it has chosen tokens since the last of them; and whether its last isolation
    was on a worker that had not died over it."""

    deaths: list[Death] = field(default_factory=list)
    steps: int = 0
    had_fresh_worker: bool = False


class PoisonDetector:
    """Judges the requests that were being computed when workers died. Pinned prefixes are never accused.

    Iterating yields the suspects, `guilty` returns the convicted. Only the death of a worker that computed nothing else
    can convict a group: `Isolation` gives each suspect a replica of its own, and reports by `goes_to` which. The
    replica table reports deaths (`died`) and processes that come back (`came_back`), step results report steps that are
    done (`computed`).
    """

    def __init__(self) -> None:
        self._records: dict[RequestGroup, _Record] = {}
        self._open: list[Death] = []

    def __contains__(self, group: RequestGroup) -> bool:
        """Tells whether the group is a suspect, which is to be computed alone."""
        record = self._records.get(group)
        return record is not None and len(record.deaths) >= DEATHS_TO_SUSPECT

    def __iter__(self) -> Iterator[RequestGroup]:
        return (group for group in self._records if group in self)

    @property
    def accuses_any(self) -> bool:
        """Tells whether any group is accused of a death: there are no suspects before."""
        return bool(self._records)

    def awaits_word(self, group: RequestGroup) -> bool:
        """Tells whether the group's guilt depends on how workers died and that is not known yet."""
        deaths = self.deaths(group)
        if len(deaths) < DEATHS_TO_CONVICT or not deaths[-1].is_alone:
            return False
        # After a crash the others' verdicts decide: the last worker's successor may report before those of the first.
        decisive = deaths if deaths[-1].verdict is Verdict.CRASHED else deaths[-1:]
        return any(death.verdict is Verdict.OPEN for death in decisive)

    def deaths(self, group: RequestGroup) -> list[Death]:
        """Returns the deaths that the group is accused of, the oldest first."""
        record = self._records.get(group)
        return record.deaths if record else []

    def worker_ids(self, group: RequestGroup) -> set[str]:
        """Returns the names of the workers that have died over the group."""
        return {death.worker_id for death in self.deaths(group)}

    def goes_to(self, suspect: RequestGroup, worker_id: str) -> None:
        """Notes that `suspect` is to be computed alone by the worker `worker_id`. `Isolation` chooses one that has not
        died over the suspect wherever such a worker takes it."""
        self._records[suspect].had_fresh_worker = worker_id not in self.worker_ids(suspect)

    # -- accuse -----------------------------------------------------------------------------------------------------

    def died(self, steps: Iterable[OutstandingStep], death: Death) -> None:
        """Accuses the groups in `steps`, which were outstanding when a worker died."""
        groups = list(dict.fromkeys(group for step in steps for group in step.groups))
        death.is_alone = len(groups) == 1
        if death.verdict is Verdict.OPEN:
            self._open.append(death)
        for group in groups:
            if isinstance(group, RequestGroup) and not group.is_finished:
                record = self._records.setdefault(group, _Record())
                record.deaths.append(death)
                record.steps = 0

    def came_back(self, worker_id: str, process: int, predecessor: Predecessor | None) -> None:
        """Settles open deaths by a process that registers under this name: if it is the one believed dead, that has not
        died; else its predecessor's ending may tell how."""
        for death in list(self._open):
            if death.process == process:
                self._settle(death, None, "")
            elif predecessor is not None and death.process == predecessor.process:
                verdict = _VERDICTS[predecessor.ending]
                self._settle(death, verdict or (Verdict.UNEXPLAINED if death.is_late else None), predecessor.detail)
            elif death.worker_id == worker_id:
                self._settle(death, Verdict.UNEXPLAINED, death.how)

    def give_up_waiting(self, since: float) -> None:
        """Settles deaths before `since` as unexplained: nobody has reported how these workers died."""
        for death in [death for death in self._open if death.at <= since]:
            self._settle(death, Verdict.UNEXPLAINED, death.how)

    def _settle(self, death: Death, verdict: Verdict | None, how: str) -> None:
        """Closes an open death with `verdict`, or with None as one that accuses nobody."""
        self._open.remove(death)
        if verdict is not None:
            death.verdict, death.how = verdict, how
            return
        for group, record in list(self._records.items()):
            if death in record.deaths:
                record.deaths.remove(death)
            if not record.deaths:
                del self._records[group]

    # -- clear ------------------------------------------------------------------------------------------------------

    def computed(self, step: OutstandingStep) -> None:
        """Credits the groups that have chosen tokens in a step that is done."""
        if self._records:
            for group in dict.fromkeys(group for group, _ in (*step.samplers, *step.beams, *step.pooled)):
                if isinstance(group, RequestGroup):
                    self._credit(group)

    def _credit(self, group: RequestGroup) -> None:
        if record := self._records.get(group):
            record.steps += 1
            if record.steps >= STEPS_TO_CLEAR:
                del self._records[group]

    def forget(self, group: RequestGroup) -> None:
        """Drops the record of a group that has ended."""
        self._records.pop(group, None)

    # -- convict ----------------------------------------------------------------------------------------------------

    def guilty(self) -> list[RequestGroup]:
        """Returns the groups that are convicted, as far as is known now."""
        return [group for group, record in self._records.items() if _is_guilty(record)]


def _is_guilty(record: _Record) -> bool:
    deaths = record.deaths
    # A group's first deaths prove nothing, alone or not: a guilty one causes one more.
    last = deaths[-1]
    if len(deaths) < DEATHS_TO_CONVICT or not last.is_alone or last.verdict is Verdict.OPEN:
        return False
    crashes = {death.worker_id for death in deaths if death.verdict is Verdict.CRASHED}
    if last.verdict is Verdict.CRASHED and (len(crashes) > 1 or not record.had_fresh_worker):
        return True
    settled = [death for death in deaths if death.verdict is not Verdict.OPEN]
    return len(settled) >= UNEXPLAINED_TO_CONVICT


_VERDICTS = {Ending.CRASHED: Verdict.CRASHED, Ending.UNKNOWN: Verdict.UNEXPLAINED, Ending.KILLED: None}
