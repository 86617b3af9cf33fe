"""The many ways to ask for structured output, as one `Constraint`."""

from collections.abc import Iterator, Sequence

from msgspec import Raw

from octavo.frontend.errors import bad_parameter
from octavo.frontend.openai.body import Reading, decoded, given, unsupported_field
from octavo.frontend.openai.schemas import ResponseFormat, Sampling, StructuredOutputs
from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.text.json_schemas import unenforced


def constraint_of(body: Sampling, reading: Reading) -> Constraint | None:
    """What the answer must match; None: anything. Raises `InvalidRequest` for more than one, `Unsupported` for a kind
    that is not known."""
    found = [*_of_format(body.response_format, reading), *_of_outputs(body.structured_outputs, reading)]
    found += _guided(body, reading)
    if len(found) > 1:
        fields = " and ".join(field for field, _ in found)
        raise bad_parameter(found[1][0], "one constraint too many", f"{fields} exclude each other; leave all but one")
    return found[0][1] if found else None


Found = Iterator[tuple[str, Constraint]]


def _of_format(form: ResponseFormat | None, reading: Reading) -> Found:
    match form:
        case None | ResponseFormat(type="text"):
            return
        case ResponseFormat(type="json_object"):
            yield "response_format", Constraint(ConstraintKind.JSON_OBJECT)
        case ResponseFormat(type="json_schema"):
            wrapped = form.json_schema
            if wrapped is None or not given(wrapped.schema):
                raise bad_parameter("response_format.json_schema.schema", "missing", "json_schema needs one")
            field = "response_format.json_schema.schema"
            yield "response_format", schema_constraint(field, wrapped.schema, reading, strict=bool(wrapped.strict))
        case ResponseFormat():
            raise unsupported_field(
                f"response_format of type {form.type[:64]!r}", "use text, json_object or json_schema"
            )


def _of_outputs(outputs: StructuredOutputs | None, reading: Reading) -> Found:
    if outputs is None:
        return
    prefix = "structured_outputs."
    if given(outputs.json):
        yield f"{prefix}json", schema_constraint(f"{prefix}json", outputs.json, reading)
    yield from _kinds(prefix, outputs.regex, outputs.choice, outputs.grammar)
    if outputs.json_object:
        yield "structured_outputs.json_object", Constraint(ConstraintKind.JSON_OBJECT)


def _guided(body: Sampling, reading: Reading) -> Found:
    if given(body.guided_json):
        yield "guided_json", schema_constraint("guided_json", body.guided_json, reading)
    yield from _kinds("guided_", body.guided_regex, body.guided_choice, body.guided_grammar)


def _kinds(prefix: str, regex: str | None, choices: Sequence[str] | None, grammar: str | None) -> Found:
    if regex is not None:
        yield f"{prefix}regex", Constraint(ConstraintKind.REGEX, text=regex)
    if choices is not None:
        yield f"{prefix}choice", Constraint(ConstraintKind.CHOICE, choices=tuple(choices))
    if grammar is not None:
        yield f"{prefix}grammar", Constraint(ConstraintKind.GRAMMAR, text=grammar)


def schema_constraint(field: str, raw: Raw, reading: Reading, *, strict: bool = False) -> Constraint:
    """Reads a schema, which may come as an object or as its text. Keywords that an answer cannot be held to are named
    as ignored; with `strict` they are refused when it is compiled. Raises `InvalidRequest`."""
    text = given(raw)
    if text.startswith(b'"'):
        text = (decoded(field, raw, str) or "").encode(errors="replace")
    schema = decoded(field, Raw(text), object)
    if not strict:
        reading.ignored.extend(unenforced_in(field, schema))
    return Constraint(ConstraintKind.JSON_SCHEMA, text=text.decode(), closes=reading.closes, lenient=not strict)


def unenforced_in(field: str, schema: object) -> list[str]:
    """Returns the names, below the field's, of keywords in a schema that no answer is held to. Raises
    `InvalidRequest`."""
    try:
        return [f"{field}.{keyword}" for keyword in sorted(unenforced(schema))]
    except RecursionError as error:
        raise bad_parameter(field, "nested too deeply", "flatten it") from error
