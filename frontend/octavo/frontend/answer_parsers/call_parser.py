"""Finds calls of functions in a text that arrives in parts: what the parsers of all formats have in common.

A call counts as one once its name is known and its arguments begin; from then on the arguments are returned as they
come, and until then nothing is. Text that turns out to be no call is returned as content, and the search goes on after
it. So every character is looked at a bounded number of times, and the result does not depend on how the text is cut.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from octavo.frontend.answer_parsers.parts import AnswerPart, ContentText, ToolCallDelta, fresh_call_id
from octavo.frontend.answer_parsers.scanning import certain_length

# The most characters of a call before its arguments.
MAX_HEAD: Final = 1024
_STRUCTURE: Final = re.compile(r'[{}\[\]"]')
_IN_STRING: Final = re.compile(r'["\\]')
_SPACE: Final = re.compile(r"\s*")


class CallParser(ABC):
    """Finds calls with a state machine.

    A state is a method: it decides about the start of `_held`, sets the next state and returns True; or it returns
    False where deciding takes more text. `final` says that no more text comes.
    """

    def __init__(self, opens: tuple[str, ...], closes: tuple[str, ...], *, is_forced: bool) -> None:
        """`opens` are the markers before a call, `closes` those that may follow one."""
        self.any_calls = False
        self._opens = opens
        self._closes = closes
        self._num_calls = 0
        self._ids = set[str]()
        self._held = ""
        # How far `_held` was looked at.
        self._at = 0
        # Nothing but space has followed the last call.
        self._behind_call = False
        # Whether the answer is forced to be calls: what is cut off before it is known as one is no text either.
        self._is_forced = is_forced
        self._state: Callable[[bool], bool] = self._begin
        self._parts: list[AnswerPart] = []

    def feed(self, text: str) -> list[AnswerPart]:
        """Returns what has become certain with the next part of the text."""
        self._held += text
        return self._advance(final=False)

    def finish(self) -> list[AnswerPart]:
        """Returns the rest, once no text follows."""
        return self._advance(final=True)

    @abstractmethod
    def _opened(self, final: bool) -> bool:
        """Reads what stands behind an opening marker, from `_at` on."""

    def _begin(self, final: bool) -> bool:
        """Reads the start of the text."""
        self._state = self._search
        return True

    def _advance(self, *, final: bool) -> list[AnswerPart]:
        self._parts = []
        while self._state(final):
            pass
        if final and self._is_forced:
            return [part for part in self._parts if isinstance(part, ToolCallDelta)]
        return self._parts

    def _search(self, final: bool) -> bool:
        found = [(at, opening) for opening in self._opens if (at := self._held.find(opening)) >= 0]
        if not found:
            self._emit(len(self._held) if final else certain_length(self._held, self._opens))
            return False
        at, opening = min(found)
        # Space before a call belongs to it.
        before = len(self._held[:at].rstrip())
        self._emit(before)
        self._at, self._state = at - before + len(opening), self._opened
        return True

    def _after_call(self, final: bool) -> bool:
        """Skips closing markers, of which the last may be cut off."""
        start = end_of_space(self._held, 0)
        rest = self._held[start:]
        for closing in self._closes:
            if rest.startswith(closing):
                self._held = rest[len(closing) :]
                return True
            if closing.startswith(rest) and (rest or not final):
                self._held = "" if final else self._held
                return final
        self._state = self._search
        return True

    def _no_call(self) -> bool:
        """Makes content of what was looked at, and searches on after it."""
        self._behind_call = False
        self._emit(self._at)
        self._state = self._search
        return True

    def _end_broken(self, final: bool) -> None:
        """Ends a call whose arguments do not go on as such; at the end of the text they are cut off."""
        if not final:
            self._add_arguments("}")
        self._held, self._state = "" if final else self._held, self._search

    def _emit(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text and not (self._behind_call and text.isspace()):
            self._behind_call = False
            self._parts.append(ContentText(text))

    def _begin_call(self, name: str, arguments: str = "", call_id: str = "") -> None:
        if not call_id or call_id in self._ids:
            call_id = self._fresh_id()
        self._ids.add(call_id)
        self._parts.append(ToolCallDelta(self._num_calls, call_id, name, arguments))
        self._num_calls += 1
        self.any_calls = self._behind_call = True

    def _fresh_id(self) -> str:
        return fresh_call_id()

    def _add_arguments(self, arguments: str) -> None:
        """Adds to the arguments of the latest call."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallDelta):
            self._parts[-1] = replace(last, arguments=last.arguments + arguments)
        elif arguments:
            self._parts.append(ToolCallDelta(self._num_calls - 1, "", "", arguments))


class JsonArgumentsParser(CallParser):
    """Reads arguments that are JSON objects as they come."""

    def __init__(self, opens: tuple[str, ...], closes: tuple[str, ...], *, is_forced: bool) -> None:
        super().__init__(opens, closes, is_forced=is_forced)
        self._depth = 0
        self._in_string = False

    @abstractmethod
    def _after_arguments(self, final: bool) -> bool:
        """Reads what follows the arguments."""

    def _begin_arguments(self, at: int) -> None:
        """Reads on from the arguments, whose brace is at `at`."""
        self._held, self._at, self._depth, self._in_string = self._held[at:], 0, 0, False
        self._state = self._read_arguments

    def _read_arguments(self, final: bool) -> bool:
        ended = self._scan()
        arguments, rest = self._held[: self._at], self._held[self._at :]
        self._held, self._at = rest, max(0, self._at - len(self._held))
        if arguments:
            self._add_arguments(arguments)
        if ended:
            self._state = self._after_arguments
        return ended

    def _scan(self) -> bool:
        """Moves on to where all brackets are closed, or to the end of what there is."""
        while found := (_IN_STRING if self._in_string else _STRUCTURE).search(self._held, self._at):
            self._at = found.end()
            if found[0] == "\\":
                # Whatever it escapes is skipped, now or with the next piece.
                self._at += 1
            elif found[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    return True
        self._at = max(self._at, len(self._held))
        return False


def end_of_space(text: str, start: int) -> int:
    """Returns the index of the first character from `start` on that is no space."""
    found = _SPACE.match(text, start)
    assert found
    return found.end()
