"""Finds markers in text that arrives in parts."""

from collections.abc import Iterable


def certain_length(text: str, markers: Iterable[str]) -> int:
    """Returns how many characters of `text` cannot be the start of one of `markers`, or of the space before one."""
    return len(text[: len(text) - max(overlap(text, marker) for marker in markers)].rstrip())


def overlap(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of `marker`."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
