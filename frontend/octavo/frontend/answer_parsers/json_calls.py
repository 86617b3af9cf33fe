"""Finds calls of functions in a text that arrives in parts.

A call is a JSON object with a name and arguments, after a marker or at the start of the text. An object counts as a
call once its name is known and its arguments begin; from then on the arguments are returned as they come, and until
then nothing is. Text that turns out to be no call is returned as content, and the search goes on after it. So every
character is looked at once, and the result does not depend on how the text is cut.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final

import msgspec

from octavo.frontend.answer_parsers.parts import AnswerPart, ContentText, ToolCallDelta, fresh_call_id

_STRUCTURE: Final = re.compile(r'[{}\[\]"]')
_IN_STRING: Final = re.compile(r'["\\]')
_SPACE: Final = re.compile(r"\s*")

# The head of a call whose arguments come last, from its first brace to the brace of the arguments, and its most
# characters.
_HEAD: Final = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD: Final = 1024

_State = Callable[[bool], bool]


class _Call(msgspec.Struct):
    """Decodes a call as models write it, the arguments under either name."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    parameters: msgspec.Raw = msgspec.Raw(b"{}")

    def arguments_json(self) -> str:
        own = bytes(self.arguments)
        return (bytes(self.parameters) if own == b"{}" else own).decode()


class _Parser(ABC):
    """Finds calls with a state machine.

    A state is a method: it decides about the start of `_held`, sets the next state and returns True; or it returns
    False where deciding takes more text. `final` says that no more text comes.
    """

    OPEN: ClassVar[str]

    def __init__(self, *, is_forced: bool = False) -> None:
        self.any_calls = False
        self._num_calls = 0
        self._held = ""
        # How far `_held` was looked at, and where in it an object begins.
        self._at = 0
        self._begin = 0
        self._depth = 0
        self._in_string = False
        # Nothing but space has followed the last call.
        self._behind_call = False
        # Whether the answer is forced to be calls: what is cut off before it is known as one is no text either.
        self._is_forced = is_forced
        self._state = self._first()
        self._parts: list[AnswerPart] = []

    def feed(self, text: str) -> list[AnswerPart]:
        """Returns what has become certain with the next part of the text."""
        self._held += text
        return self._advance(final=False)

    def finish(self) -> list[AnswerPart]:
        """Returns the rest, once no text follows."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[AnswerPart]:
        self._parts = []
        while self._state(final):
            pass
        if final and self._is_forced:
            return [part for part in self._parts if isinstance(part, ToolCallDelta)]
        return self._parts

    def _first(self) -> _State:
        return self._search

    @abstractmethod
    def _after_call(self, final: bool) -> bool:
        """Reads what follows a call: another call, or text."""

    def _search(self, final: bool) -> bool:
        found = self._held.find(self.OPEN)
        if found < 0:
            self._emit(len(self._held) if final else self._longest_certain())
            return False
        # Space before a call belongs to it.
        self._emit(len(self._held[:found].rstrip()))
        self._begin_object(self._held.index(self.OPEN) + len(self.OPEN))
        return True

    def _longest_certain(self) -> int:
        """Returns how many characters of `_held` cannot be the start of a call or of the space before one."""
        most = min(len(self.OPEN) - 1, len(self._held))
        start = next((n for n in range(most, 0, -1) if self._held.endswith(self.OPEN[:n])), 0)
        return len(self._held[: len(self._held) - start].rstrip())

    def _begin_object(self, at: int) -> None:
        self._at, self._depth, self._in_string = at, 0, False
        self._state = self._find_object

    def _find_object(self, final: bool) -> bool:
        self._at = _end_of_space(self._held, self._at)
        if self._at == len(self._held):
            return final and self._no_call()
        if self._held[self._at] != "{":
            return self._no_call()
        self._begin, self._state = self._at, self._read_object
        return True

    def _read_object(self, final: bool) -> bool:
        if self._begin_arguments():
            return True
        if self._scan(0):
            return self._end_object()
        return final and self._no_call()

    def _begin_arguments(self) -> bool:
        """Begins a call if its name is known and its arguments begin. Returns whether that is so."""
        head = _HEAD.match(self._held, self._begin, self._begin + _MAX_HEAD)
        if head is None:
            return False
        try:
            name = msgspec.json.decode(head[1], type=str)
        except (msgspec.DecodeError, UnicodeError):
            return False
        self._begin_call(name)
        self._held, self._at, self._depth, self._in_string = self._held[head.end() :], 0, 0, False
        self._state = self._read_arguments
        return True

    def _begin_call(self, name: str, arguments: str = "") -> None:
        self._parts.append(ToolCallDelta(self._num_calls, fresh_call_id(), name, arguments))
        self._num_calls += 1
        self.any_calls = self._behind_call = True

    def _read_arguments(self, final: bool) -> bool:
        ended = self._scan(0)
        arguments, rest = self._held[: self._at], self._held[self._at :]
        self._held, self._at = rest, max(0, self._at - len(self._held))
        if arguments:
            last = self._parts[-1] if self._parts else None
            if isinstance(last, ToolCallDelta) and last.index == self._num_calls - 1:
                self._parts[-1] = replace(last, arguments=last.arguments + arguments)
            else:
                self._parts.append(ToolCallDelta(self._num_calls - 1, "", "", arguments))
        if ended:
            # Within the object of the call.
            self._depth, self._state = 1, self._close_object
        return ended

    def _close_object(self, final: bool) -> bool:
        """Skips what follows the arguments: a closing brace, which may be missing, or further fields."""
        if self._at == 0:
            self._held = self._held[_end_of_space(self._held, 0) :]
            if not self._held and not final:
                return False
            if not self._held.startswith(("}", ",")):
                self._state = self._after_call
                return True
        ended = self._scan(0)
        if not ended:
            return False
        self._held, self._state = self._held[self._at :], self._after_call
        return True

    def _scan(self, depth: int) -> bool:
        """Moves on to where the brackets are as deep as `depth` again, or to the end of what there is."""
        while found := (_IN_STRING if self._in_string else _STRUCTURE).search(self._held, self._at):
            self._at = found.end()
            if found[0] == "\\":
                # Whatever it escapes is skipped, now or with the next piece.
                self._at += 1
            elif found[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == depth:
                    return True
        self._at = max(self._at, len(self._held))
        return False

    def _end_object(self) -> bool:
        try:
            call = msgspec.json.decode(self._held[self._begin : self._at], type=_Call)
            arguments = call.arguments_json()
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return self._no_call()
        if not call.name or not arguments.startswith("{"):
            return self._no_call()
        self._begin_call(call.name, arguments)
        self._held, self._state = self._held[self._at :], self._after_call
        return True

    def _no_call(self) -> bool:
        """Makes content of what was looked at, and searches on after it."""
        self._behind_call = False
        self._emit(self._at)
        self._state = self._search
        return True

    def _emit(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text and not (self._behind_call and text.isspace()):
            self._behind_call = False
            self._parts.append(ContentText(text))


class HermesParser(_Parser):
    """Reads <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write it, amid any text."""

    OPEN = "<tool_call>"
    _CLOSE: Final = "</tool_call>"

    def _after_call(self, final: bool) -> bool:
        """Skips the closing marker, which may be missing."""
        start = _end_of_space(self._held, 0)
        rest = self._held[start : start + len(self._CLOSE)]
        if rest != self._CLOSE and self._CLOSE.startswith(rest) and not final:
            return False
        if self._CLOSE.startswith(rest):
            self._held = self._held[start + len(rest) :]
        self._state = self._search
        return True


class LlamaParser(_Parser):
    """Reads {"name": ..., "parameters": {...}} as Llama 3 writes it.

    Calls come at the start of the text or after <|python_tag|>; further calls come after semicolons.
    """

    OPEN = "<|python_tag|>"

    def _first(self) -> _State:
        return self._start

    def _start(self, final: bool) -> bool:
        start = _end_of_space(self._held, 0)
        if start == len(self._held) and not final:
            return False
        if self._held[start : start + 1] == "{":
            self._begin_object(start)
        else:
            self._state = self._search
        return True

    def _after_call(self, final: bool) -> bool:
        start = _end_of_space(self._held, 0)
        if start == len(self._held) and not final:
            return False
        if self._held[start : start + 1] == ";":
            self._begin_object(start + 1)
        else:
            self._state = self._search
        return True


def _end_of_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found
    return found.end()
