"""Calls of functions in an answer: which format a model writes them in, how they are found, how they are forced."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from octavo.frontend.chat import Tool
from octavo.frontend.constraint import Constraint, ConstraintKind
from octavo.frontend.errors import Reason, Unsupported, bad_parameter
from octavo.frontend.json_schemas import embedded
from octavo.frontend.openai.reading import Reading
from octavo.frontend.openai.structured import unenforced_in
from octavo.frontend.openai.tool_parsers import HermesParser, LlamaParser, ParsedDelta, PlainParser
from octavo.frontend.openai.tools import ToolChoice, ToolChoiceMode
from octavo.frontend.tokenizer import ModelTokenizer

HERMES: Final = "hermes"
LLAMA: Final = "llama"
NONE: Final = "none"
# Answers that may stand beside calls in one grammar.
_ANSWERS: Final = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)
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


def make_parser(kind: str, *, is_forced: bool = False) -> ToolCallParser:
    """A parser for one sequence of an answer, which may be forced to be calls; `kind` is one of `config.TOOL_PARSERS`
    but `auto`. That of `none` finds no calls."""
    return _FORMATS[kind].parser(is_forced=is_forced) if kind in _FORMATS else PlainParser()


def detect_kind(template: str, *, tells_of_tools: bool = True) -> str:
    """The format that a chat template tells its model to write calls in: one of `config.TOOL_PARSERS` but `auto`. Where
    it tells nothing of tools, `tools_in_text` does."""
    if template and not tells_of_tools:
        return HERMES
    if HermesParser.OPEN in template:
        return HERMES
    if LlamaParser.OPEN in template or '{"name": function name, "parameters":' in template:
        return LLAMA
    return NONE


def needs_special_tokens(kind: str, tokenizer: ModelTokenizer) -> bool:
    """Whether a request with tools must not skip special tokens, for one of them opens a call."""
    return kind in _FORMATS and tokenizer.is_special(_FORMATS[kind].marker)


def constraint_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    kind: str,
    reading: Reading,
    asked: Constraint | None = None,
) -> Constraint | None:
    """What makes an answer consist of calls, in the format that its parser reads; `asked`, what its text must match,
    where no call is forced: there it may be calls as well, if a schema is asked for.

    `parallel`: whether there may be more than one. Raises `Unsupported` where the model has no known format.
    """
    if choice.mode is ToolChoiceMode.NONE or not tools:
        return asked
    single = choice.mode is ToolChoiceMode.FUNCTION or not parallel
    if choice.mode is ToolChoiceMode.AUTO:
        may_call = asked is not None and asked.kind in _ANSWERS and kind in _FORMATS
        return _calls(tools, _FORMATS[kind], single, reading, asked) if may_call else asked
    if kind not in _FORMATS:
        raise Unsupported(
            Reason.UNSUPPORTED_FIELD,
            "tool_choice forces a call, but this model has no known format of calls; leave it out, or start the server"
            " with --tool-parser",
            field="tool_choice",
        )
    forced = [tool for tool in tools if choice.mode is ToolChoiceMode.REQUIRED or tool.name == choice.name]
    return _calls(forced, _FORMATS[kind], single, reading)


def _calls(
    tools: Sequence[Tool], form: _Format, single: bool, reading: Reading, answer: Constraint | None = None
) -> Constraint:
    """In Lark's notation with JSON schemas, as llguidance reads it. Each schema is a root of its own, so its references
    stay its own."""
    more = "" if single else f" ({json.dumps(form.separator)} call){{0,{_MAX_CALLS - 1}}}"
    before, between, behind = form.call
    lines = [
        f"start: calls{' | answer' if answer else ''}",
        f"calls: call{more}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        head = json.dumps(before + tool.name + between)
        lines.append(f"call_{number}: {head} arguments_{number} {json.dumps(behind)}")
        lines.append(f"arguments_{number}: %json {_arguments(tool, reading)}")
    if answer:
        lines.append(f"answer: %json {_embedded('response_format', answer)}")
    return Constraint(ConstraintKind.GRAMMAR, text="\n".join(lines) + "\n")


def _arguments(tool: Tool, reading: Reading) -> str:
    """The schema of a function's arguments. Raises `InvalidRequest` for one that cannot be read."""
    field, schema = f"tools.{tool.name}.parameters", tool.parameters_json or '{"type": "object"}'
    if not tool.strict:
        reading.ignored.extend(unenforced_in(field, msgspec.json.decode(schema)))
    kind = ConstraintKind.JSON_SCHEMA
    return _embedded(field, Constraint(kind, schema, closes=reading.closes, lenient=not tool.strict))


def _embedded(field: str, schema: Constraint) -> str:
    text = schema.text or '{"type": "object"}'
    try:
        return embedded(text, closes=schema.closes, lenient=schema.lenient)
    except ValueError as error:
        raise bad_parameter(field, "not usable", str(error)) from error
    except RecursionError as error:
        raise bad_parameter(field, "nested too deeply", "flatten it") from error
