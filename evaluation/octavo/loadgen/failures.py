"""Names failures: of one request, which are counted by kind, and of the whole run, which then ends."""

from typing import Final

_MAX_DETAIL: Final = 300


class Failure(Exception):
    """Says that a request failed. `kind` is short and the same for all that failed so; `detail` is one line of what the
    server or the system said."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind = kind
        self.detail = one_line(detail)
        super().__init__(f"{kind}: {self.detail}" if self.detail else kind)


class TargetError(Exception):
    """Says why the server cannot be measured at all, and what to do."""


def one_line(text: str) -> str:
    """Returns the text as it may be printed: one line, no control characters, not too long."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 1] + "…"
