"""Reads the channels of gpt-oss: what it thinks, what it answers, and its calls of functions.

A message is a header, <|message|>, and a body up to one of several markers. The header names a channel, and for a call
the function that the message is for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from octavo.frontend.answer_parsers.lark import TokenIds, any_token_but, at_most
from octavo.frontend.answer_parsers.reasoning import ReasoningFormat, ReasoningLimits, ReasoningParser, Split
from octavo.frontend.answer_parsers.scanning import overlap

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
CONSTRAIN: Final = "<|constrain|>"
MARKERS: Final = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
# How the header of a call reads once the parser has read it.
CALL_HEADER: Final = f"{CHANNEL}commentary to="
# The header of an answer.
FINAL_HEADER: Final = f"{CHANNEL}final{MESSAGE}"
_ENDS: Final = (END, CALL, RETURN, START, CHANNEL)
# What a header begins with.
_BEGINS: Final = (START, CHANNEL, MESSAGE, "to=")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
# The most characters of a header.
_MAX_HEADER: Final = 256


@dataclass(frozen=True)
class HarmonyReasoning(ReasoningFormat):
    """Describes the channels of gpt-oss, of which `analysis` is what it thinks.

    A call stays in the text, under one form of header; other markers are left out.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        return MARKERS

    def parser(self, *, is_open: bool = False) -> ReasoningParser:
        return _HarmonyParser()

    def grammar(self, asked: ReasoningLimits, token_id: TokenIds) -> str:
        ids = {marker: found for marker in MARKERS if (found := token_id(marker)) is not None}
        if len(ids) < len(MARKERS):
            raise ValueError("this model's vocabulary lacks tokens around its reasoning, so its end cannot be forced")
        token = {marker: f"<[{found}]>" for marker, found in ids.items()}
        any_thought = any_token_but({ids[END], *asked.ends})
        opening = f'{token[CHANNEL]} "analysis" {token[MESSAGE]}'
        thought = f'{opening} {any_thought}{at_most(asked.max_tokens)} {token[END]} {token[START]} "assistant"'
        if asked.is_constrained:
            frame = "" if asked.is_framed else f'{token[CHANNEL]} "final" {token[MESSAGE]}'
            return f"start: thought? {frame} @answer\nthought: {thought}\n"
        body = any_token_but({ids[marker] for marker in (END, START, CHANNEL)} | asked.ends)
        channel = rf"{token[CHANNEL]} /(final|commentary)[^<]*/ ({token[CONSTRAIN]} /[a-z]+/)?"
        lines = [
            f'start: thought? message ({token[END]} {token[START]} "assistant" message)*',
            f"thought: {thought}",
            f"message: / to=[^<]+/? {channel} {token[MESSAGE]} {body}*",
        ]
        return "\n".join(lines) + "\n"


class _HarmonyParser(ReasoningParser):
    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        # What is written before the next reasoning or text: a break between two messages.
        self._has_thought = self._has_answered = False
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._add: Callable[[str], None] = self._answer
        self._ending = ""
        self._state: Callable[[bool], bool] = self._header
        self._num_undecided = 0

    def feed(self, text: str, num_tokens: int = 1) -> Split:
        self._num_undecided += num_tokens
        return self._split(text)

    def finish(self) -> Split:
        return self._split("", final=True)

    def _split(self, text: str, *, final: bool = False) -> Split:
        self._held += text
        self._reasoning, self._text = [], []
        while self._state(final):
            pass
        self.is_between = self._state == self._header
        if not self.is_between:
            self._count()
        return Split("".join(self._reasoning), "".join(self._text))

    def _count(self) -> None:
        """Counts the tokens since the last count for the message that is read."""
        if self._add == self._think:
            self.num_tokens += self._num_undecided
        self._num_undecided = 0

    def _header(self, final: bool) -> bool:
        rest = self._held.lstrip()
        if not any(begin.startswith(rest) or rest.startswith(begin) for begin in _BEGINS):
            return self._no_header(0)
        at = rest.find(MESSAGE)
        if at < 0 and len(rest) <= _MAX_HEADER:
            # One that is cut off says nothing.
            self._held = "" if final else rest
            return False
        if not 0 <= at <= _MAX_HEADER:
            return self._no_header(len(self._held) - len(rest) + 1)
        self._open(rest[:at])
        self._held, self._state = rest[at + len(MESSAGE) :], self._body
        return True

    def _no_header(self, length: int) -> bool:
        """Reads as an answer what has no header, the first `length` characters whatever they are."""
        self._add, self._ending, self._state = self._answer, "", self._body
        self._pass(length)
        return bool(self._held)

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._ending = ""
        if recipient:
            self._add, self._ending = self._call, CALL
            self._text.append(f"{CALL_HEADER}{recipient[1]}{MESSAGE}")
        elif channel and channel[1] == "analysis":
            self._add = self._think
            if self._has_thought:
                self._reasoning.append("\n")
        else:
            self._add = self._answer
            if self._has_answered:
                self._text.append("\n")

    def _body(self, final: bool) -> bool:
        found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
        if not found:
            kept = 0 if final else max(overlap(self._held, end) for end in _ENDS)
            self._pass(len(self._held) - kept)
            return False
        at, end = min(found)
        self._pass(at)
        self._count()
        if self._ending:
            self._text.append(self._ending)
        self._held = self._held[0 if end in (START, CHANNEL) else len(end) :]
        self._state = self._header
        return True

    def _pass(self, length: int) -> None:
        if length:
            self._add(self._held[:length])
        self._held = self._held[length:]

    def _call(self, text: str) -> None:
        self._text.append(text)

    def _think(self, text: str) -> None:
        self._has_thought = True
        self._reasoning.append(text)

    def _answer(self, text: str) -> None:
        self._has_answered = True
        self._text.append(text)
