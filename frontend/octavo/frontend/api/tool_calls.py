"""Reads tools and the choice among them, and finds and forces calls of functions in an answer.

The chat API and the responses API write tools alike but for one level of nesting.
"""

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from octavo.frontend.answer_parsers.call_formats import CALL_FORMATS, OPENAI
from octavo.frontend.answer_parsers.call_grammars import GrammarWriter, arguments_of, types_of
from octavo.frontend.answer_parsers.harmony import FINAL_HEADER
from octavo.frontend.answer_parsers.lark import TokenIds
from octavo.frontend.answer_parsers.parts import AnswerReader, PlainParser
from octavo.frontend.api.body import Reading
from octavo.frontend.api.sampling import unenforced_in
from octavo.frontend.errors import Reason, Unsupported, bad_parameter
from octavo.frontend.request.chat import Tool
from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.text.grammars import embedded

MAX_TOOLS = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "a name has 1 to 64 letters, digits, underscores, dots and dashes"
_KNOWN: Final = {"name", "description", "parameters", "strict"}


class ToolChoiceMode(enum.StrEnum):
    """Says whether an answer is to have calls: none; if the model likes; some; one of a certain function."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    FUNCTION = "function"


@dataclass(frozen=True)
class ToolChoice:
    """Holds the choice among tools; `name` is set for `FUNCTION` only."""

    mode: ToolChoiceMode
    name: str = ""


@dataclass(frozen=True)
class Tools:
    """Holds the functions that the model may call, and the namespaces of functions, by the names of the functions."""

    functions: tuple[Tool, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)


def read_tools(value: object, ignored: list[str]) -> Tools:
    """Reads the field `tools`, already decoded from JSON; None for left out.

    Tools that are no functions of the client's (searching the web, say) cannot be called here: they are left out, and
    named in `ignored`, as are unknown fields of functions. Raises `InvalidRequest`.
    """
    if value is None:
        return Tools()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise bad_parameter("tools", "not a list that fits", f"it must be a list of at most {MAX_TOOLS} functions")
    found: list[Tool] = []
    namespaces: dict[str, str] = {}
    for place, item in enumerate(value):
        name = f"tools[{place}]"
        match item:
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                named = [_tool(f"{name}.tools[{n}]", each, ignored) for n, each in enumerate(inner[: MAX_TOOLS + 1])]
                found += filter(None, named)
                namespaces |= {tool.name: namespace for tool in named if tool}
            case _:
                found += filter(None, [_tool(name, item, ignored)])
    if len(found) > MAX_TOOLS:
        raise bad_parameter("tools", f"{len(found)} functions", f"at most {MAX_TOOLS} may be")
    if len({tool.name for tool in found}) < len(found):
        raise bad_parameter("tools", "naming a function twice", "each must have its own name")
    return Tools(tuple(found), namespaces)


def read_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """Reads the field `tool_choice`; left out, the field means `AUTO` with tools, `NONE` without.

    Raises `InvalidRequest` for a choice that the tools do not allow.
    """
    choice = _choice(value, has_tools=bool(tools))
    if choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.FUNCTION) and not tools:
        raise bad_parameter("tool_choice", choice.mode.value, "there are no tools to choose from; send some")
    if choice.mode is ToolChoiceMode.FUNCTION and choice.name not in {tool.name for tool in tools}:
        raise bad_parameter("tool_choice", repr(choice.name[:64]), "it must name one of the tools")
    return choice


def _tool(place: str, item: object, ignored: list[str]) -> Tool | None:
    if not isinstance(item, dict) or not isinstance(item.get("type"), str):
        raise bad_parameter(place, "not an object with a type", 'it must be {"type": "function", ...}')
    if item["type"] != "function":
        ignored.append(f"{place}.{item['type'][:64]}")
        return None
    nested = item.get("function")
    function = nested if isinstance(nested, dict) else {key: item[key] for key in item if key != "type"}
    ignored += [f"{place}.{key}" for key in sorted(function.keys() - _KNOWN)]
    return _function(place, function)


def _function(place: str, function: dict[str, Any]) -> Tool:
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_parameter(f"{place}.name", repr(name)[:80], _NAME_RULE)
    if not isinstance(description, str | None):
        raise bad_parameter(f"{place}.description", "not a text", "it must be one")
    if not isinstance(parameters, dict | None):
        raise bad_parameter(f"{place}.parameters", "not an object", "it must be a JSON schema")
    schema = "" if parameters is None else msgspec.json.encode(parameters).decode()
    return Tool(name, description or "", schema, strict=function.get("strict") is True)


def _choice(value: object, *, has_tools: bool) -> ToolChoice:
    match value:
        case None:
            return ToolChoice(ToolChoiceMode.AUTO if has_tools else ToolChoiceMode.NONE)
        case "none" | "auto" | "required":
            return ToolChoice(ToolChoiceMode(value))
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice(ToolChoiceMode.FUNCTION, name)
    rule = 'it must be "none", "auto", "required" or a function that is named'
    raise bad_parameter("tool_choice", repr(value)[:64], rule)


# Kinds of constraints whose answers may stand beside calls in one grammar.
_ANSWERS: Final = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)


def make_reader(
    kind: str, tools: Sequence[Tool] = (), *, is_forced: bool = False, one_call: bool = False
) -> AnswerReader:
    """Returns a reader of one sequence of an answer that may call `tools`. With `is_forced` a constraint makes the
    answer consist of calls.

    `kind` is the name of a format; the reader of `none` finds no calls.
    """
    form = CALL_FORMATS.get(kind)
    return AnswerReader(form.make(types_of(tools), is_forced) if form else PlainParser(), one_call=one_call)


def markers_of(kind: str) -> tuple[str, ...]:
    """Returns the texts that may be special tokens, without which calls of a format could not be found."""
    return CALL_FORMATS[kind].markers if kind in CALL_FORMATS else ()


def constraint_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    kind: str,
    reading: Reading,
    token_id: TokenIds,
    asked: Constraint | None = None,
) -> Constraint | None:
    """Returns what an answer must match, None for any answer.

    A forced choice makes the answer consist of calls, in the format that the parser of `kind` reads; `token_id` returns
    the ids of tokens by their texts. Without a forced choice the answer must match `asked`; if `asked` is JSON, the
    answer may be calls instead. `parallel` allows more than one call. Raises `Unsupported` where a call is forced and
    the model has no known format, and `InvalidRequest`.
    """
    if choice.mode is ToolChoiceMode.NONE or not tools:
        return asked
    writing = _Writing(kind, reading, token_id, single=choice.mode is ToolChoiceMode.FUNCTION or not parallel)
    if choice.mode is ToolChoiceMode.AUTO:
        may_call = asked is not None and asked.kind in _ANSWERS and kind in CALL_FORMATS
        return writing.constraint(tools, asked) if may_call else asked
    if kind not in CALL_FORMATS:
        raise Unsupported(
            Reason.UNSUPPORTED_FIELD,
            "tool_choice forces a call, but this model has no known format of calls; leave it out, or start the server"
            " with --tool-call-parser",
            field="tool_choice",
        )
    forced = [tool for tool in tools if choice.mode is ToolChoiceMode.REQUIRED or tool.name == choice.name]
    return writing.constraint(forced)


@dataclass(frozen=True)
class _Writing:
    """Writes the grammar of calls of one request, in the format `kind`, with one call where it is `single`."""

    kind: str
    reading: Reading
    token_id: TokenIds
    single: bool

    def constraint(self, tools: Sequence[Tool], answer: Constraint | None = None) -> Constraint:
        """Returns a grammar of calls, or of `answer` instead, in Lark's notation with JSON schemas, as llguidance reads
        it."""
        form = CALL_FORMATS[self.kind]
        writer = GrammarWriter(self.token_id, form.markers, self._embedded, self._unenforced)
        rules = list[str]()
        for tool in tools:
            _check_schema(tool)
        rules += form.syntax.grammar(tools, writer, single=self.single)
        if answer:
            frame = writer.literal(FINAL_HEADER) if self.kind == OPENAI else ""
            rules += [f"answer: {frame} answer_text", f"answer_text: %json {_answer('response_format', answer)}"]
        lines = [f"start: calls{' | answer' if answer else ''}", *rules]
        return Constraint(ConstraintKind.GRAMMAR, text="\n".join(lines) + "\n", framed=True)

    def _embedded(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        """Returns the schema of a function's arguments, or of one of them. Raises `InvalidRequest` for a schema that
        cannot be read."""
        field = f"tools.{tool.name}.parameters"
        if not tool.strict:
            found = unenforced_in(field, schema)
            self.reading.ignored.extend(name for name in found if name not in self.reading.ignored)
        return _embedded(field, json.dumps(schema), closes=self.reading.closes, lenient=not tool.strict)

    def _unenforced(self, tool: Tool, keyword: str) -> None:
        field = f"tools.{tool.name}.parameters.properties.{keyword}"
        if tool.strict:
            rule = "this model's format of calls cannot be held to it; leave it out, or leave out strict"
            raise bad_parameter(field, "asked for", rule)
        self.reading.ignored.append(field)


def _check_schema(tool: Tool) -> None:
    """Raises `InvalidRequest` for a tool whose arguments cannot be told from its schema."""
    try:
        list(arguments_of(tool))
    except ValueError as error:
        raise bad_parameter(f"tools.{tool.name}.parameters", "not usable", str(error)) from error
    except RecursionError as error:
        raise bad_parameter(f"tools.{tool.name}.parameters", "nested too deeply", "flatten it") from error


def _answer(field: str, schema: Constraint) -> str:
    text = schema.text or '{"type": "object"}'
    return _embedded(field, text, closes=schema.closes, lenient=schema.lenient)


def _embedded(field: str, text: str, *, closes: bool, lenient: bool) -> str:
    try:
        return embedded(text, closes=closes, lenient=lenient)
    except ValueError as error:
        raise bad_parameter(field, "not usable", str(error)) from error
    except RecursionError as error:
        raise bad_parameter(field, "nested too deeply", "flatten it") from error
