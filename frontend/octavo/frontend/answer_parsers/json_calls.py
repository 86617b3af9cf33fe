"""Finds calls that are JSON objects with a name and arguments, one by one or in a list, as many families write them."""

import re
import secrets
import string
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from octavo.frontend.answer_parsers.call_parser import MAX_HEAD, JsonArgumentsParser, end_of_space

# The head of a call whose arguments come last, from its first brace to the brace of the arguments.
_TEXT: Final = r'"(?:[^"\\]|\\.)*"'
_HEAD: Final = re.compile(
    rf'\{{\s*(?:"(?:id|tool_call_id|type)"\s*:\s*{_TEXT}\s*,\s*)*"(?:name|tool_name)"\s*:\s*("(?:[^"\\]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMES: Final = ("name", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonForm:
    """Describes where the objects stand.

    They follow one of the markers `opens`; `at_start` also the start of the text; `in_lists` they may be the items of a
    list. Further ones follow a `separator`. `closes` are markers behind them.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    at_start: bool = False
    in_lists: bool = False
    separator: str = ""


class JsonCallParser(JsonArgumentsParser):
    """Reads {"name": ..., "arguments": {...}}, and the same with other names of the fields."""

    def __init__(self, form: JsonForm, *, is_forced: bool = False) -> None:
        super().__init__(form.opens, form.closes, is_forced=is_forced)
        self._form = form
        # Where the object begins that is read.
        self._start = 0
        self._in_list = False

    def _begin(self, final: bool) -> bool:
        if not self._form.at_start:
            return super()._begin(final)
        start = end_of_space(self._held, 0)
        if start == len(self._held) and not final:
            return False
        if self._held[start : start + 1] == "{":
            self._find_from(start)
        else:
            self._state = self._search
        return True

    def _opened(self, final: bool) -> bool:
        start = end_of_space(self._held, self._at)
        if start == len(self._held) and not final:
            return False
        self._in_list = self._form.in_lists and self._held[start : start + 1] == "["
        self._find_from(start + self._in_list)
        return True

    def _find_from(self, at: int) -> None:
        self._at, self._state = at, self._find_object

    def _find_object(self, final: bool) -> bool:
        self._at = end_of_space(self._held, self._at)
        if self._at == len(self._held):
            return final and self._no_call()
        if self._held[self._at] != "{":
            return self._no_call()
        self._start, self._depth, self._in_string = self._at, 0, False
        self._state = self._read_object
        return True

    def _read_object(self, final: bool) -> bool:
        if head := _HEAD.match(self._held, self._start, self._start + MAX_HEAD):
            name = _decoded(head[1])
            if isinstance(name, str):
                self._begin_call(name)
                self._begin_arguments(head.end())
                return True
        if self._scan():
            return self._end_object()
        return final and self._no_call()

    def _end_object(self) -> bool:
        """Reads an object whose fields came in another order."""
        found = _call_of(self._held[self._start : self._at])
        if found is None:
            return self._no_call()
        self._begin_call(*found)
        self._held, self._state = self._held[self._at :], self._after_call
        return True

    def _after_arguments(self, final: bool) -> bool:
        """Skips what follows the arguments within the object: a closing brace, which may be missing, or fields."""
        if self._at == 0:
            self._held, self._depth = self._held[end_of_space(self._held, 0) :], 1
            if not self._held and not final:
                return False
            if not self._held.startswith(("}", ",")):
                self._state = self._after_call
                return True
        if not self._scan():
            return False
        self._held, self._at, self._state = self._held[self._at :], 0, self._after_call
        return True

    def _after_call(self, final: bool) -> bool:
        start = end_of_space(self._held, 0)
        separator = "," if self._in_list else self._form.separator
        if separator and start == len(self._held) and not final:
            return False
        if separator and self._held.startswith(separator, start):
            self._find_from(start + len(separator))
            return True
        if self._in_list:
            self._in_list = False
            if self._held.startswith("]", start):
                self._held = self._held[start + 1 :]
        return super()._after_call(final)

    def _no_call(self) -> bool:
        self._in_list = False
        return super()._no_call()


# The name of a function, its id, and what may stand around both in Mistral's newer form.
_MISTRAL_HEAD: Final = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*")
_MISTRAL_ID: Final = string.ascii_letters + string.digits


class MistralCallParser(JsonCallParser):
    """Reads both forms of Mistral: [TOOL_CALLS] [{"name": ...}, ...], and [TOOL_CALLS]name[ARGS]{...}."""

    def __init__(self, form: JsonForm, *, is_forced: bool = False) -> None:
        super().__init__(form, is_forced=is_forced)
        self._is_headed = False

    def _opened(self, final: bool) -> bool:
        start = end_of_space(self._held, self._at)
        if start == len(self._held) and not final:
            return False
        self._is_headed = self._held[start : start + 1] not in ("[", "{")
        if not self._is_headed:
            return super()._opened(final)
        brace = self._held.find("{", self._at, self._at + MAX_HEAD)
        if brace < 0 and len(self._held) - self._at < MAX_HEAD and not final:
            return False
        head = _MISTRAL_HEAD.fullmatch(self._held, self._at, max(brace, self._at))
        if head is None:
            return self._no_call()
        self._begin_call(head["name"], call_id=head["id"] or "")
        self._begin_arguments(brace)
        return True

    def _after_arguments(self, final: bool) -> bool:
        if not self._is_headed:
            return super()._after_arguments(final)
        self._state = self._after_call
        return True

    def _fresh_id(self) -> str:
        # Its templates take no other ids back.
        return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))


def _decoded(text: str) -> object:
    """Returns the value of a JSON text, None for one that is none."""
    try:
        found: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return found


def _call_of(text: str) -> tuple[str, str] | None:
    """Returns the name and the arguments of a call that is a whole JSON object, None where it is no call."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name = next((_decoded_raw(fields[key]) for key in _NAMES if key in fields), None)
        arguments = next((bytes(fields[key]).decode() for key in _ARGUMENTS if key in fields), "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if arguments.startswith('"'):
        # Some write the text of the object.
        arguments = str(_decoded(arguments))
        arguments = arguments if isinstance(_decoded(arguments), dict) else ""
    return (name, arguments) if isinstance(name, str) and name and arguments.startswith("{") else None


def _decoded_raw(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)
