"""Makes a running request's numbered events: those that are due, and those that were sent before, again."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from msgspec import structs

from octavo.frontend.errors import Broken
from octavo.frontend.request.events import Emitted, Event, Finished, Notice, Started, TextDelta, Usage
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.reader import Reader
from octavo.frontend.stream.answer import Answer, Completion
from octavo.wire.sampling import MAX_PARALLEL


class PieceMark(NamedTuple):
    """Stands for a `TextDelta` without its text: `num_tokens` of the sequence with the index `place` in the answer."""

    place: int
    num_tokens: int


class EventLog:
    """Records events in order; the first has offset 1. A `TextDelta` holds at least one token."""

    def __init__(self) -> None:
        # A `TextDelta`'s number of tokens and its index in one number; 0 for any other event.
        self._marks = array("I")
        self._others: list[Started | Finished | Usage | Notice] = []

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, event: Event) -> Emitted:
        """Records `event`, and returns it with its offset."""
        if isinstance(event, TextDelta):
            self._marks.append(len(event.token_ids) * MAX_PARALLEL + event.index)
        else:
            self._marks.append(0)
            self._others.append(event)
        return Emitted(len(self._marks), event)

    def entries(self) -> Iterator[PieceMark | Started | Finished | Usage | Notice]:
        """Yields all events from the first on, each `TextDelta` as its mark."""
        others = iter(self._others)
        for mark in self._marks:
            yield PieceMark(mark % MAX_PARALLEL, mark // MAX_PARALLEL) if mark else next(others)


# Events that are made again at once; others get their turn in between.
_REPLAYED_AT_ONCE = 256


@dataclass(frozen=True)
class Shape:
    """Tells how a request's tokens become events. `completion` makes a completion for one sequence."""

    model: str
    num_results: int
    incremental: bool
    completion: Callable[[], Completion]


class Stream:
    """Makes the events of one request, whoever reads them. Only one reader may read at a time.

    An event that was sent once is the same whenever it is sent again, for it is made from the same tokens.
    """

    def __init__(self, journal: Journal, reader: Reader, shape: Shape) -> None:
        self._journal = journal
        self._reader = reader
        self._shape = shape
        self._answer = Answer(
            journal, self._completions(), num_results=shape.num_results, incremental=shape.incremental
        )
        self._log = EventLog()
        self._started = False
        # All events were made, `Usage` last.
        self.finished = False

    def __len__(self) -> int:
        """Returns how many events were made."""
        return len(self._log)

    @property
    def journal(self) -> Journal:
        """Returns the journal from which the events are made."""
        return self._journal

    @property
    def num_tokens(self) -> int:
        """Returns how many generated tokens were taken, of all sequences together."""
        return self._answer.num_tokens

    def advance(self) -> list[Emitted]:
        """Returns the events that are due. The reader is woken again if more are due, or if the request has failed."""
        events: list[Event] = [*self._reader.take_notices()]
        if self._started:
            events += self._news()
        elif self._journal.begun:
            # Alone, so that all tokens that come until the client takes it come in one piece.
            self._started = True
            events.append(self._start())
            self._reader.notify()
        return [self._log.add(event) for event in events]

    def ended_here(self) -> Sequence[int]:
        """Returns the sequences that have ended for the frontend alone: see `Answer.ended_here`."""
        return self._answer.ended_here()

    def sent_after(self, offset: int) -> Iterator[list[Emitted]]:
        """Yields the events after `offset` that were made already, some at a time (maybe none)."""
        sent = self._sent()
        while batch := list(islice(sent, _REPLAYED_AT_ONCE)):
            yield [emitted for emitted in batch if emitted.offset > offset]

    def _news(self) -> list[Event]:
        answer = self._answer
        events: list[Event] = [*answer.advance()]
        if answer.finished:
            self.finished = True
            return [*events, answer.usage()]
        if answer.behind:
            self._reader.notify()
        try:
            answer.check_ends()
        except Broken as error:
            self._reader.fail(error)
        return events

    def _start(self) -> Started:
        journal = self._journal
        return Started(
            request_id=journal.request_id,
            model=self._shape.model,
            prompt_token_ids=journal.prompt_token_ids,
            seed=journal.sampling.seed,
            prompt_logprobs=journal.prompt_logprobs or [],
        )

    def _sent(self) -> Iterator[Emitted]:
        completions = self._completions()
        for offset, entry in enumerate(self._log.entries(), 1):
            yield Emitted(offset, self._piece(entry, completions) if isinstance(entry, PieceMark) else entry)

    def _piece(self, mark: PieceMark, completions: Sequence[Completion]) -> Event:
        index = self._answer.sequence_of(mark.place)
        sequence, completion = self._journal.sequences[index], completions[index]
        part = slice(completion.num_tokens, completion.num_tokens + mark.num_tokens)
        logprobs = sequence.logprobs[part] if sequence.logprobs else ()
        piece = completion.feed(sequence.token_ids[part], logprobs)
        return structs.replace(piece, index=mark.place)

    def _completions(self) -> list[Completion]:
        return [self._shape.completion() for _ in self._journal.sequences]
