"""From a running request to its numbered events: those that are due, and those that were told before, made again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec import structs

from octavo.frontend.answer import Answer
from octavo.frontend.completion import Completion
from octavo.frontend.errors import Broken
from octavo.frontend.event_log import EventLog, PieceMark
from octavo.frontend.events import Emitted, Event, Started
from octavo.frontend.journal import Journal
from octavo.frontend.reader import Reader

# Events that are made again at once; others get their turn in between.
_REPLAYED_AT_ONCE = 256


@dataclass(frozen=True)
class Shape:
    """How a request's tokens become events: `completion` makes a new one for a sequence."""

    model: str
    num_results: int
    incremental: bool
    completion: Callable[[], Completion]


class Stream:
    """One request's, whoever reads it. Only one may read at a time.

    An event that was told once is the same whenever it is told again, for it is made from the same tokens.
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
        # All is told, `Usage` last.
        self.finished = False

    def __len__(self) -> int:
        """How many events were told."""
        return len(self._log)

    @property
    def journal(self) -> Journal:
        """What it is made from."""
        return self._journal

    @property
    def num_tokens(self) -> int:
        """Generated tokens that were taken, of all sequences together."""
        return self._answer.num_tokens

    def advance(self) -> list[Emitted]:
        """What there is to tell now. The reader is woken again where that was not all, or will never be."""
        events: list[Event] = [*self._reader.take_notices()]
        if self._started:
            events += self._news()
        elif self._journal.begun:
            # Alone, so that what comes until it is taken comes in one piece.
            self._started = True
            events.append(self._start())
            self._reader.notify()
        return [self._log.add(event) for event in events]

    def ended_here(self) -> Sequence[int]:
        """Sequences that have ended by what only the frontend sees, and still run for the scheduler."""
        return self._answer.ended_here()

    def told_after(self, offset: int) -> Iterator[list[Emitted]]:
        """The events after that offset which were told already, some at a time (maybe none)."""
        told = self._told()
        while batch := list(islice(told, _REPLAYED_AT_ONCE)):
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

    def _told(self) -> Iterator[Emitted]:
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
