"""Reads and writes the name by which other processes know a span: W3C trace context, version 00."""

import re
from typing import Final, NamedTuple

# Higher versions may have more behind the flags.
_PATTERN: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII)
_SAMPLED: Final = 1


class SpanName(NamedTuple):
    """Names a span by its trace and its own id, and says whether it is recorded."""

    trace_id: int
    span_id: int
    sampled: bool


def parse(traceparent: str) -> SpanName | None:
    """Returns the span that `traceparent` names; None for anything that names none."""
    match = _PATTERN.fullmatch(traceparent)
    if match is None or match[1] == "ff" or (match[1] == "00" and len(traceparent) != 55):
        return None
    name = SpanName(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & _SAMPLED))
    return name if name.trace_id and name.span_id else None


def write(name: SpanName) -> str:
    return f"00-{name.trace_id:032x}-{name.span_id:016x}-{name.sampled:02x}"
