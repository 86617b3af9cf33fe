"""Reads the body of a call, however large, to typed fields, and names every field that is not honoured."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from octavo.frontend.errors import InvalidRequest, Reason, Unsupported, bad_parameter
from octavo.frontend.http.connection import read_body
from octavo.frontend.stream.pacing import Turns

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")
# Field -> the values, as JSON, that ask for nothing; null always is one.
Neutral = Mapping[str, tuple[bytes, ...]]

# Fields that say how an answer should come about rather than what it must be. Calls are answered without them, and the
# fields are named to the client, except for those values that ask for nothing.
HINTS: Final[Neutral] = {
    "store": (b"false",),
    "service_tier": (b'"auto"', b'"default"', b'"standard_only"'),
    "verbosity": (b'"medium"',),
    "prediction": (),
    "moderation": (),
    "truncation": (b'"disabled"',),
    "include": (b"[]", b'["reasoning.encrypted_content"]'),
    "web_search_options": (),
    "max_tool_calls": (),
    "context_management": (b"[]",),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "mm_processor_kwargs": (),
    "ttft_target": (),
    "vllm_xargs": (),
    "speed": (b'"standard"',),
}
UNKNOWN_FIELDS_HEADER: Final = "x-octavo-unknown-fields"
# The most bytes of a field that holds JSON of any form: schemas, tools, variables of templates.
MAX_JSON: Final = 1 << 18
# The errors of the decoder; text that is no UTF-8 has one of its own.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_NAMED: Final = 16
_MAX_NAME_LENGTH: Final = 64
_NULL: Final = (b"null",)
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`$")
_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")

_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list_of_names = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


def read_fields(body: bytes, kind: type[T], unsupported: Neutral) -> tuple[T, list[str]]:
    """Returns the body as `kind`, and the names of fields that are not honoured: unknown fields, and hints.

    Raises `InvalidRequest` for a body that is no JSON or has another type than `kind` says, `Unsupported` for a field
    of `unsupported` that asks for something.
    """
    try:
        # The decoder leaves what it does not look into as it is, and others look into it later.
        body.decode()
        named = _decode_names(body)
        _refuse_unsupported(named, unsupported)
        return msgspec.json.decode(body, type=kind), list(_unknown(named, kind, unsupported))
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except UNREADABLE as error:
        raise InvalidRequest(Reason.BAD_JSON, f"the body is no JSON: {_first_words(error)}; mend it") from error


def given(raw: msgspec.Raw) -> bytes:
    """Returns a field's JSON text; empty where the field is left out or null."""
    text = bytes(raw).strip()
    return b"" if text == b"null" else text


def decoded(field: str, raw: msgspec.Raw, kind: type[V], max_bytes: int = MAX_JSON) -> V | None:
    """Returns a field of at most `max_bytes` bytes of JSON as `kind`; None where the field is left out or null.

    Raises `InvalidRequest` for a longer field, and for one of another type.
    """
    text = given(raw)
    if len(text) > max_bytes:
        raise bad_parameter(field, f"{len(text)} bytes long", f"at most {max_bytes} may be")
    try:
        return msgspec.json.decode(text, type=kind) if text else None
    except UNREADABLE as error:
        raise bad_parameter(field, "of a wrong type or value", _first_words(error)) from error


def unknown_fields_header(names: Iterable[str]) -> dict[str, str]:
    """Returns the header that names the fields that are not honoured; no header where there are none."""
    shown = list(names)[: _MAX_NAMED + 1]
    if not shown:
        return {}
    named = [re.sub(r"[^\w.\[\]-]", "?", name[:_MAX_NAME_LENGTH], flags=re.ASCII) for name in shown[:_MAX_NAMED]]
    return {UNKNOWN_FIELDS_HEADER: ", ".join(named + ["..."] * (len(shown) > _MAX_NAMED))}


def unsupported_field(name: str, advice: str = "leave it out") -> Unsupported:
    """Returns the error for a field that is known but not supported."""
    return Unsupported(Reason.UNSUPPORTED_FIELD, f"{name} is not supported here; {advice}", field=name)


def _refuse_unsupported(named: Mapping[str, msgspec.Raw], unsupported: Neutral) -> None:
    for name, raw in named.items():
        if name in unsupported and bytes(raw).strip() not in _NULL + unsupported[name]:
            raise unsupported_field(name)


def _unknown(named: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct], unsupported: Neutral) -> Iterable[str]:
    fields = set(kind.__struct_encode_fields__)
    idle = {name for name in named.keys() & HINTS.keys() if bytes(named[name]).strip() in _NULL + HINTS[name]}
    yield from sorted(named.keys() - fields - unsupported.keys() - idle)
    for name, inner in _INNER.items():
        if name in named and name in fields:
            found = _names_inside(bytes(named[name]))
            yield from sorted(f"{name}.{key}" for key in found - inner)


def _names_inside(raw: bytes) -> set[str]:
    if raw.startswith(b"{"):
        return set(_decode_names(raw))
    if raw.startswith(b"["):
        return {key for item in _decode_list_of_names(raw) for key in item}
    return set()


# The names known inside of fields that hold objects, or lists of objects.
_INNER: Final[dict[str, set[str]]] = {
    "messages": {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call"}
    | {"reasoning", "reasoning_content"},
    "stream_options": {"include_usage", "continuous_usage_stats", "include_obfuscation"},
    "prediction": {"type", "content"},
}


def _wrong_type(message: str) -> InvalidRequest:
    if missing := _MISSING.match(message):
        return bad_parameter(missing[1], "missing", "it must be set")
    place = _PLACE.search(message)
    expected = _PLACE.sub("", message).strip()
    if place is None or not place[1]:
        return InvalidRequest(Reason.BAD_JSON, f"the body is not what is asked for here: {expected}")
    return bad_parameter(place[1], "of a wrong type or value", expected[:1].lower() + expected[1:])


def _first_words(error: Exception) -> str:
    # The decoder's message about broken UTF-8 quotes all of the text.
    return str(error)[:200] if isinstance(error, msgspec.DecodeError) else type(error).__name__


# Decoding so many bytes takes about a millisecond at most.
SMALL_BODY: Final = 64 << 10
# The most names and texts in one body. Each costs memory and time of its own, and the decoder makes them all before
# anybody can count them.
MAX_TEXTS: Final = 1 << 16


async def read_call(request: Request, kind: type[T], unsupported: Neutral, beginnings: Turns) -> tuple[T, list[str]]:
    """Reads the body, waits for the call's turn in `beginnings`, and returns what `read_fields` does.

    A large body is decoded in a thread, so that other calls go on. Raises `InvalidRequest`, `Unsupported` and
    `ClientGone`.
    """
    body = await read_body(request)
    await beginnings.take()
    if len(body) <= SMALL_BODY:
        return read_fields(body, kind, unsupported)
    check_texts(body)
    return await asyncio.to_thread(read_fields, body, kind, unsupported)


def check_texts(body: bytes) -> None:
    """Raises `InvalidRequest` for a body of more than `MAX_TEXTS` names and texts."""
    # Each begins with a quote that nothing escapes; most end with one, too.
    quotes = body.count(b'"') - body.count(b'\\"')
    if quotes > 2 * MAX_TEXTS:
        raise InvalidRequest(
            Reason.TOO_LARGE,
            f"the body has more than {MAX_TEXTS} names and texts; send fewer, or join them",
            max_texts=MAX_TEXTS,
        )


@dataclass(frozen=True)
class Reading:
    """Says how one call's body is read.

    `closes`: objects of the call's JSON schemas are limited to the properties that they list (`json_schemas.closed`).
    `temperature` applies to a call that names none; None stands for the model's own. `ignored` collects the names of
    fields that are not honoured.
    """

    closes: bool = True
    temperature: float | None = None
    ignored: list[str] = field(default_factory=list)
