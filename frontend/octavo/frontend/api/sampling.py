"""Reads the sampling fields and the constraint of completions and chats as arguments of a `GenerationRequest`."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Raw

from octavo.frontend.api.body import Reading, decoded, given, unsupported_field
from octavo.frontend.api.schemas import ResponseFormat, Sampling, StructuredOutputs
from octavo.frontend.errors import bad_parameter
from octavo.frontend.request.request import FIELDS, Constraint, ConstraintKind
from octavo.frontend.text.grammars import unenforced
from octavo.wire.requests import MAX_PRIORITY
from octavo.wire.sampling import BeamSearch, EarlyStopping


def constraint_of(body: Sampling, reading: Reading) -> Constraint | None:
    """Returns what the answer must match, None for any answer.

    Raises `InvalidRequest` for more than one constraint, `Unsupported` for a kind that is not known.
    """
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
    """Reads a schema, which may come as an object or as its text.

    Keywords that an answer cannot be held to are named as ignored; with `strict` they are refused when the schema is
    compiled. Raises `InvalidRequest`.
    """
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


_EARLY_STOPPING: Final = {
    None: EarlyStopping.OFF,
    False: EarlyStopping.OFF,
    True: EarlyStopping.ON,
    "never": EarlyStopping.NEVER,
}


# The bodies' names -> those of a request. A call's id and its longest answer are its route's to read.
_NAMES: Final = {
    field.called: name
    for name, field in FIELDS.items()
    if field.called in Sampling.__struct_fields__
    and name not in ("request_id", "max_new_tokens", "max_reasoning_tokens")
}


def sampling_of(body: Sampling, reading: Reading) -> dict[str, Any]:
    """Returns arguments of `GenerationRequest`. Raises `InvalidRequest`."""
    beam = _beam(body) if body.use_beam_search else None
    given = {name: value for called, name in _NAMES.items() if (value := getattr(body, called)) is not None}
    return {
        **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()},
        "temperature": reading.temperature if body.temperature is None and not beam else body.temperature,
        # vLLM's users write -1 for "off".
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "seed": _seed(body.seed),
        "max_reasoning_tokens": _reasoning_budget(body),
        "best_of": None if beam else body.best_of,
        "beam": beam,
        "stop_strings": _stop(body.stop),
        # An answer in one object needs no deltas.
        "incremental": bool(body.stream),
        "priority": _priority(body.priority),
        "max_queue_s": seconds("max_queue_time", body.max_queue_time),
        "constraint": constraint_of(body, reading),
    }


def number_of_choices(body: Sampling) -> int:
    """Returns the number of answers to each prompt."""
    return 1 if body.n is None else body.n


def seconds(field: str, value: float | None) -> float | None:
    """Returns `value`, a time in seconds. Raises `InvalidRequest` unless it is above 0 and at most 1e6, or None."""
    if value is not None and not 0 < value <= 1e6:
        raise bad_parameter(field, value, "it must be above 0 and at most 1000000 seconds")
    return value


def _seed(seed: int | None) -> int | None:
    """Reads a negative seed as a signed 64-bit number, and returns the unsigned number of the same bits."""
    return seed + 2**64 if seed is not None and -(2**63) <= seed < 0 else seed


def _reasoning_budget(body: Sampling) -> int | None:
    """Returns the most tokens to think with, under whichever name; a negative number means no limit, as Qwen's users
    write it."""
    names = ("max_reasoning_tokens", "thinking_token_budget", "thinking_budget")
    asked = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(set(asked.values())) > 1:
        raise bad_parameter(next(iter(asked)), "several numbers", f"{' and '.join(asked)} say the same; leave one")
    budget = next(iter(asked.values()), None)
    return None if budget is None or budget < 0 else budget


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Returns the stop strings. The empty text means none, as some clients send it."""
    return (stop,) if stop and isinstance(stop, str) else tuple(stop or ())


def _priority(priority: int | None) -> int:
    """Returns the priority with its sign turned: in vLLM's API lower is earlier."""
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise bad_parameter("priority", priority, f"it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    return -(priority or 0)


def _beam(body: Sampling) -> BeamSearch:
    return BeamSearch(
        width=number_of_choices(body) if body.best_of is None else body.best_of,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=_EARLY_STOPPING[body.early_stopping],
    )
