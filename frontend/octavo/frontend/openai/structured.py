"""The many ways to ask for structured output, as one `Constraint`."""

from collections.abc import Iterator, Sequence

from msgspec import Raw

from octavo.frontend.constraint import Constraint, ConstraintKind
from octavo.frontend.errors import bad_parameter
from octavo.frontend.openai.fields import decoded, given, unsupported_field
from octavo.frontend.openai.schemas import ResponseFormat, Sampling, StructuredOutputs


def constraint_of(body: Sampling) -> Constraint | None:
    """What the answer must match; None: anything. Raises `InvalidRequest` for more than one, `Unsupported` for a kind
    that is not known."""
    found = [*_of_format(body.response_format), *_of_outputs(body.structured_outputs), *_guided(body)]
    if len(found) > 1:
        fields = " and ".join(field for field, _ in found)
        raise bad_parameter(found[1][0], "one constraint too many", f"{fields} exclude each other; leave all but one")
    return found[0][1] if found else None


Found = Iterator[tuple[str, Constraint]]


def _of_format(form: ResponseFormat | None) -> Found:
    match form:
        case None | ResponseFormat(type="text"):
            return
        case ResponseFormat(type="json_object"):
            yield "response_format", Constraint(ConstraintKind.JSON_OBJECT)
        case ResponseFormat(type="json_schema"):
            wrapped = form.json_schema
            if wrapped is None or not given(wrapped.schema):
                raise bad_parameter("response_format.json_schema.schema", "missing", "json_schema needs one")
            yield "response_format", _schema("response_format.json_schema.schema", wrapped.schema)
        case ResponseFormat():
            raise unsupported_field(
                f"response_format of type {form.type[:64]!r}", "use text, json_object or json_schema"
            )


def _of_outputs(outputs: StructuredOutputs | None) -> Found:
    if outputs is None:
        return
    yield from _kinds("structured_outputs.", "json", outputs.json, outputs.regex, outputs.choice, outputs.grammar)
    if outputs.json_object:
        yield "structured_outputs.json_object", Constraint(ConstraintKind.JSON_OBJECT)


def _guided(body: Sampling) -> Found:
    return _kinds("guided_", "json", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _kinds(
    prefix: str, name: str, schema: Raw, regex: str | None, choices: Sequence[str] | None, grammar: str | None
) -> Found:
    if given(schema):
        yield prefix + name, _schema(prefix + name, schema)
    if regex is not None:
        yield f"{prefix}regex", Constraint(ConstraintKind.REGEX, text=regex)
    if choices is not None:
        yield f"{prefix}choice", Constraint(ConstraintKind.CHOICE, choices=tuple(choices))
    if grammar is not None:
        yield f"{prefix}grammar", Constraint(ConstraintKind.GRAMMAR, text=grammar)


def _schema(field: str, raw: Raw) -> Constraint:
    """A schema may come as an object, or as its text."""
    text = given(raw)
    if text.startswith(b'"'):
        schema = decoded(field, raw, str) or ""
    else:
        decoded(field, raw, object)
        schema = text.decode()
    return Constraint(ConstraintKind.JSON_SCHEMA, text=schema)
