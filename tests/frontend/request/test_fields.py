"""The table of a request's fields, and all that follows from it or is to agree with it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
import pytest
from msgspec import Meta

from octavo import client, llm
from octavo.frontend.api.schemas import Sampling
from octavo.frontend.cli.client import generate
from octavo.frontend.request.fields import Elsewhere, Field, Range, range_of, table_of
from octavo.frontend.request.request import FIELDS, GenerationRequest
from octavo.v1 import generation_pb2 as pb
from octavo.wire import sampling as wire

PROTO = Path(__file__).parents[3] / "proto/octavo/v1/generation.proto"
PARTS = (pb.SamplingParams, pb.StoppingCriteria, pb.ResponseOptions, pb.SchedulingHints, pb.CacheOptions)
OF_PARTS = {each.name for part in PARTS for each in part.DESCRIPTOR.fields}
# Durations and messages of their own are read one by one; two options say which events are written.
READ_ALONE = {"beam_search", "max_queue_time", "detach_grace"}
OF_EVENTS = {"text", "token_ids"}
# Of the call, or of its headers.
OF_THE_CALL = {"prompt", "request_id", "model", "constraint", "beam", "add_special_tokens", "prediction", "traceparent"}
IN_SECONDS = {"max_queue_s", "detach_grace_s"}


FEW = Annotated[int, Meta(ge=1, le=5, description="between 1 and 5")]
PART = Annotated[float, Meta(gt=0, le=1, description="a part")]


@dataclass
class Asked:
    """Has a field of every sort."""

    plain: bool = False
    few: Annotated[FEW | None, Elsewhere("n", recommended=True)] = None
    part: PART = 1.0
    any: Annotated[int, Meta(ge=0, description="any")] = 0
    several: Annotated[Sequence[str], Meta(max_length=3), Elsewhere("l")] = ()
    label: Annotated[str, Meta(max_length=4)] = ""
    text: str = ""
    bounded_inside: Mapping[int, PART] = field(default_factory=dict)


def test_a_row_says_what_the_type_says() -> None:
    rows = table_of(Asked)
    assert rows["plain"] == Field("plain", False, None, None, False)
    assert rows["few"] == Field("n", True, Range(1, 5, "between 1 and 5", whole=True), None, False)
    assert rows["part"].range == range_of(PART) == Range(5e-324, 1, "a part")
    assert rows["any"].range == Range(0, float("inf"), "any", whole=True)
    assert (rows["several"].called, rows["several"].most, rows["several"].is_label) == ("l", 3, False)
    assert (rows["label"].most, rows["label"].is_label) == (4, True)
    assert (rows["text"].most, rows["text"].is_label) == (None, False)
    assert rows["bounded_inside"].range is None


def test_what_a_request_leaves_out_is_allowed() -> None:
    for each in fields(GenerationRequest):
        bounds = FIELDS[each.name].range
        if bounds and each.default is not None:
            assert isinstance(each.default, int | float)
            assert bounds.holds(each.default)


def test_octavo_v1_has_every_field_under_the_same_name() -> None:
    assert FIELDS.keys() - OF_THE_CALL - IN_SECONDS == OF_PARTS - READ_ALONE - OF_EVENTS


def comments() -> dict[str, str]:
    """The comment before each field of a message, by the field's name."""
    found: dict[str, str] = {}
    comment = ""
    for line in PROTO.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("//"):
            comment += line
        elif named := re.match(r" *(?:optional |repeated |map<.*> )?(?:[\w.]+ )?(\w+) = \d+;", line):
            found.setdefault(named[1], comment)
            comment = ""
        else:
            comment = ""
    return found


@pytest.mark.parametrize("name", sorted(OF_PARTS & FIELDS.keys() | {"request_id"}))
def test_octavo_v1_tells_the_limits_in_force(name: str) -> None:
    bounds, most = FIELDS[name].range, FIELDS[name].most
    limits: set[float] = {most} if most else set()
    if bounds:
        # Nobody needs to be told that a number is not negative, or not none, or that it fits 32 or 64 bits.
        limits |= {bounds.low} - {0, 1, 5e-324} | {each for each in (bounds.high,) if each < 2**31 - 1}
    numbers = {float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", comments()[name])}
    assert limits <= numbers, comments()[name]


def test_openais_bodies_have_every_field_but_what_only_octavo_v1_has() -> None:
    called = {row.called for name, row in FIELDS.items() if name not in OF_THE_CALL}
    of_routes = {"top_logprobs", "incremental"}
    assert called - {*Sampling.__struct_fields__} - of_routes == {"banned_token_ids", "tenant", "detach_grace_s"}


def test_the_clients_parameters_have_every_field() -> None:
    ours = {each.name for kind in (client.SamplingParams, client.RequestOptions) for each in fields(kind)}
    named_otherwise = {"top_logprobs": "logprobs", "beam": "beam_search", "detach_grace_s": "detach_grace"}
    # What the client asks for is a call's own business.
    of_the_call = {"prompt", "constraint", "add_special_tokens", "traceparent", "incremental"}
    asked = {named_otherwise.get(name, row.called) for name, row in FIELDS.items() if name not in of_the_call}
    constraints = {"json_object", "json_schema", "regex", "choice", "grammar"}
    assert asked == ours - constraints - {"timeout"}
    assert {each.name for each in fields(llm.SamplingParams)} == {each.name for each in fields(client.SamplingParams)}


def test_every_parameter_of_the_client_reaches_its_field() -> None:
    given: dict[str, Any] = {}
    for name in OF_PARTS & FIELDS.keys() - {"priority", "tenant", "salt", "pinned_prefix", "incremental"}:
        row = FIELDS[name]
        given["logprobs" if name == "top_logprobs" else row.called] = 1 if row.range else [1] if row.most else True
    params = client.SamplingParams(**{**given, "stop": ["x"], "logit_bias": {1: 1.0}})
    message = client.params.generate_request("x", params, client.RequestOptions())
    sent = {
        each.name for part in (message.sampling, message.stopping, message.response) for each, _ in part.ListFields()
    }
    assert sent == OF_PARTS & FIELDS.keys() - {"priority", "tenant", "salt", "pinned_prefix"}


def test_the_commands_options_are_parameters_with_limits_that_hold() -> None:
    names = {each.name for each in fields(client.SamplingParams)}
    by_called = {row.called: row for row in FIELDS.values()} | {"logprobs": FIELDS["top_logprobs"]}
    ranged = [option for option in generate.params if isinstance(option.type, click.IntRange) and option.name in names]
    assert ranged
    for option in ranged:
        assert isinstance(option.type, click.IntRange)
        bounds = by_called[option.name or ""].range
        assert bounds
        assert (option.type.min, option.type.max) in ((bounds.low, None), (bounds.low, bounds.high))


def test_the_workers_get_every_sampling_field_of_a_request() -> None:
    of_workers = {each.name for each in msgspec.structs.fields(wire.SamplingParams)}
    assert {*wire.DRAWING, *wire.PENALTIES} == wire.NEUTRAL.keys() < of_workers & FIELDS.keys()
    renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "top_logprobs": "logprobs"}
    asked = {renamed.get(name, name) for name, row in FIELDS.items() if row.range or row.most}
    assert of_workers - asked == {"beam", "grammar"}


def test_an_off_switch_is_in_its_range() -> None:
    for name, off in wire.NEUTRAL.items():
        bounds = FIELDS[name].range
        assert bounds
        assert bounds.holds(off)
