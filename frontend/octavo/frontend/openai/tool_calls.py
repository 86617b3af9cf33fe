"""Calls of functions in an answer: which format a model writes them in, how they are found, how they are forced."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from octavo.frontend.chat import Tool
from octavo.frontend.constraint import Constraint, ConstraintKind
from octavo.frontend.errors import Reason, Unsupported
from octavo.frontend.openai.tool_parsers import HermesParser, LlamaParser, ParsedDelta, PlainParser
from octavo.frontend.openai.tools import ToolChoice, ToolChoiceMode
from octavo.frontend.tokenizer import ModelTokenizer

HERMES: Final = "hermes"
LLAMA: Final = "llama"
NONE: Final = "none"
# Of an answer; one call for each of some hundred rows is the most that anybody asks for.
_MAX_CALLS = 128


class ToolCallParser(Protocol):
    """Takes an answer's text apart while it arrives. The result does not depend on how the text is cut into pieces.

    `any_calls`: whether a call was found so far; then the answer's finish_reason `stop` becomes `tool_calls`.
    """

    any_calls: bool

    def feed(self, text: str) -> ParsedDelta:
        """What has become certain with the next piece."""
        ...

    def finish(self) -> ParsedDelta:
        """The rest, once it is known that nothing follows. What has turned out to be no call is content."""
        ...


@dataclass(frozen=True)
class _Format:
    """`call` is what stands before the name, between it and the arguments, and behind these."""

    parser: type[HermesParser] | type[LlamaParser]
    marker: str
    call: tuple[str, str, str]
    separator: str


_FORMATS: Final = {
    HERMES: _Format(
        HermesParser, HermesParser.OPEN, ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "\n"
    ),
    LLAMA: _Format(LlamaParser, LlamaParser.OPEN, ('{"name": "', '", "parameters": ', "}"), "; "),
}


def make_parser(kind: str) -> ToolCallParser:
    """A parser for one sequence of an answer; `kind` is one of `config.TOOL_PARSERS` but `auto`. That of `none` finds
    no calls."""
    return _FORMATS[kind].parser() if kind in _FORMATS else PlainParser()


def detect_kind(template: str) -> str:
    """The format that a chat template tells its model to write calls in: one of `config.TOOL_PARSERS` but `auto`."""
    if HermesParser.OPEN in template:
        return HERMES
    if LlamaParser.OPEN in template or '{"name": function name, "parameters":' in template:
        return LLAMA
    return NONE


def needs_special_tokens(kind: str, tokenizer: ModelTokenizer) -> bool:
    """Whether a request with tools must not skip special tokens, for one of them opens a call."""
    return kind in _FORMATS and tokenizer.is_special(_FORMATS[kind].marker)


def constraint_for(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, kind: str) -> Constraint | None:
    """What makes an answer consist of calls, in the format that its parser reads; None where it may be any text.

    `parallel`: whether there may be more than one. Raises `Unsupported` where the model has no known format.
    """
    if choice.mode in (ToolChoiceMode.AUTO, ToolChoiceMode.NONE):
        return None
    if kind not in _FORMATS:
        raise Unsupported(
            Reason.UNSUPPORTED_FIELD,
            "tool_choice forces a call, but this model has no known format of calls; leave it out, or start the server"
            " with --tool-parser",
            field="tool_choice",
        )
    forced = [tool for tool in tools if choice.mode is ToolChoiceMode.REQUIRED or tool.name == choice.name]
    single = choice.mode is ToolChoiceMode.FUNCTION or not parallel
    return Constraint(ConstraintKind.GRAMMAR, text=_grammar(forced, _FORMATS[kind], single))


def _grammar(tools: Sequence[Tool], form: _Format, single: bool) -> str:
    """In Lark's notation with JSON schemas, as llguidance reads it. Each schema is a root of its own, so its references
    stay its own."""
    more = "" if single else f" ({json.dumps(form.separator)} call){{0,{_MAX_CALLS - 1}}}"
    before, between, behind = form.call
    lines = [f"start: call{more}", "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = json.dumps(before + tool.name + between)
        schema = tool.parameters_json or '{"type": "object"}'
        lines.append(f"call_{number}: {head} arguments_{number} {json.dumps(behind)}")
        lines.append(f"arguments_{number}: %json {schema}")
    return "\n".join(lines) + "\n"
