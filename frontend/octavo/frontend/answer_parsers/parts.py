"""Declares the parts of an answer that its text is read as, and what reads a sequence of an answer as such parts."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ReasoningText:
    """Holds text that the model has thought before or between what it answers."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """Holds text that the client has asked for."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """Holds a call, or a further part of one, which has no id and no name.

    The parts of `arguments`, joined, are the text of a JSON object, unless the answer was cut off inside of it. `index`
    counts the calls of an answer from 0.
    """

    index: int
    id: str
    name: str
    arguments: str


AnswerPart = ReasoningText | ContentText | ToolCallDelta


class ToolCallParser(Protocol):
    """Finds calls in an answer's text while the text arrives. The parts, joined, do not depend on how the text is cut.

    `any_calls` tells whether a call was found so far; then the answer's finish_reason `stop` becomes `tool_calls`.
    """

    any_calls: bool

    def feed(self, text: str) -> list[AnswerPart]:
        """Returns what has become certain with the next part of the text."""
        ...

    def finish(self) -> list[AnswerPart]:
        """Returns the rest, once no text follows. Text that has turned out to be no call is content."""
        ...


class PlainParser:
    """Finds no calls: all text is content."""

    any_calls = False

    def feed(self, text: str) -> list[AnswerPart]:
        """Returns the text as content."""
        return [ContentText(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        """Returns nothing, for no text was held back."""
        return []


class AnswerReader:
    """Reads one sequence of an answer: its events' reasoning and text go in, its parts come out in their order."""

    def __init__(self, parser: ToolCallParser, *, one_call: bool = False) -> None:
        """`one_call` leaves out all calls but the first."""
        self._parser = parser
        self._one_call = one_call

    @property
    def any_calls(self) -> bool:
        """Tells whether a call was found so far."""
        return self._parser.any_calls

    @property
    def is_plain(self) -> bool:
        """Tells whether all text is content: no calls are looked for."""
        return isinstance(self._parser, PlainParser)

    def take(self, reasoning: str, text: str) -> list[AnswerPart]:
        """Returns the parts that have become certain with a `TextDelta`, of which the two are given."""
        found: list[AnswerPart] = [ReasoningText(reasoning)] if reasoning else []
        return found + self._wanted(self._parser.feed(text)) if text else found

    def finish(self) -> list[AnswerPart]:
        """Returns the rest, once the sequence has ended."""
        return self._wanted(self._parser.finish())

    def _wanted(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        if not self._one_call:
            return parts
        return [part for part in parts if not isinstance(part, ToolCallDelta) or part.index == 0]


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Returns the parts with neighbours of one kind put together, and with each call whole."""
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        match part, last:
            case ToolCallDelta(id=""), ToolCallDelta():
                found[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + part.arguments)
            case ReasoningText(), ReasoningText():
                found[-1] = ReasoningText(last.text + part.text)
            case ContentText(), ContentText():
                found[-1] = ContentText(last.text + part.text)
            case _:
                found.append(part)
    return found


def text_of(parts: Iterable[AnswerPart], kind: type[ReasoningText] | type[ContentText]) -> str:
    """Returns the text of all parts of one kind."""
    return "".join(part.text for part in parts if isinstance(part, kind))


def fresh_call_id() -> str:
    """Returns a random id for a call."""
    return f"call_{secrets.token_hex(12)}"
