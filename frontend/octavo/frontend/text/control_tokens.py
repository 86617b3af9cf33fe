"""Keeps what clients write from becoming control tokens: in a chat, only the template may speak to the model."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

# A private-use character put into a client's text wherever it could form a control token, and taken out again after
# the template was rendered. Clients' own ones are taken out first.
_BREAK: Final = "\U000f4242"


class ReservedText(Exception):
    """The text holds a control token of a single character, which cannot be told apart from that character."""


class ControlTokens:
    """Guards clients' texts. `texts` are the strings that the tokenizer would turn into control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        by_length = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length)) or "(?!)")
        self._single = [text for text in by_length if len(text) == 1]
        # Proper beginnings and ends of `texts`. There may be hundreds of tokens, and as many strings in a chat.
        self._longest = max(map(len, by_length), default=0)
        self._starts = {text[:length] for text in by_length for length in range(1, len(text))}
        self._ends = {text[-length:] for text in by_length for length in range(1, len(text))}
        # A null that a client writes at worst costs him a break that need not be.
        self._all = "\0".join(by_length)

    def guard(self, content: str) -> str:
        """Returns `content` with a break in every control token.

        A part of a control token that begins or ends `content`, or is all of it, gets a break too, for a template may
        write the other part. Raises `ReservedText`.
        """
        if reserved := next((text for text in self._single if text in content), None):
            raise ReservedText(f"{reserved!r} is a control token of this model")
        content = content.replace(_BREAK, "")
        content = self._pattern.sub(lambda match: _broken(match[0]), content)
        lengths = range(min(len(content), self._longest) - 1, 0, -1)
        if tail := next((n for n in lengths if content[-n:] in self._starts), 0):
            content = content[:-tail] + _broken(content[-tail:])
        if head := next((n for n in lengths if content[:n] in self._ends), 0):
            content = _broken(content[:head]) + content[head:]
        return _broken(content) if 0 < len(content) < self._longest and content in self._all else content

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Yields the pieces of a rendered chat without breaks; True marks control tokens of the template."""
        start = 0
        for match in self._pattern.finditer(rendered):
            yield from self._plain(rendered[start : match.start()])
            yield match[0], True
            start = match.end()
        yield from self._plain(rendered[start:])

    @staticmethod
    def holds_break(rendered: str) -> bool:
        """Tells whether any content in `rendered` had to be guarded."""
        return _BREAK in rendered

    @staticmethod
    def _plain(text: str) -> Iterator[tuple[str, bool]]:
        if text := text.replace(_BREAK, ""):
            yield text, False


def _broken(text: str) -> str:
    return text[0] + _BREAK + text[1:] if len(text) > 1 else _BREAK + text + _BREAK
