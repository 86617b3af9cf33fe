"""From what a client wants of a text to a grammar that workers follow. A pure function; what it calls may take long, so
it belongs into a process that can be stopped."""

import json
from typing import Any, Never

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.text.json_schemas import JSON_SPACE, closed
from octavo.runtime.models.grammar import GrammarError, compile_grammar, is_lost
from octavo.runtime.models.grammar import load_vocabulary as load_vocabulary
from octavo.wire.sampling import MAX_GRAMMAR

MAX_CONSTRAINT_BYTES = 1 << 16
MAX_CHOICES = 1024
# Of an error's own words, which may quote all of a grammar.
_MAX_QUOTED = 400


def grammar_of(constraint: Constraint, vocabulary: LLTokenizer) -> str:
    """A grammar of llguidance that a worker with the same `vocabulary` (`load_vocabulary`) compiles without fail.

    Raises `InvalidRequest` for a constraint that is wrong or too large, or that no text could meet.
    """
    _check_size(constraint)
    try:
        grammar = _written(constraint)
        if len(grammar) > MAX_GRAMMAR:
            _refuse(constraint, f"it becomes a grammar of {len(grammar)} characters, and {MAX_GRAMMAR} are the most")
        matcher = compile_grammar(grammar, vocabulary)
    except (GrammarError, ValueError, RecursionError) as error:
        _refuse(constraint, _words(error))
    if is_lost(matcher, matcher.compute_bitmask(), vocabulary):
        _refuse(constraint, "no token of the model's vocabulary can begin such a text")
    return grammar


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
    """Raises `ValueError` on what the library cannot even read."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _of_schema({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            schema = json.loads(constraint.text, parse_constant=_no_number)
            return _of_schema(closed(schema) if constraint.closes else schema, lenient=constraint.lenient)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICE:
            # All are one lexeme: each of its own would be one more way to read the text.
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
    """A grammar of llama.cpp's form becomes one of Lark's."""
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
