"""Declares the events of a running request, as every interface sends them to its client, and the logprobs in them.

The order is: one `RequestStarted`; `TextDelta`s, with one `SequenceFinished` after the last of each sequence; one
`RequestUsage`. `RequestNotice`s may come anywhere before `RequestUsage`. A request for an output of the model has one
`OutputReady`, then `RequestUsage`.
"""

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, overload

import msgspec

from octavo.wire.requests import FinishReason, NoticeKind
from octavo.wire.sampling import Logprobs


class LogprobTable(Sequence[Logprobs]):
    """Holds `Logprobs` in columns, in a twentieth of the memory that objects would take.

    The table grows at its end. An entry is made when it is looked at; a slice is a view of the entries that were there.
    """

    __slots__ = ("_chosen", "_ends", "_ranks", "_start", "_stop", "_top_ids", "_top_logprobs")

    def __init__(self, entries: Iterable[Logprobs] = ()) -> None:
        self._chosen = array("d")
        self._ranks = array("I")
        self._top_ids = array("i")
        self._top_logprobs = array("d")
        # The index at which the top tokens of each entry end.
        self._ends = array("L")
        self._start = 0
        self._stop: int | None = None
        self.extend(entries)

    def extend(self, entries: Iterable[Logprobs]) -> None:
        """Appends `entries`. A view cannot be extended."""
        assert self._stop is None, "a view does not grow"
        for entry in entries:
            self._chosen.append(entry.logprob)
            self._ranks.append(entry.rank)
            self._top_ids.extend(entry.top_token_ids)
            self._top_logprobs.extend(entry.top_logprobs)
            self._ends.append(len(self._top_ids))

    @property
    def num_numbers(self) -> int:
        """Returns how many logprobs the table holds, those of the top tokens included."""
        start, stop = self._start, self._start + len(self)
        return stop - start + (self._end(stop - 1) - self._end(start - 1))

    @property
    def chosen(self) -> Sequence[float]:
        """Returns the logprob of each entry's own token."""
        return self._chosen[self._start : self._start + len(self)]

    def __len__(self) -> int:
        return (len(self._chosen) if self._stop is None else self._stop) - self._start

    @overload
    def __getitem__(self, index: int) -> Logprobs: ...

    @overload
    def __getitem__(self, index: slice) -> "LogprobTable": ...

    def __getitem__(self, index: int | slice) -> "Logprobs | LogprobTable":
        if isinstance(index, slice):
            return self._view(index)
        place = self._start + range(len(self))[index]
        top = slice(self._end(place - 1), self._ends[place])
        return Logprobs(
            self._chosen[place], self._ranks[place], self._top_ids[top].tolist(), self._top_logprobs[top].tolist()
        )

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _end(self, place: int) -> int:
        return self._ends[place] if place >= 0 else 0

    def _view(self, part: slice) -> "LogprobTable":
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a view has no gaps")
        view = LogprobTable.__new__(LogprobTable)
        view._chosen, view._ranks, view._ends = self._chosen, self._ranks, self._ends
        view._top_ids, view._top_logprobs = self._top_ids, self._top_logprobs
        view._start, view._stop = self._start + start, self._start + max(start, stop)
        return view


def num_numbers(logprobs: Sequence[Logprobs]) -> int:
    """Returns how many logprobs `logprobs` holds, those of the top tokens included."""
    if isinstance(logprobs, LogprobTable):
        return logprobs.num_numbers
    return sum(1 + len(entry.top_token_ids) for entry in logprobs)


def chosen(logprobs: Sequence[Logprobs]) -> Sequence[float]:
    """Returns the logprob of each entry's own token."""
    return logprobs.chosen if isinstance(logprobs, LogprobTable) else [entry.logprob for entry in logprobs]


class MatchKind(enum.Enum):
    """Names what ended a sequence that did not reach its limit of new tokens."""

    STOP_STRING = enum.auto()
    STOP_TOKEN = enum.auto()
    EOS_TOKEN = enum.auto()


@dataclass(frozen=True)
class Match:
    """Names the match that ended a sequence. `value` is the stop string, or else the id of the token."""

    kind: MatchKind
    value: str | int


@dataclass(frozen=True)
class RequestStarted:
    """The request was checked, and its first token was computed. `seed` is the seed in force, given or drawn.

    `prompt_logprobs`, if asked for, has one entry for each prompt token but the first. `cached_prompt_tokens` of the
    prompt's tokens were found computed already.
    """

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    seed: int
    prompt_logprobs: Sequence[Logprobs]
    cached_prompt_tokens: int = 0


class TextDelta(msgspec.Struct, frozen=True):
    """Brings new tokens of the sequence `index`, and the new text that later tokens cannot change.

    Either may be empty, for text may wait for its next token. `reasoning` is text that the model has thought; it comes
    before `text`. `logprobs` has one entry per token where the scheduler was asked for logprobs.
    """

    text: str
    token_ids: list[int]
    logprobs: Sequence[Logprobs] = ()
    index: int = 0
    reasoning: str = ""


@dataclass(frozen=True)
class SequenceFinished:
    """The sequence `index` has ended. `match` is None where the limit of new tokens ended the sequence.

    `cumulative_logprob` is None where no logprobs were asked for.
    """

    reason: FinishReason
    match: Match | None
    cumulative_logprob: float | None = None
    index: int = 0


@dataclass(frozen=True)
class OutputReady:
    """Brings the output of the model that was asked for, `values` as little-endian fp32 numbers, of a text of so many
    tokens."""

    values: bytes
    prompt_tokens: int


@dataclass(frozen=True)
class RequestUsage:
    """Tells what a whole request has taken: counts in tokens, times in seconds.

    `drafted_tokens` are guesses of its tokens that were checked, `accepted_tokens` the right ones;
    `accepted_predictions` and `rejected_predictions` are those of its own prediction. `reasoning_tokens` are those of
    the completion that the model has thought with, markers included.
    """

    prompt_tokens: int
    completion_tokens: int
    preemptions: int
    swaps: int
    cached_prompt_tokens: int
    time_to_first_token_s: float
    decode_time_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_predictions: int = 0
    rejected_predictions: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class RequestNotice:
    """Reports progress that is no output.

    `queue_position` counts from 1 on while the request waits in the queue, and is 0 otherwise.
    """

    kind: NoticeKind
    queue_position: int = 0


Event = RequestStarted | TextDelta | SequenceFinished | OutputReady | RequestUsage | RequestNotice
# Logprobs that are written in less than a millisecond: entries of a prompt, and all numbers of a `TextDelta`.
FEW_LOGPROBS: Final = 64
_FEW_NUMBERS: Final = 512


def is_long(event: Event) -> bool:
    """Tells whether `event` takes so long to write for a client that the writing belongs off the event loop.

    The logprobs of a long prompt take a second.
    """
    if isinstance(event, TextDelta):
        return bool(event.logprobs) and num_numbers(event.logprobs) > _FEW_NUMBERS
    return isinstance(event, RequestStarted) and len(event.prompt_logprobs) > FEW_LOGPROBS


class Emitted(NamedTuple):
    """Pairs an event with its offset in the request's stream. Offsets grow strictly, from 1 on."""

    offset: int
    event: Event
