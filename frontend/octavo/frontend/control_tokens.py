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
    """`texts` are the strings that the tokenizer would turn into control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    def guard(self, content: str) -> str:
        """`content` with a break in every control token it holds, and in every part of one that it begins, ends or is:
        a template may write the other part. Raises `ReservedText`."""
        if reserved := next((text for text in self._texts if len(text) == 1 and text in content), None):
            raise ReservedText(f"{reserved!r} is a control token of this model")
        content = content.replace(_BREAK, "")
        content = self._pattern.sub(lambda match: _broken(match[0]), content)
        if tail := max((_overlap(content, text) for text in self._texts), default=0):
            content = content[:-tail] + _broken(content[-tail:])
        if head := max((_overlap(text, content) for text in self._texts), default=0):
            content = _broken(content[:head]) + content[head:]
        return _broken(content) if any(content in text for text in self._texts if content) else content

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Cuts a rendered chat into (text, whether it is a control token of the template's own), without breaks."""
        start = 0
        for match in self._pattern.finditer(rendered):
            yield from self._plain(rendered[start : match.start()])
            yield match[0], True
            start = match.end()
        yield from self._plain(rendered[start:])

    @staticmethod
    def holds_break(rendered: str) -> bool:
        """Whether any content in `rendered` had to be guarded."""
        return _BREAK in rendered

    @staticmethod
    def _plain(text: str) -> Iterator[tuple[str, bool]]:
        if text := text.replace(_BREAK, ""):
            yield text, False


def _broken(text: str) -> str:
    return text[0] + _BREAK + text[1:] if len(text) > 1 else _BREAK + text + _BREAK


def _overlap(left: str, right: str) -> int:
    """Length of the longest proper part of `right`'s beginning (and `left`'s end) that the two share."""
    for length in range(min(len(left), len(right)) - 1, 0, -1):
        if left.endswith(right[:length]):
            return length
    return 0
