"""Reads the requests of a scheduler's event log as jobs that can be simulated."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from octavo.scheduler.core.events import (
    Effect,
    Event,
    RequestsAborted,
    RequestSubmitted,
    SendToFrontend,
    SequenceEnded,
)
from octavo.scheduler.server.event_log import Handled, Record, Scheduled, fresh_core, read_records
from octavo.wire.requests import Delta, Deltas, Rejected, RejectReason, Request
from octavo.workload.job import MAX_TOKENS, Job, Transcript

# Prompts that begin alike for fewer tokens are not taken to share anything.
_LEAST_SHARED: Final = 16
# What was refused for these reasons may find room in another cluster.
_FOR_WANT_OF_ROOM: Final = frozenset({RejectReason.QUEUE_FULL, RejectReason.QUEUE_TIMEOUT})


def jobs_of_log(path: Path) -> list[Job]:
    """Returns the requests that frontends submitted for the first time within the log, counted from the first such
    request on, without those that no scheduler would take. Their transcripts say what was said.

    `output_tokens` are what the request's longest sequence came to, if the log contains its end (also one that the
    client chose), and otherwise its max_tokens. Prompts share a prefix as far as they agree with the first one that
    begins like them. Raises `EventLogError` and `OSError`.
    """
    with path.open("rb") as file:
        found = [each for each in _recorded(read_records(file)) if each.could_run]
    prefixes = _prefixes([each.request for each in found])
    return [_job(each, each.now - found[0].now, *prefix) for each, prefix in zip(found, prefixes, strict=True)]


@dataclass
class _Recorded:
    """Holds a request that came at `now`, and what the log records of it: the tokens of its sequences by index, which
    of them are over, and whether it was given up."""

    now: float
    request: Request
    outputs: dict[int, list[int]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    aborted: bool = False
    rejected: RejectReason | None = None

    @property
    def could_run(self) -> bool:
        return bool(self.outputs) or self.rejected is None or self.rejected in _FOR_WANT_OF_ROOM

    @property
    def output_tokens(self) -> int:
        ended = self.aborted or len(self.over) == self.request.sampling.num_sequences
        if ended and (longest := max(map(len, self.outputs.values()), default=0)):
            return longest
        return min(self.request.sampling.max_tokens, MAX_TOKENS - len(self.request.prompt_token_ids))

    def take(self, delta: Delta) -> None:
        # What was submitted again goes on behind what had come.
        self.outputs.setdefault(delta.sequence_index, [])[delta.start_index :] = delta.token_ids
        if delta.finish_reason is not None:
            self.over.add(delta.sequence_index)


def _recorded(records: Iterator[Record]) -> list[_Recorded]:
    """Returns the requests of the log in order of arrival. The log has no answers, but the core gives them again."""
    core, found = fresh_core(records), _Book()
    for record in records:
        match record:
            case Handled(now, event):
                found.take_event(event, now)
                found.take_effects(core.handle(event, now))
            case Scheduled(now):
                found.take_effects(core.schedule(now))
    return found.requests


class _Book:
    """Collects what the log records of every request."""

    def __init__(self) -> None:
        self.requests: list[_Recorded] = []
        self._by_id: dict[tuple[int, str], _Recorded] = {}

    def take_event(self, event: Event, now: float) -> None:
        match event:
            case RequestSubmitted(frontend_id, request) if not request.resubmitted:
                self.requests.append(_Recorded(now, request))
                self._by_id[frontend_id, request.request_id] = self.requests[-1]
            case RequestsAborted(frontend_id, request_ids):
                for found in self._known(frontend_id, request_ids):
                    found.aborted = True
            case SequenceEnded(frontend_id, request_id, _, sequence_index):
                for found in self._known(frontend_id, [request_id]):
                    found.over.add(sequence_index)

    def take_effects(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToFrontend(frontend_id, Deltas(_, deltas)):
                    for delta in deltas:
                        for found in self._known(frontend_id, [delta.request_id]):
                            found.take(delta)
                case SendToFrontend(frontend_id, Rejected(_, request_id, _, reason)):
                    for found in self._known(frontend_id, [request_id]):
                        found.rejected = reason

    def _known(self, frontend_id: int, request_ids: Iterable[str]) -> list[_Recorded]:
        """Returns the recorded requests of these ids, without those first submitted before the log began."""
        return [found for each in request_ids if (found := self._by_id.get((frontend_id, each)))]


def _prefixes(requests: Sequence[Request]) -> list[tuple[str, int]]:
    """Name and length of the prefix that each shares with others ("", 0: none)."""
    firsts: dict[tuple[str, str, tuple[int, ...]], int] = {}
    lengths, names = [0] * len(requests), [""] * len(requests)
    for index, request in enumerate(requests):
        prompt, key = request.prompt_token_ids, request.cache_key
        first = firsts.setdefault((key.adapter, key.salt, tuple(prompt[:_LEAST_SHARED])), index)
        if first == index or len(prompt) < _LEAST_SHARED:
            continue
        lengths[index] = _num_equal(prompt, requests[first].prompt_token_ids)
        lengths[first] = max(lengths[first], lengths[index])
        names[first] = names[index] = f"request-{first}"
    return list(zip(names, lengths, strict=True))


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _job(found: _Recorded, arrival_s: float, prefix: str, prefix_tokens: int) -> Job:
    request, sampling = found.request, found.request.sampling
    return Job(
        arrival_s=arrival_s,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=found.output_tokens,
        n=sampling.num_sequences,
        beam_width=sampling.beam.width if sampling.beam else 0,
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        priority=request.priority,
        tenant=request.tenant,
        transcript=Transcript(
            request.prompt_token_ids,
            [found.outputs.get(index, []) for index in range(sampling.num_sequences)],
            request.predicted_token_ids,
            request.cache_key.salt,
            request.cache_key.salted_from,
        ),
    )
