"""Finds calls as newer Gemmas write them: call:name{key:value,...}, with markers of their own around texts."""

import json
import re
from dataclasses import dataclass
from typing import Final

from octavo.frontend.answer_parsers.call_parser import MAX_HEAD, CallParser

_HEAD: Final = re.compile(r"\s*call:(?P<name>[\w.:/-]+)\{")
_KEY: Final = re.compile(r"\s*(?P<key>[^\s:{}\[\],<]+)\s*:")
# What a value may nest at most.
_MAX_DEPTH: Final = 64


@dataclass(frozen=True)
class GemmaForm:
    """Describes the markers: before a call, behind one, and on both sides of a text."""

    open: str
    close: str
    quote: str


class GemmaCallParser(CallParser):
    """Reads calls, of which an argument is returned once it is whole."""

    def __init__(self, form: GemmaForm, *, is_forced: bool = False) -> None:
        super().__init__((form.open,), (form.close,), is_forced=is_forced)
        self._quote = form.quote
        self._structure = re.compile(rf"[{{}}\[\],]|{re.escape(form.quote)}")
        self._num_arguments = 0
        self._depth = 0
        self._in_text = False

    def _opened(self, final: bool) -> bool:
        head = _HEAD.match(self._held, self._at, self._at + MAX_HEAD)
        if head is None:
            waits = len(self._held) - self._at < MAX_HEAD and not final
            return False if waits else self._no_call()
        self._begin_call(head["name"], "{")
        self._num_arguments = 0
        self._held = self._held[head.end() :]
        self._begin_argument()
        return True

    def _begin_argument(self) -> None:
        self._at, self._depth, self._in_text, self._state = 0, 0, False, self._read_argument

    def _read_argument(self, final: bool) -> bool:
        """Reads up to the comma behind an argument, or the brace behind the last."""
        while found := self._structure.search(self._held, self._at):
            self._at = found.end()
            if found[0] == self._quote:
                self._in_text = not self._in_text
            elif self._in_text:
                continue
            elif self._depth == 0 and found[0] in ",}":
                self._end_argument(found.start())
                return True
            elif found[0] != ",":
                self._depth += 1 if found[0] in "{[" else -1
        # The end may be the beginning of a marker.
        self._at = max(self._at, len(self._held) - len(self._quote) + 1)
        if final:
            self._held, self._state = "", self._search
        return False

    def _end_argument(self, end: int) -> None:
        text, is_last = self._held[:end], self._held[end] == "}"
        if key := _KEY.match(text):
            between = ", " if self._num_arguments else ""
            value = json.dumps(_Value(text, key.end(), self._quote).read(), ensure_ascii=False)
            self._add_arguments(f"{between}{json.dumps(key['key'], ensure_ascii=False)}: {value}")
            self._num_arguments += 1
        self._held = self._held[end + 1 :]
        if is_last:
            self._add_arguments("}")
            self._state = self._after_call
        else:
            self._begin_argument()


class _Value:
    """Reads one value of Gemma's notation, leniently: what it cannot read is a text."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text = text
        self._at = at
        self._quote = quote

    def read(self, depth: int = 0) -> object:
        self._skip_space()
        if self._text.startswith(self._quote, self._at):
            return self._read_text()
        opening = self._text[self._at : self._at + 1]
        if opening == "[" and depth < _MAX_DEPTH:
            return self._read_list(depth)
        if opening == "{" and depth < _MAX_DEPTH:
            return self._read_object(depth)
        return self._read_word()

    def _skip_space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _read_text(self) -> str:
        start = self._at + len(self._quote)
        end = self._text.find(self._quote, start)
        end = len(self._text) if end < 0 else end
        self._at = end + len(self._quote)
        return self._text[start:end]

    def _read_word(self) -> object:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ",]}":
            self._at += 1
        word = self._text[start : self._at].strip()
        try:
            found: object = json.loads(word, parse_constant=str)
        except (ValueError, RecursionError):
            return word
        return found

    def _read_list(self, depth: int) -> list[object]:
        found: list[object] = []
        while self._next("]"):
            found.append(self.read(depth + 1))
        return found

    def _read_object(self, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        while self._next("}"):
            end = self._text.find(":", self._at)
            key = self._text[self._at : len(self._text) if end < 0 else end].strip().replace(self._quote, "")
            self._at = len(self._text) if end < 0 else end + 1
            found[key] = self.read(depth + 1)
        return found

    def _next(self, closing: str) -> bool:
        """Moves behind a bracket or comma, and tells whether an item follows."""
        self._skip_space()
        if self._text[self._at : self._at + 1] in ("[", "{", ","):
            self._at += 1
            self._skip_space()
        if self._at >= len(self._text):
            return False
        if self._text[self._at] in ("]", "}"):
            self._at += 1
            return False
        return True
