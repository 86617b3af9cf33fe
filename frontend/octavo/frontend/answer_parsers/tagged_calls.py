"""Finds calls whose arguments stand one by one between tags of the model's own, as text or as JSON."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.frontend.answer_parsers.call_parser import MAX_HEAD, CallParser, end_of_space
from octavo.frontend.answer_parsers.scanning import overlap
from octavo.frontend.answer_parsers.values import json_of

# By the names of functions: of each argument whether it is a text.
ArgumentTypes = Mapping[str, Mapping[str, bool]]


@dataclass(frozen=True)
class TaggedForm:
    """Describes the tags.

    `head` follows one of the markers `opens`, and has a group `name`; `argument` opens an argument, and has a group
    `key`, and may have one `text` that is "true" where the value is a text. One of `value_ends` closes the argument,
    `end` the call, and `closes` may stand behind it. Each pattern shows by itself that it has ended.
    """

    opens: tuple[str, ...]
    head: re.Pattern[str]
    argument: re.Pattern[str]
    value_ends: tuple[str, ...]
    end: re.Pattern[str]
    closes: tuple[str, ...]


class TaggedCallParser(CallParser):
    """Reads calls such as those of GLM, Qwen3-Coder and MiniMax, and writes their arguments as JSON.

    A text is returned as it comes, any other value once it is whole.
    """

    def __init__(self, form: TaggedForm, types: ArgumentTypes, *, is_forced: bool = False) -> None:
        super().__init__(form.opens, form.closes, is_forced=is_forced)
        self._form = form
        self._types = types
        self._of_function: Mapping[str, bool] = {}
        self._num_arguments = 0
        self._is_text = False

    def _opened(self, final: bool) -> bool:
        head = self._form.head.match(self._held, self._at, self._at + MAX_HEAD)
        if head is None:
            may_come = len(self._held) - self._at < MAX_HEAD and not final
            return False if may_come else self._no_call()
        self._begin_call(head["name"], "{")
        self._of_function, self._num_arguments = self._types.get(head["name"], {}), 0
        self._held, self._state = self._held[head.end() :], self._read_arguments
        return True

    def _read_arguments(self, final: bool) -> bool:
        """Finds the next argument, or the end of the call."""
        self._held = self._held[end_of_space(self._held, 0) :]
        if argument := self._form.argument.match(self._held, 0, MAX_HEAD):
            self._begin_value(argument)
        elif end := self._form.end.match(self._held, 0, MAX_HEAD):
            self._add_arguments("}")
            self._held, self._state = self._held[end.end() :], self._after_call
        elif len(self._held) < MAX_HEAD and not final:
            return False
        else:
            self._end_broken(final)
        return True

    def _begin_value(self, argument: re.Match[str]) -> None:
        key, kind = argument["key"], argument.groupdict().get("text")
        self._is_text = self._of_function.get(key, False) if kind is None else kind == "true"
        between = ", " if self._num_arguments else ""
        quote = '"' if self._is_text else ""
        self._add_arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self._num_arguments += 1
        self._held, self._state = self._held[argument.end() :], self._read_value

    def _read_value(self, final: bool) -> bool:
        ends = self._form.value_ends
        found = [(at, -len(end)) for end in ends if (at := self._held.find(end)) >= 0]
        if not found:
            if self._is_text:
                kept = max(overlap(self._held, end) for end in ends)
                self._add_arguments(_escaped(self._held[: len(self._held) - kept]))
                self._held = self._held[len(self._held) - kept :]
            if final:
                self._held, self._state = "", self._search
            return False
        at, length = min(found)
        value = self._held[:at]
        self._add_arguments(f'{_escaped(value)}"' if self._is_text else json_of(value))
        self._held, self._state = self._held[at - length :], self._read_arguments
        return True


def _escaped(text: str) -> str:
    """Returns a part of a text as it stands within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
