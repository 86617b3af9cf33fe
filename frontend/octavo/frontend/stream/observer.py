"""Who is told what happens to requests, whatever door they came through. Does nothing by itself; metrics do."""

from dataclasses import dataclass

from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import FinishReason, Usage


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
