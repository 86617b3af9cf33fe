"""Spans of a request through the processes. Where nothing is configured they cost next to nothing."""

from typing import Final


class Span:
    """A stretch of a request's life in one process. Attributes are numbers and names, never prompts or outputs."""

    @property
    def traceparent(self) -> str:
        """What names it to other processes (W3C trace context); empty if nothing is traced."""
        return ""

    def event(self, name: str, **attributes: str | int | float) -> None:
        """Something happened now."""

    def set(self, **attributes: str | int | float) -> None:
        """Adds attributes."""

    def end(self, error: str = "") -> None:
        """It is over; `error` is a stable reason if it failed. Idempotent."""


_NOTHING: Final = Span()


def start_span(name: str, traceparent: str = "", **attributes: str | int | float) -> Span:
    """A span that begins now, as a part of `traceparent` if that is not empty."""
    return _NOTHING
