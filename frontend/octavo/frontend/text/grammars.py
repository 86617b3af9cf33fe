"""Turns a client's constraint, such as a JSON schema, into a grammar of llguidance that workers follow.

The functions are pure. The library's calls in them may take long, so they belong into a process that can be stopped.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, Never

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.request.request import MAX_CHOICES, MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from octavo.runtime.models.grammar import GrammarError, compile_grammar, is_lost
from octavo.runtime.models.grammar import load_vocabulary as load_vocabulary
from octavo.wire.sampling import MAX_GRAMMAR

# Between the tokens of JSON there may be one space: models that may indent, or go on with spaces for ever, at times do.
JSON_SPACE: Final = "[ ]?"
# Keywords that grammars cannot hold an answer to. (`oneOf` becomes `anyOf`.)
UNENFORCED: Final = frozenset(
    {
        *("$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *("maxContains", "minContains", "not", "oneOf", "propertyNames", "then", "unevaluatedItems"),
        *("unevaluatedProperties", "uniqueItems"),
    }
)
# Formats of strings that grammars can hold an answer to.
FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
# Where one schema holds others: one, a list of them, or one under each name.
_ONE: Final = ("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# A schema with one of these keywords beside its properties says there which other properties there may be.
_OPENING: Final = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "$dynamicRef"),
        *("allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"),
    }
)
_ADDED: Final = frozenset({"allOf", "if", "then", "else", "not", "dependentSchemas"})


def closed(schema: Any) -> Any:
    """Returns `schema` with each object that lists its properties limited to these.

    An object for which `schema` says whether further properties are allowed stays as it is. Schemas that only add to
    another (`allOf`, `if`, ...) stay open, or nothing would fit both. Raises `RecursionError` for a schema that is
    nested too deeply.
    """
    return _Closing(_added_references(schema)).of(schema, closes=True)


def embedded(text: str, *, closes: bool, lenient: bool) -> str:
    """Returns the text of a schema as it stands within a grammar, with the library's options for it.

    `closes` and `lenient` are those of `Constraint`. Raises `ValueError` for a `text` that is no JSON object, and
    `RecursionError` for a schema that is nested too deeply.
    """
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    own = schema.get("x-guidance")
    form = {"whitespace_pattern": JSON_SPACE, "lenient": lenient, **(own if isinstance(own, dict) else {})}
    return json.dumps({**(closed(schema) if closes else schema), "x-guidance": form}, ensure_ascii=False)


def unenforced(schema: Any) -> set[str]:
    """Returns the keywords anywhere in `schema` that no grammar can enforce.

    Raises `RecursionError` for a schema that is nested too deeply.
    """
    found: set[str] = set()
    for part in _parts(schema):
        found |= {key for key in UNENFORCED & part.keys() if not (key == "uniqueItems" and part[key] is False)}
        if isinstance(form := part.get("format"), str) and form not in FORMATS:
            found.add("format")
    return found


class _Closing:
    def __init__(self, open_references: set[str]) -> None:
        self._open = open_references

    def of(self, schema: Any, *, closes: bool, place: str = "#") -> Any:
        if not isinstance(schema, dict):
            return schema
        adding = _adding(schema)
        made = {
            key: self._inside(key, value, closes=key not in adding, place=f"{place}/{key}")
            for key, value in schema.items()
        }
        if closes and _lists_properties(schema) and place not in self._open and not _OPENING & schema.keys():
            made["additionalProperties"] = False
        return made

    def _inside(self, key: str, value: Any, *, closes: bool, place: str) -> Any:
        if key in _NAMED and isinstance(value, dict):
            return {name: self.of(each, closes=closes, place=f"{place}/{name}") for name, each in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.of(each, closes=closes, place=place) for each in value]
        return self.of(value, closes=closes, place=place) if key in _ONE else value


def _lists_properties(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict) and bool(schema["properties"])


def _adding(schema: dict[str, Any]) -> set[str]:
    """Returns the keywords of a schema whose own schemas say only some of what its objects must be."""
    found = set(_ADDED & schema.keys())
    parts = len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0
    if parts == 1 and not _lists_properties(schema):
        found -= {"allOf"}
    if parts or _lists_properties(schema) or "$ref" in schema:
        found |= {"anyOf", "oneOf"} & schema.keys()
    return found


def _added_references(schema: Any) -> set[str]:
    """Returns the references to schemas that say only some of what objects must be."""
    found: set[str] = set()
    for part in _parts(schema):
        adding = [part] if _lists_properties(part) else []
        for key in _adding(part):
            value = part[key]
            if key == "dependentSchemas" and isinstance(value, dict):
                adding += value.values()
            else:
                adding += value if isinstance(value, list) else [value]
        found.update(each["$ref"] for each in adding if isinstance(each, dict) and isinstance(each.get("$ref"), str))
    return found


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the schema and all that it holds, and never what is data in it (`enum`, `const`, `default`)."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            for each in value.values():
                yield from _parts(each)
        elif key in _LISTS and isinstance(value, list):
            for each in value:
                yield from _parts(each)
        elif key in _ONE:
            yield from _parts(value)


# The longest part of an error's own words to quote; they may hold all of a grammar.
_MAX_QUOTED = 400


def grammar_of(constraint: Constraint, vocabulary: LLTokenizer, around: str = "") -> str:
    """Returns a grammar that a worker with the same `vocabulary` (`load_vocabulary`) compiles without fail.

    `around` is a grammar of Lark's in which `@answer` is what the constraint says. Raises `InvalidRequest` for a
    constraint that is wrong or too large, or that no text could meet.
    """
    _check_size(constraint)
    try:
        grammar = _written(constraint)
        if around:
            grammar = _put_into(around, grammar)
        if len(grammar) > MAX_GRAMMAR:
            _refuse(constraint, f"it becomes a grammar of {len(grammar)} characters, and {MAX_GRAMMAR} are the most")
        matcher = compile_grammar(grammar, vocabulary)
    except (GrammarError, ValueError, RecursionError) as error:
        _refuse(constraint, _words(error))
    if is_lost(matcher, matcher.compute_bitmask(), vocabulary):
        _refuse(constraint, "no token of the model's vocabulary can begin such a text")
    return grammar


def bare_grammar(text: str, vocabulary: LLTokenizer) -> str:
    """Returns a grammar of Lark's, which is the server's own, as a worker with the same `vocabulary` compiles it."""
    grammar = _of_lark(text)
    compile_grammar(grammar, vocabulary)
    return grammar


def _put_into(around: str, grammar: str) -> str:
    """Returns `around`, in which `@answer` stands for the first of the grammars of `grammar`."""
    first, *others = json.loads(grammar)["grammars"]
    grammars = [{"lark_grammar": around}, {**first, "name": "answer"}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _check_size(constraint: Constraint) -> None:
    is_choice = constraint.kind is ConstraintKind.CHOICE
    texts = constraint.choices if is_choice else (constraint.text,)
    if constraint.kind is not ConstraintKind.JSON_OBJECT and not all(texts):
        _refuse(constraint, "it is empty")
    if is_choice and not 1 <= len(texts) <= MAX_CHOICES:
        _refuse(constraint, f"it has {len(texts)} texts, and there must be 1 to {MAX_CHOICES}")
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        _refuse(constraint, "it holds half of a surrogate pair, which no text has")
    if size > MAX_CONSTRAINT_BYTES:
        _refuse(constraint, f"it has {size} bytes, and {MAX_CONSTRAINT_BYTES} are the most")


def _written(constraint: Constraint) -> str:
    """Returns the constraint as a grammar. Raises `ValueError` for text that the library cannot even read."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _of_schema({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            schema = json.loads(constraint.text, parse_constant=_no_number)
            return _of_schema(closed(schema) if constraint.closes else schema, lenient=constraint.lenient)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICE:
            # All choices are one lexeme: each lexeme more would be one more way to read the text.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choices)
            return _of_lark(f"start: TEXT\nTEXT: {texts}")
        case ConstraintKind.GRAMMAR:
            return _of_lark(_to_lark(constraint.text))


def _of_schema(schema: Any, *, lenient: bool = False) -> str:
    # The library takes options with objects only.
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_SPACE, "lenient": lenient})


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def _to_lark(text: str) -> str:
    """Turns a grammar of llama.cpp's form (GBNF) into one of Lark's; one of Lark's stays as it is."""
    try:
        return any_to_lark(text)
    except Exception as error:  # It raises nothing more special.
        raise ValueError(str(error)) from error


def _no_number(text: str) -> Never:
    raise ValueError(f"{text} is no number of JSON")


def _words(error: Exception) -> str:
    # How deep Python itself reads differs by its version; what it lets through the library refuses.
    if isinstance(error, RecursionError) or "recursion limit exceeded" in str(error):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error}"
    words = " ".join(str(error).split())
    return words if len(words) <= _MAX_QUOTED else f"{words[:_MAX_QUOTED]}..."


def _refuse(constraint: Constraint, reason: str) -> Never:
    raise InvalidRequest(
        Reason.BAD_CONSTRAINT,
        f"constraint is no usable {constraint.kind.value}: {reason}; correct or simplify it",
        field="constraint",
        kind=constraint.kind.value,
    )
