"""Measures requests from their arrival to their end, and reports each to observers."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.access.admission import Ticket
from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import Emitted, Finished, FinishReason, Notice, Started, Usage
from octavo.frontend.scheduler.journal import Journal
from octavo.runtime.telemetry.tracing import Span


@dataclass(frozen=True)
class Latencies:
    """Counts and sums, in seconds, since the start: of the times to a first token, and of those between tokens."""

    first_tokens: int = 0
    first_token_s: float = 0.0
    between_tokens: int = 0
    between_tokens_s: float = 0.0


class Observer:
    """Called in the event loop; must be quick and must not raise. Times are in seconds."""

    def arrived(self) -> None:
        """A request has come through a door; exactly one of `refused`, `finished`, `failed` and `left` follows."""

    def refused(self, error: ServiceError) -> None:
        """It ended before anything was sent."""

    def prompt_tokens(self, count: int, cached: int) -> None:
        """Its first token is there; of its prompt so many tokens were found computed."""

    def first_token(self, since_arrival_s: float) -> None:
        """Its first token is there."""

    def tokens(self, count: int, since_last_s: float | None) -> None:
        """So many new tokens, all sequences together; None: they are the first."""

    def sequence_finished(self, reason: FinishReason) -> None:
        """One of its sequences has ended."""

    def finished(self, usage: Usage, since_arrival_s: float) -> None:
        """Its last event was handed over."""

    def failed(self, error: ServiceError) -> None:
        """It ended with an error after something was sent."""

    def left(self) -> None:
        """Its client went away."""

    def latencies(self) -> Latencies:
        """Returns what was observed of latencies so far; nothing, where nobody counts."""
        return Latencies()


# Tells the operator's side of the house what happens to one request: the metrics, the books of the door, the trace.


class Meter:
    """One request's, from its admission on. Times are seconds of one monotonic clock."""

    def __init__(self, observer: Observer, ticket: Ticket, span: Span, arrived_at: float) -> None:
        self._observer = observer
        self._ticket = ticket
        self._span = span
        self._arrived_at = arrived_at
        self._told = False
        self._usage: Usage | None = None
        # Generated tokens that are counted, and when the latest of them came.
        self._num_tokens = 0
        self._last_token_at: float | None = None
        self._work_done = 0

    @property
    def traceparent(self) -> str:
        """What the spans of other processes are parts of."""
        return self._span.traceparent

    def prepared(self, journal: Journal) -> None:
        """Its prompt is tokenized, and its limits are resolved."""
        prompt_tokens, sampling = len(journal.prompt_token_ids), journal.sampling
        self._ticket.correct(prompt_tokens + sampling.parallel * sampling.max_tokens)
        self._span.set(prompt_tokens=prompt_tokens, max_tokens=sampling.max_tokens, sequences=sampling.parallel)

    def advanced(self, journal: Journal, num_tokens: int, events: Sequence[Emitted]) -> None:
        """It has so many generated tokens by now, and these events were made."""
        for emitted in events:
            self._told = True
            match emitted.event:
                case Started():
                    self._started(journal)
                case Finished(reason):
                    self._observer.sequence_finished(reason)
                case Notice(kind):
                    self._span.event(kind.value)
                case Usage() as usage:
                    self._usage = usage
        if num_tokens > self._num_tokens:
            self._tokens(journal, num_tokens - self._num_tokens)

    def ended(self, error: ServiceError | None) -> None:
        """Its outcome is known: an error, or else an answer that is complete, or a client that has left."""
        if error is not None and not self._told:
            self._observer.refused(error)
        elif error is not None:
            self._observer.failed(error)
        elif self._usage is not None:
            self._observer.finished(self._usage, self._usage.time_to_first_token_s + self._usage.decode_time_s)
        else:
            self._observer.left()
        # What it has not used it will not use.
        self._ticket.correct(self._work_done)
        self._span.end("" if error is None else error.reason.value)

    def forgotten(self) -> None:
        """Nothing of it is kept any more."""
        self._ticket.release()

    def _started(self, journal: Journal) -> None:
        prompt_tokens = len(journal.prompt_token_ids)
        self._observer.prompt_tokens(prompt_tokens, journal.cached_prompt_tokens)
        if journal.first_token_at is not None:
            self._observer.first_token(journal.first_token_at - self._arrived_at)
        self._span.event("first_token", cached_prompt_tokens=journal.cached_prompt_tokens)
        self._work(prompt_tokens)

    def _tokens(self, journal: Journal, count: int) -> None:
        now, before = journal.last_token_at, self._last_token_at
        self._observer.tokens(count, None if now is None or before is None else now - before)
        self._num_tokens += count
        self._last_token_at = now
        self._work(count)

    def _work(self, tokens: int) -> None:
        self._work_done += tokens
        self._ticket.progress(tokens)
