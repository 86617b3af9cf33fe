"""Every field of a request that has a limit, through both APIs: at the limit, beyond it, and what is no number."""

import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest

from octavo.frontend.access.access import Access
from octavo.frontend.app import build_app
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect
from octavo.testbed.tiny_model import VOCAB_SIZE
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NO_NUMBERS = [math.nan, math.inf, -math.inf]
HUGE = [2**31, 2**32 - 1, 2**32, 2**63, 2**64, -1, -(2**63)]
MAX_IDS = 1024


@dataclass(frozen=True)
class Field:
    """`path` is the field's in a GenerateRequest, `name` its in a body of /v1/completions; empty: it has none."""

    path: str
    name: str
    good: list[Any]
    bad: list[Any]


def whole(path: str, name: str, low: int, high: int) -> Field:
    """A whole number of these limits."""
    bad = [value for value in (low - 1, high + 1, *HUGE) if not low <= value <= high]
    return Field(path, name, [low, high], [*bad, *NO_NUMBERS, 0.5, "1"])


def real(path: str, name: str, low: float, high: float) -> Field:
    """A number of these limits."""
    beyond = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), 2.0**63, -(2.0**63), 1e308]
    return Field(path, name, [low, high], [*beyond, *NO_NUMBERS, "1"])


def seconds(value: float) -> dict[str, int]:
    """As a duration's fields."""
    return {"seconds": int(value), "nanos": round(value % 1 * 1e9)}


def several(path: str, name: str, most: int, entry: Any = 1) -> Field:
    """A list of at most so many entries."""
    return Field(path, name, [[entry] * most], [[entry] * (most + 1), [entry] * 50_000])


def token_id(path: str, name: str) -> Field:
    """A list of ids of the vocabulary."""
    outside = [VOCAB_SIZE, *HUGE, *NO_NUMBERS]
    return Field(path, name, [[0, VOCAB_SIZE - 1]], [[value] for value in outside])


def label(path: str, name: str, most: int) -> Field:
    """A short printable text."""
    return Field(path, name, ["é" * most], ["x" * (most + 1), "a\nb", "a\0b", "\ud800", "x" * 1_000_000])


FIELDS = [
    real("sampling.temperature", "temperature", 0.0, 100.0),
    real("sampling.top_p", "top_p", 5e-324, 1.0),
    real("sampling.min_p", "min_p", 0.0, 1.0),
    real("sampling.frequency_penalty", "frequency_penalty", -2.0, 2.0),
    real("sampling.presence_penalty", "presence_penalty", -2.0, 2.0),
    real("sampling.repetition_penalty", "repetition_penalty", 0.01, 2.0),
    Field("sampling.top_k", "", [0, 2**31 - 1], HUGE),
    Field("", "top_k", [-1, 0, 2**31 - 1], [-2, *HUGE[:-2]]),
    Field("sampling.seed", "", [0, 2**64 - 1], [2**64, -1]),
    Field("", "seed", [-(2**63), 2**64 - 1], [2**64, -(2**63) - 1]),
    whole("sampling.num_sequences", "n", 1, 16),
    whole("sampling.best_of", "best_of", 1, 16),
    whole("response.top_logprobs", "logprobs", 0, 20),
    whole("response.prompt_logprobs", "prompt_logprobs", 0, 20),
    whole("scheduling.priority", "priority", -100, 100),
    whole("stopping.max_new_tokens", "max_tokens", 1, 511),
    whole("stopping.min_new_tokens", "min_tokens", 0, 1),
    several("stopping.stop_strings", "stop", 8, "x"),
    Field("stopping.stop_strings", "stop", [["é" * 128]], [[""], ["x" * 257], ["é" * 129]]),
    # The model's own EOS is one of 128.
    Field(
        "stopping.stop_token_ids",
        "stop_token_ids",
        [[*range(127)]],
        [[*range(128)], [1] * 129, [1] * 100_000],
    ),
    token_id("stopping.stop_token_ids", "stop_token_ids"),
    several("sampling.allowed_token_ids", "allowed_token_ids", MAX_IDS),
    token_id("sampling.allowed_token_ids", "allowed_token_ids"),
    several("sampling.banned_token_ids", "", MAX_IDS),
    token_id("sampling.banned_token_ids", ""),
    Field(
        "sampling.logit_bias",
        "logit_bias",
        [{0: -100.0, VOCAB_SIZE - 1: 100.0}],
        [
            {VOCAB_SIZE: 1.0},
            {2**31: 1.0},
            {2**63: 1.0},
            {-1: 1.0},
            *({1: value} for value in (-100.5, 100.5, 2.0**63, *NO_NUMBERS, "x")),
            dict.fromkeys(range(301), 1.0),
        ],
    ),
    Field("scheduling.max_queue_time", "", [seconds(0.5), seconds(3600)], [seconds(-1), seconds(2**62), {"nanos": -1}]),
    Field("", "max_queue_time", [0.5, 3600], [0, -1, 2.0**63, *NO_NUMBERS, "1"]),
    Field("scheduling.detach_grace", "", [{}, seconds(5)], [seconds(-1), {"nanos": -1}]),
    Field("sampling.beam_search.beam_width", "", [1, 16], [0, 17, 2**31, 2**32 - 1]),
    Field("constraint.regex", "guided_regex", ["x" * 1000], ["x" * 65_537, "(", "(?=x)"]),
    Field("constraint.choice.choices", "guided_choice", [["a"] * 2], [["a"] * 1025, []]),
    label("request_id", "request_id", 128),
    label("scheduling.tenant", "", 256),
    label("cache.salt", "cache_salt", 256),
    Field("token_ids.ids", "prompt", [[0] * 511, [VOCAB_SIZE - 1]], [[0] * 512, [0] * 500_000, []]),
    token_id("token_ids.ids", "prompt"),
    Field("prediction.token_ids.ids", "", [[0] * 512, [VOCAB_SIZE - 1]], [[0] * 513, [0] * 500_000, [VOCAB_SIZE]]),
    Field("prediction.text", "", ["", "x" * 512], ["x" * 513, "x" * 1_000_000]),
    Field("text", "prompt", ["x" * 511], ["", "x" * 512, "x" * 1_000_000]),
]


def message(path: str, value: Any) -> pb.GenerateRequest | None:
    """A request with the value at its path; None if no client can send it."""
    *parents, name = path.split(".")
    fields = {name: value}
    for parent in reversed(parents):
        fields = {parent: fields}
    try:
        request = pb.GenerateRequest(stopping={"max_new_tokens": 1})
        request.MergeFrom(pb.GenerateRequest(**fields))
    except (ValueError, TypeError):
        return None
    if path not in ("text", "token_ids.ids"):
        request.text = "x"
    return request


@pytest.fixture
async def http(frontend: FrontendServer, config: FrontendConfig) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(frontend.generation, Access(), config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://octavo") as client:
        yield client


async def grpc_code(stub: Any, request: pb.GenerateRequest) -> grpc.StatusCode:
    try:
        await collect(stub.Generate(request, timeout=60))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def http_status(http: httpx.AsyncClient, name: str, value: Any) -> int:
    # NaN and infinities are sent as Python and JavaScript write them.
    body = json.dumps({"prompt": "x", "max_tokens": 1, name: value}, ensure_ascii=True)
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    return answer.status_code


@pytest.mark.parametrize("field", [field for field in FIELDS if field.path], ids=lambda field: field.path)
async def test_limits_hold_over_grpc(
    field: Field, scheduler: FakeScheduler, frontend: FrontendServer, stub: Any
) -> None:
    wanted = [grpc.StatusCode.OK] * len(field.good) + [INVALID] * len(field.bad)
    wrong, sent = [], 0
    for value, code in zip(field.good + field.bad, wanted, strict=True):
        if request := message(field.path, value):
            sent += 1
            if (got := await grpc_code(stub, request)) is not code:
                wrong.append(f"{value!r:.60}: {got}")
    assert sent > 1
    assert wrong == []
    assert frontend.generation.num_running == 0


@pytest.mark.parametrize("field", [field for field in FIELDS if field.name], ids=lambda field: field.name)
async def test_limits_hold_over_http(
    field: Field, scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient
) -> None:
    wrong = []
    for value, status in [(value, 200) for value in field.good] + [(value, 400) for value in field.bad]:
        if (got := await http_status(http, field.name, value)) != status:
            wrong.append(f"{value!r:.60}: {got}")
    assert wrong == []
    assert frontend.generation.num_running == 0
