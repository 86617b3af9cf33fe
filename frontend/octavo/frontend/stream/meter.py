"""Measures each request from its admission to its end, and reports it to metrics, admission and traces."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import Emitted, Finished, FinishReason, Notice, Started, Usage
from octavo.frontend.stream.running import RunningRequest


@dataclass(frozen=True)
class Latencies:
    """Holds counts and sums (seconds) since the start, of the times to a first token and of those between tokens."""

    first_tokens: int = 0
    first_token_s: float = 0.0
    between_tokens: int = 0
    between_tokens_s: float = 0.0


class Observer:
    """Hears what happens to requests; the metrics are one. Times are in seconds.

    Methods are called in the event loop, and must be quick and not raise.
    """

    def arrived(self) -> None:
        """Counts a request that came; exactly one of `refused`, `finished`, `failed` and `left` follows."""

    def refused(self, error: ServiceError) -> None:
        """Counts a request that ended with `error` before anything was sent."""

    def prompt_tokens(self, count: int, cached: int) -> None:
        """Counts the prompt of a request whose first token is there; `cached` of its tokens were found computed."""

    def first_token(self, since_arrival_s: float) -> None:
        """Measures the time to a request's first token."""

    def tokens(self, count: int, since_last_s: float | None) -> None:
        """Counts new tokens of a request, all sequences together. `since_last_s` is None for the first tokens."""

    def sequence_finished(self, reason: FinishReason) -> None:
        """Counts a sequence that has ended."""

    def finished(self, usage: Usage, since_arrival_s: float) -> None:
        """Counts a request whose last event was handed over."""

    def failed(self, error: ServiceError) -> None:
        """Counts a request that ended with `error` after something was sent."""

    def left(self) -> None:
        """Counts a request whose client went away."""

    def latencies(self) -> Latencies:
        """Returns the latencies observed so far; zeros, where the observer does not count."""
        return Latencies()


def note_prepared(running: RunningRequest) -> None:
    """Takes the request's work from its journal, once its prompt is tokenized and its limits are resolved."""
    prompt_tokens, sampling = len(running.journal.prompt_token_ids), running.journal.sampling
    running.ticket.correct(prompt_tokens + sampling.parallel * sampling.max_tokens)
    running.span.set(prompt_tokens=prompt_tokens, max_tokens=sampling.max_tokens, sequences=sampling.parallel)


def note_events(observer: Observer, running: RunningRequest, events: Sequence[Emitted], num_tokens: int) -> None:
    """Reports the `events` that were made, and `num_tokens` generated tokens that were taken with them."""
    for emitted in events:
        match emitted.event:
            case Started():
                _note_start(observer, running)
            case Finished(reason):
                observer.sequence_finished(reason)
            case Notice(kind):
                running.span.event(kind.value)
    if num_tokens:
        now, before = running.journal.last_token_at, running.last_token_at
        observer.tokens(num_tokens, None if now is None or before is None else now - before)
        running.last_token_at = now
        running.ticket.progress(num_tokens)


def note_end(observer: Observer, running: RunningRequest, error: ServiceError | None) -> None:
    """Reports the outcome: `error`, or else an answer that is complete, or a client that has left."""
    answer = running.answer
    if error is not None:
        (observer.failed if running.num_sent else observer.refused)(error)
    elif answer is not None and answer.finished:
        usage = answer.usage()
        observer.finished(usage, usage.time_to_first_token_s + usage.decode_time_s)
    else:
        observer.left()
    # Work that is not done now will never be.
    begun = answer if answer and answer.has_begun else None
    running.ticket.correct(len(begun.journal.prompt_token_ids) + begun.num_tokens if begun else 0)
    running.span.end("" if error is None else error.reason.value)


def _note_start(observer: Observer, running: RunningRequest) -> None:
    journal = running.journal
    prompt_tokens = len(journal.prompt_token_ids)
    observer.prompt_tokens(prompt_tokens, journal.cached_prompt_tokens)
    if journal.first_token_at is not None:
        observer.first_token(journal.first_token_at - running.arrived_at)
    running.span.event("first_token", cached_prompt_tokens=journal.cached_prompt_tokens)
    running.ticket.progress(prompt_tokens)
