"""Writes grammars of calls in a model's own format, in Lark's notation, by which an answer is forced to be calls."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from octavo.frontend.answer_parsers.lark import TokenIds, literal, quoted
from octavo.frontend.answer_parsers.tagged_calls import ArgumentTypes
from octavo.frontend.request.chat import Tool

# The most calls in an answer; one for each of some hundred rows is the most that anybody asks for.
_MAX_CALLS: Final = 128
# Keywords of a text's schema that bind nothing, and those that formats without quotes around a text can enforce.
_FREE: Final = frozenset({"type", "description", "title", "default", "examples", "enum", "const", "$ref"})
_DEFINITIONS: Final = ("$defs", "definitions")
# The schema of all arguments, where that of one is a root of its own.
_ROOT: Final = "octavo-all-arguments"
# References that are followed from one to the next.
_MAX_REFERENCES: Final = 16
# Any value, and any key, in formats with a notation of their own.
_TEXT: Final = "/(?s:.+)/"


@dataclass(frozen=True)
class GrammarWriter:
    """Holds what writing a grammar takes beside the tools.

    `markers` are the texts that may be tokens of their own, of which `token_id` returns the ids. `embed` returns the
    schema of a tool, or of one of its arguments, as it stands within a grammar. `unenforced` hears of a keyword in an
    argument's schema that the format cannot hold an answer to.
    """

    token_id: TokenIds
    markers: tuple[str, ...]
    embed: Callable[[Tool, Mapping[str, Any]], str]
    unenforced: Callable[[Tool, str], None]

    def literal(self, text: str) -> str:
        """Returns what matches exactly `text`."""
        return literal(text, self.markers, self.token_id)

    def text_until(self, name: str, end: str) -> tuple[str, list[str]]:
        """Returns what matches any text and `end` behind it, and the rules that it needs, under `name`."""
        if self.token_id(end) is not None:
            return f"{_TEXT}? {self.literal(end)}", []
        return name, [f"{name}[suffix={quoted(end)}]: /(?s:.*)/"]


@dataclass(frozen=True)
class CallSyntax(ABC):
    """Describes how calls are written: `first` before all, a `separator` between two, and `last` behind all.

    Without a `separator` there is but one call in an answer.
    """

    @property
    @abstractmethod
    def around(self) -> tuple[str, str | None, str]:
        """Returns `first`, `separator` and `last`."""

    @abstractmethod
    def rules(self, rule: str, tool: Tool, writer: GrammarWriter) -> Iterator[str]:
        """Yields the rules of a call of `tool`, of which the first has the name `rule`, as all others begin."""

    def grammar(self, tools: Sequence[Tool], writer: GrammarWriter, *, single: bool) -> list[str]:
        """Returns the rules of `calls`: some calls of `tools`, or with `single` one."""
        first, separator, last = self.around
        more = "" if single or separator is None else f"({writer.literal(separator)} call){{0,{_MAX_CALLS - 1}}}"
        lines = [f"calls: {writer.literal(first)} call {more} {writer.literal(last)}"]
        lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        for number, tool in enumerate(tools):
            lines += self.rules(f"call_{number}", tool, writer)
        return lines


@dataclass(frozen=True)
class JsonSyntax(CallSyntax):
    """Describes calls whose arguments are a JSON object: the texts `before` the name, `between` the name and the
    arguments, and `behind` these. Where there is a `numbering`, it and a number follow the name."""

    before: str
    between: str
    behind: str
    separator: str | None
    first: str = ""
    last: str = ""
    numbering: str = ""

    @property
    def around(self) -> tuple[str, str | None, str]:
        return self.first, self.separator, self.last

    def rules(self, rule: str, tool: Tool, writer: GrammarWriter) -> Iterator[str]:
        head = writer.literal(self.before + tool.name + (self.numbering or self.between))
        if self.numbering:
            head = f"{head} /[0-9]{{1,3}}/ {writer.literal(self.between)}"
        yield f"{rule}: {head} {rule}_arguments {writer.literal(self.behind)}"
        # A root of its own, so that its references stay inside of it.
        yield f"{rule}_arguments: %json {writer.embed(tool, schema_of(tool))}"


@dataclass(frozen=True)
class TaggedSyntax(CallSyntax):
    """Describes calls whose arguments stand between tags.

    `head` is the text before and behind the name; `argument` that before a key, before its value, behind the value, and
    between two arguments; `end` closes the call. `markers` are further texts that may be tokens. Where the format
    `tells_text`, an attribute of the argument's tag says whether its value is a text.
    """

    head: tuple[str, str]
    argument: tuple[str, str, str, str]
    end: str
    separator: str
    first: str = ""
    last: str = ""
    markers: tuple[str, ...] = ()
    tells_text: bool = False

    @property
    def around(self) -> tuple[str, str | None, str]:
        return self.first, self.separator, self.last

    def rules(self, rule: str, tool: Tool, writer: GrammarWriter) -> Iterator[str]:
        before, behind = self.head
        arguments = list(arguments_of(tool))
        named = " ".join(
            f"{rule}_{number}{'' if argument.required else '?'}" for number, argument in enumerate(arguments)
        )
        yield f"{rule}: {writer.literal(before + tool.name + behind)} {named} {writer.literal(self.end)}"
        for number, argument in enumerate(arguments):
            yield from self._argument(f"{rule}_{number}", tool, argument, writer)

    def _argument(self, rule: str, tool: Tool, argument: "Argument", writer: GrammarWriter) -> Iterator[str]:
        opening, before_value, behind_value, between = self.argument
        if self.tells_text:
            before_value = f'" string="{"true" if argument.is_text else "false"}">'
        head, rest = writer.literal(opening + argument.key + before_value), writer.literal(between)
        if not argument.is_text:
            yield f"{rule}: {head} {rule}_value {writer.literal(behind_value)} {rest}"
            yield f"{rule}_value: %json {writer.embed(tool, argument.schema)}"
        elif texts := argument.texts:
            choice = " | ".join(writer.literal(text + behind_value) for text in texts)
            yield f"{rule}: {head} ({choice}) {rest}"
        else:
            argument.report(tool, writer)
            value, more = writer.text_until(f"{rule}_value", behind_value)
            yield f"{rule}: {head} {value} {rest}"
            yield from more


@dataclass(frozen=True)
class _ListedSyntax(CallSyntax):
    """Describes calls whose arguments stand between commas."""

    @abstractmethod
    def value(self, rule: str, tool: Tool, argument: "Argument", writer: GrammarWriter) -> Iterator[str]:
        """Yields the rules of an argument with its key, of which the first has the name `rule`."""

    def list_rules(
        self, rule: str, tool: Tool, arguments: Sequence["Argument"], writer: GrammarWriter, comma: str
    ) -> Iterator[str]:
        """Yields the rules of `rule`_list: all arguments, in order, of which optional ones may be left out."""
        names = [f"{rule}_{number}" for number in range(len(arguments))]
        # One rule for each argument that may be the first.
        firsts = list[str]()
        for place, argument in enumerate(arguments):
            behind = [
                f"({quoted(comma)} {name}){'' if other.required else '?'}"
                for name, other in zip(names[place + 1 :], arguments[place + 1 :], strict=True)
            ]
            firsts.append(" ".join([names[place], *behind]))
            if argument.required:
                break
        else:
            firsts.append('""')
        yield f"{rule}_list: " + " | ".join(firsts)
        for name, argument in zip(names, arguments, strict=True):
            yield from self.value(name, tool, argument, writer)


@dataclass(frozen=True)
class PythonicSyntax(_ListedSyntax):
    """Describes calls of Python in a list."""

    @property
    def around(self) -> tuple[str, str | None, str]:
        return "[", ", ", "]"

    def rules(self, rule: str, tool: Tool, writer: GrammarWriter) -> Iterator[str]:
        yield f'{rule}: {quoted(tool.name + "(")} {rule}_list ")"'
        yield from self.list_rules(rule, tool, list(arguments_of(tool)), writer, ", ")

    def value(self, rule: str, tool: Tool, argument: "Argument", writer: GrammarWriter) -> Iterator[str]:
        key = quoted(argument.key + "=")
        if argument.schema.get("type") == "boolean":
            yield f'{rule}: {key} ("True" | "False")'
        else:
            yield f"{rule}: {key} {rule}_value"
            yield f"{rule}_value: %json {writer.embed(tool, argument.schema)}"


@dataclass(frozen=True)
class GemmaSyntax(_ListedSyntax):
    """Describes calls of newer Gemmas: the markers before and behind a call, and around a text."""

    open: str
    close: str
    quote: str

    @property
    def around(self) -> tuple[str, str | None, str]:
        return "", "", ""

    def rules(self, rule: str, tool: Tool, writer: GrammarWriter) -> Iterator[str]:
        head = writer.literal(f"{self.open}call:{tool.name}{{")
        yield f"{rule}: {head} {rule}_list {writer.literal('}' + self.close)}"
        # The templates of these models sort them.
        arguments = sorted(arguments_of(tool), key=lambda argument: argument.key)
        yield from self.list_rules(rule, tool, arguments, writer, ",")

    def value(self, rule: str, tool: Tool, argument: "Argument", writer: GrammarWriter) -> Iterator[str]:
        key, quote = quoted(argument.key + ":"), writer.literal(self.quote)
        if not argument.is_text and argument.schema.get("type") in ("integer", "number", "boolean"):
            yield f"{rule}: {key} {rule}_value"
            yield f"{rule}_value: %json {writer.embed(tool, argument.schema)}"
            return
        if argument.is_text and (texts := argument.texts):
            yield f"{rule}: {key} ({' | '.join(writer.literal(self.quote + text + self.quote) for text in texts)})"
            return
        argument.report(tool, writer)
        text, more = writer.text_until(f"{rule}_text", self.quote)
        if argument.is_text:
            yield f"{rule}: {key} {quote} {text}"
        else:
            yield f"{rule}: {key} {rule}_value"
            yield f"{rule}_value: {rule}_quoted | {rule}_items | {rule}_fields | {rule}_word"
            yield f"{rule}_quoted: {quote} {text}"
            yield f'{rule}_items: "[" ({rule}_value ("," {rule}_value)*)? "]"'
            yield f'{rule}_fields: "{{" ({rule}_field ("," {rule}_field)*)? "}}"'
            yield f'{rule}_field: /[A-Za-z_][A-Za-z0-9_-]*/ ":" {rule}_value'
            yield rf"{rule}_word: /-?[0-9]+(\.[0-9]+)?|true|false|null/"
        yield from more


@dataclass(frozen=True)
class Argument:
    """Holds an argument of a function with its schema, whose references are whole."""

    key: str
    schema: Mapping[str, Any]
    required: bool

    @property
    def is_text(self) -> bool:
        """Tells whether the value is always a text."""
        kind = self.schema.get("type")
        return kind == "string" or (kind is None and bool(self.texts))

    @property
    def texts(self) -> list[str]:
        """Returns the texts that alone may be the value, none for any other schema."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []

    def report(self, tool: Tool, writer: GrammarWriter) -> None:
        """Reports the keywords that bind a value which the grammar leaves free."""
        for keyword in sorted(self.schema.keys() - _FREE - set(_DEFINITIONS)):
            writer.unenforced(tool, f"{self.key}.{keyword}")


def schema_of(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments. Raises `ValueError` for one that is no JSON object."""
    found = json.loads(tool.parameters_json) if tool.parameters_json else {"type": "object"}
    if not isinstance(found, dict):
        raise ValueError("a schema is a JSON object")
    return found


def arguments_of(tool: Tool) -> Iterator[Argument]:
    """Yields a tool's arguments in order. Raises `ValueError` for a schema that only refers to itself."""
    root = schema_of(tool)
    schema = _resolved(root, root)
    properties, required = schema.get("properties"), schema.get("required")
    shared = _shared(root)
    for key, value in properties.items() if isinstance(properties, dict) else ():
        own = _redirected(_resolved(value if isinstance(value, dict) else {}, root))
        yield Argument(key, {**shared, **own}, isinstance(required, list) and key in required)


def _shared(root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the schema of each argument has beside its own: the definitions, and where anything refers to the
    schema of all arguments, that as one of them."""
    shared = {name: _redirected(root[name]) for name in _DEFINITIONS if name in root}
    if _refers_to_root(root):
        whole = {key: value for key, value in root.items() if key not in _DEFINITIONS}
        found = shared.get("$defs")
        shared["$defs"] = {**(found if isinstance(found, dict) else {}), _ROOT: _redirected(whole)}
    return shared


def _is_of_root(reference: object) -> bool:
    """Tells whether a reference is to the schema of all arguments, or into it."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    return not reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS))


def _refers_to_root(schema: object) -> bool:
    if isinstance(schema, dict):
        return _is_of_root(schema.get("$ref")) or any(map(_refers_to_root, schema.values()))
    return isinstance(schema, list) and any(map(_refers_to_root, schema))


def _redirected(schema: Any) -> Any:
    """Returns a schema whose references to that of all arguments name the definition that this is for one argument."""
    if isinstance(schema, dict):
        found = {key: _redirected(value) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and _is_of_root(reference):
            found["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
        return found
    return list(map(_redirected, schema)) if isinstance(schema, list) else schema


def types_of(tools: Iterable[Tool]) -> ArgumentTypes:
    """Returns of each argument of each tool whether it is a text; none of a tool whose schema cannot be read."""
    found: dict[str, dict[str, bool]] = {}
    for tool in tools:
        try:
            found[tool.name] = {argument.key: argument.is_text for argument in arguments_of(tool)}
        except (ValueError, RecursionError):
            found[tool.name] = {}
    return found


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that a reference within `root` names, or `schema` if that is none."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        found: Any = root
        for name in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"the reference {reference[:64]!r} names no schema in it")
        schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **found}
    raise ValueError("its references only lead to each other; let each name a schema that says what a value is")
