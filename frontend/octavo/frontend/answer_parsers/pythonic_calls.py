"""Finds calls that a model writes as a list of calls of Python: [f(a=1, b="x"), g()]."""

import json
import re
from typing import Final

from octavo.frontend.answer_parsers.call_parser import MAX_HEAD, CallParser, end_of_space
from octavo.frontend.answer_parsers.values import json_of

# A call is one where its brackets close, or its first argument has a name.
_HEAD: Final = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\(\s*(?=\)|[A-Za-z_]\w*\s*=\s*[^=\s])")
_KEY: Final = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=\s*(?=\S)")
_STRUCTURE: Final = re.compile(r"""[()\[\]{},"']""")


class PythonicCallParser(CallParser):
    """Reads calls at the start of the text or behind a marker; an argument is returned once it is whole."""

    def __init__(self, opens: tuple[str, ...], closes: tuple[str, ...], *, is_forced: bool = False) -> None:
        super().__init__(opens, closes, is_forced=is_forced)
        self._num_arguments = 0
        self._key = ""
        self._depth = 0
        self._quote = ""

    def _begin(self, final: bool) -> bool:
        start = end_of_space(self._held, 0)
        if start == len(self._held) and not final:
            return False
        if self._held.startswith("[", start):
            self._at, self._state = start, self._opened
        else:
            self._state = self._search
        return True

    def _opened(self, final: bool) -> bool:
        """Reads the bracket before the first call."""
        start = end_of_space(self._held, self._at)
        if start == len(self._held):
            return final and self._no_call()
        if self._held[start] != "[":
            return self._no_call()
        self._at, self._state = start + 1, self._read_head
        return True

    def _read_head(self, final: bool) -> bool:
        head = _HEAD.match(self._held, self._at, self._at + MAX_HEAD)
        if head is None:
            if len(self._held) - self._at < MAX_HEAD and not final and _may_be_head(self._held[self._at :]):
                return False
            return self._no_call()
        self._begin_call(head["name"], "{")
        self._num_arguments = 0
        self._held, self._state = self._held[head.end() :], self._read_key
        return True

    def _read_key(self, final: bool) -> bool:
        """Reads the name of an argument, or the end of the call."""
        start = end_of_space(self._held, 0)
        if self._held.startswith(")", start):
            self._add_arguments("}")
            self._held, self._state = self._held[start + 1 :], self._behind_one
            return True
        if key := _KEY.match(self._held, 0, MAX_HEAD):
            self._key = key["key"]
            self._held, self._at, self._depth, self._quote = self._held[key.end() :], 0, 0, ""
            self._state = self._read_value
            return True
        if len(self._held) < MAX_HEAD and not final:
            return False
        self._end_broken(final)
        return True

    def _read_value(self, final: bool) -> bool:
        while self._at < len(self._held):
            if self._quote:
                if not self._skip_string():
                    break
                continue
            found = _STRUCTURE.search(self._held, self._at)
            if found is None:
                self._at = len(self._held)
                break
            self._at = found.end()
            if found[0] in "\"'":
                self._quote = found[0]
            elif self._depth == 0 and found[0] in ",)":
                return self._end_value(found.start())
            elif found[0] != ",":
                self._depth += 1 if found[0] in "([{" else -1
        if final:
            self._held, self._state = "", self._search
        return False

    def _skip_string(self) -> bool:
        """Moves on behind the string's end. Returns False where that has not come."""
        while self._at < len(self._held):
            character = self._held[self._at]
            if character == "\\":
                if self._at + 1 == len(self._held):
                    return False
                self._at += 1
            self._at += 1
            if character == self._quote:
                self._quote = ""
                return True
        return False

    def _end_value(self, end: int) -> bool:
        between = ", " if self._num_arguments else ""
        self._add_arguments(f"{between}{json.dumps(self._key)}: {json_of(self._held[:end])}")
        self._num_arguments += 1
        self._held = self._held[end + (self._held[end] == ",") :]
        self._state = self._read_key
        return True

    def _behind_one(self, final: bool) -> bool:
        """Reads what follows a call: another, or the end of the list."""
        start = end_of_space(self._held, 0)
        if start == len(self._held) and not final:
            return False
        if self._held.startswith(",", start):
            self._at, self._state = start + 1, self._read_head
        else:
            self._held = self._held[start + self._held.startswith("]", start) :]
            self._state = self._after_call
        return True


# What a head may look like while it comes.
_BEGINNING: Final = re.compile(r"\s*(?:[A-Za-z_][\w.]*(?:\(\s*(?:[A-Za-z_]\w*\s*(?:=\s*)?)?)?)?")


def _may_be_head(text: str) -> bool:
    return _BEGINNING.fullmatch(text) is not None
