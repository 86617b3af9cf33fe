"""Peers of an older schema are served: what is kept of each old schema is what such a peer would still be sent."""

import enum
import json
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
from tests.proto.schema_shapes import SCHEMAS, shapes, without_names
from tests.proto.test_codec import HELLO, MESSAGES

from octavo.wire.base import OLDEST_SCHEMA_VERSION, SCHEMA_VERSION, Message, Value, since
from octavo.wire.codec import encode
from octavo.wire.requests import FrontendHello, Refused
from octavo.wire.steps import WorkerRefused
from octavo.wire.versions import (
    encode_for,
    field_version,
    refusal,
    refusal_of_newer,
)

OLD, NEW = SCHEMA_VERSION - 1, SCHEMA_VERSION


class Mood(enum.StrEnum):
    CALM = "calm"
    HASTY = "hasty"


class Inner(Value, frozen=True):
    first: int
    later: Annotated[int, since(NEW)] = 0


class Outer(Message, frozen=True):
    inner: Inner
    many: list[Inner]
    pairs: list[tuple[int, Inner]]
    mood: Mood | None
    later: Annotated[str, since(NEW)] = ""


MESSAGE = Outer(Inner(1, 2), [Inner(3, 4)], [(5, Inner(6, 7))], Mood.HASTY, "new")


@pytest.mark.parametrize("version", range(OLDEST_SCHEMA_VERSION, SCHEMA_VERSION + 1))
def test_a_schema_that_is_served_stays_as_it_is_written_down(version: int) -> None:
    written = json.loads((SCHEMAS / f"{version}.json").read_text(encoding="utf-8"))
    today = shapes(version)
    assert list(today) == list(written)
    for name, shape in today.items():
        assert without_names(shape) == without_names(written[name]), (
            f"{name} is not what schema {version} has. A released schema stays: give a new field its `since` and a"
            " default, at the end of its struct. If this schema was never released, write it again: `python -m"
            " tests.proto.schema_shapes`"
        )


def test_later_fields_come_last_and_have_defaults() -> None:
    for kind in all_structs():
        hints = get_type_hints(kind, include_extras=True)
        fields = msgspec.structs.fields(kind)
        versions = [field_version(hints[field.name]) for field in fields]
        assert versions == sorted(versions), kind
        assert not any(field.required for field, version in zip(fields, versions, strict=True) if version), kind


def all_structs() -> set[type[msgspec.Struct]]:
    """Every struct that any of the messages which are tested holds, the messages too."""
    found: set[type[msgspec.Struct]] = set()

    def look(value: Any) -> None:
        if isinstance(value, msgspec.Struct):
            found.add(type(value))
            for name in value.__struct_fields__:
                look(getattr(value, name))
        elif isinstance(value, (list, tuple)):
            for each in value:
                look(each)

    for _, message in MESSAGES:
        look(message)
    return found


def test_a_peer_of_todays_schema_is_sent_all() -> None:
    assert encode_for(MESSAGE, NEW) == encode(MESSAGE)


def test_an_older_peer_is_sent_what_it_knows() -> None:
    frame = encode_for(MESSAGE, OLD)
    assert frame is not None
    assert msgspec.msgpack.decode(frame) == ["Outer", [1], [[3]], [[5, [6]]], "hasty"]


def test_an_older_peer_is_told_an_older_member_for_one_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.wire.versions.LATER_MEMBERS", {Mood.HASTY: (NEW, Mood.CALM)})
    frame = encode_for(MESSAGE, OLD)
    assert frame is not None
    assert msgspec.msgpack.decode(frame)[-1] == "calm"
    assert encode_for(MESSAGE, NEW) == encode(MESSAGE)


def test_an_older_peer_is_not_sent_a_message_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.wire.versions.LATER_MESSAGES", {Outer: NEW})
    assert encode_for(MESSAGE, OLD) is None
    assert encode_for(MESSAGE, NEW) is not None


@pytest.mark.parametrize(("decode", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_what_an_older_peer_sends_is_read_with_defaults_for_the_rest(decode: Any, message: Any) -> None:
    frame = encode_for(message, OLDEST_SCHEMA_VERSION)
    if frame is not None:
        assert encode_for(decode(frame), OLDEST_SCHEMA_VERSION) == frame


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (OLDEST_SCHEMA_VERSION - 1, "start a newer frontend"),
        (SCHEMA_VERSION + 1, "upgrade the scheduler first"),
    ],
)
def test_other_schemas_are_refused_with_what_to_do(version: int, says: str) -> None:
    detail = refusal("frontend", version)
    assert detail is not None
    assert f"message schema {version}" in detail
    assert says in detail


def test_the_schemas_between_are_not_refused() -> None:
    assert [refusal("worker", version) for version in range(OLDEST_SCHEMA_VERSION, SCHEMA_VERSION + 1)] == [None] * (
        SCHEMA_VERSION + 1 - OLDEST_SCHEMA_VERSION
    )


def test_the_hello_of_a_newer_peer_is_answered_whatever_else_it_holds() -> None:
    frontend = msgspec.msgpack.encode(["FrontendHello", SCHEMA_VERSION + 1, 5, "unheard of"])
    worker = msgspec.msgpack.encode(["WorkerHello", SCHEMA_VERSION + 1, {}])
    assert isinstance(refusal_of_newer(frontend), Refused)
    assert isinstance(refusal_of_newer(worker), WorkerRefused)


@pytest.mark.parametrize(
    "frame",
    [
        encode(FrontendHello(SCHEMA_VERSION, 5)),
        encode(HELLO),
        msgspec.msgpack.encode(["Submit", SCHEMA_VERSION + 1]),
        msgspec.msgpack.encode(["FrontendHello", True]),
        msgspec.msgpack.encode(["FrontendHello"]),
        msgspec.msgpack.encode(7),
        b"\xc1 garbage",
        b"",
    ],
)
def test_nothing_else_is_taken_for_a_newer_hello(frame: bytes) -> None:
    assert refusal_of_newer(frame) is None
