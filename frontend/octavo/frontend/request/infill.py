"""Declares a gap to be filled: the text before it, the text after it, and pieces of other files."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class FilePiece:
    """Holds a piece of another file that may help to fill the gap."""

    name: str
    text: str


@dataclass(frozen=True)
class Infill:
    """A gap between `prefix` and `suffix`, of which `begun` is already filled. All fields are plain text.

    `pieces` are of other files, the most helpful last. With `most_tokens` the prompt is cut down to so many tokens: of
    the pieces the first go, then what of `prefix` and `suffix` is farthest from the gap.
    """

    prefix: str
    suffix: str
    begun: str = ""
    pieces: tuple[FilePiece, ...] = ()
    most_tokens: int | None = None

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all text that the client has written."""
        return sum(len(text.encode("utf-8", "replace")) for text in self._texts())

    def _texts(self) -> Iterator[str]:
        yield from (self.prefix, self.suffix, self.begun)
        for piece in self.pieces:
            yield from (piece.name, piece.text)
