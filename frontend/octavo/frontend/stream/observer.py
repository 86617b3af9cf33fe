"""Declares who hears what happens to requests, and the latencies that are observed."""

from dataclasses import dataclass

from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import RequestUsage
from octavo.wire.requests import FinishReason


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

    def finished(self, usage: RequestUsage, since_arrival_s: float) -> None:
        """Counts a request whose last event was handed over."""

    def failed(self, error: ServiceError) -> None:
        """Counts a request that ended with `error` after something was sent."""

    def left(self) -> None:
        """Counts a request whose client went away."""

    def latencies(self) -> Latencies:
        """Returns the latencies observed so far; zeros, where the observer does not count."""
        return Latencies()
