"""Finds calls whose name stands in a header of the model's own before arguments that are JSON."""

import re
from dataclasses import dataclass

from octavo.frontend.answer_parsers.call_parser import MAX_HEAD, JsonArgumentsParser


@dataclass(frozen=True)
class HeadedForm:
    """Describes a header: what stands between one of the markers `opens` and the brace of the arguments.

    The pattern `head` has a group `name`, and may have one `id`. `closes` are markers behind the arguments.
    """

    opens: tuple[str, ...]
    head: re.Pattern[str]
    closes: tuple[str, ...]


class HeadedCallParser(JsonArgumentsParser):
    """Reads calls such as those of DeepSeek, Kimi and gpt-oss."""

    def __init__(self, form: HeadedForm, *, is_forced: bool = False) -> None:
        super().__init__(form.opens, form.closes, is_forced=is_forced)
        self._head = form.head

    def _opened(self, final: bool) -> bool:
        brace = self._held.find("{", self._at, self._at + MAX_HEAD)
        if brace < 0 and len(self._held) - self._at < MAX_HEAD and not final:
            return False
        head = self._head.fullmatch(self._held, self._at, max(brace, self._at))
        if head is None:
            return self._no_call()
        self._begin_call(head["name"], call_id=head.groupdict().get("id") or "")
        self._begin_arguments(brace)
        return True

    def _after_arguments(self, final: bool) -> bool:
        self._state = self._after_call
        return True
