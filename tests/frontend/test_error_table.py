"""Every way in which a request can fail, through both APIs: the same reason, in the terms of each."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import msgspec
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import write_keys
from octavo.testbed.grpc_calls import collect, reason_of, retry_delay_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.requests import RejectReason

Code = grpc.StatusCode
MESSAGE: Final[dict[str, Any]] = {"text": "hello", "stopping": {"max_new_tokens": 8}}
BODY: Final[dict[str, Any]] = {"prompt": "hello", "max_tokens": 8}
HELD: Final = pb.GenerateRequest(text="x", request_id="held", stopping={"max_new_tokens": 8})


@dataclass
class World:
    """Holds a frontend, its scheduler, and a client of each API."""

    scheduler: FakeScheduler
    frontend: FrontendServer
    stub: Any
    http: httpx.AsyncClient
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    def begin(self, work: Any) -> None:
        """Work that goes on beside, to the end of the test."""
        self.tasks.append(asyncio.ensure_future(work))


Given = Callable[[World], Awaitable[None]]


async def ready(world: World) -> None:
    await world.until(lambda: world.frontend.generation.ready)


async def one_is_held(world: World) -> None:
    """A request is running, and goes on to."""
    world.scheduler.hold_after = 0
    world.begin(collect(world.stub.Generate(HELD)))
    await world.until(lambda: "held" in world.scheduler.running)


async def nothing_is_answered(world: World) -> None:
    world.scheduler.hold_after = 0
    await ready(world)


async def whatever_runs_is_aborted(world: World) -> None:
    async def abort() -> None:
        while True:
            for request_id in world.scheduler.running:
                world.frontend.generation.abort(request_id)
            await asyncio.sleep(0.005)

    world.scheduler.hold_after = 0
    world.begin(abort())


async def little_fits(world: World) -> None:
    await ready(world)
    world.scheduler.capacity_tokens = 12
    await world.scheduler.set_replicas(1)
    status = world.frontend.scheduler
    await world.until(lambda: status.status is not None and status.status.capacity_tokens == 12)


async def workers_leave(world: World) -> None:
    await ready(world)
    await world.scheduler.set_replicas(0)
    await world.until(lambda: not world.frontend.generation.ready)


async def workers_have_another_model(world: World) -> None:
    await ready(world)
    world.scheduler.model = msgspec.structs.replace(world.scheduler.model, fingerprint="other")
    await world.scheduler.set_replicas(1)
    await world.until(lambda: not world.frontend.generation.ready)


async def it_drains(world: World) -> None:
    world.frontend.generation.draining = True


def rejected(reason: RejectReason) -> Given:
    async def given(world: World) -> None:
        world.scheduler.rejection = reason

    return given


@dataclass(frozen=True)
class Row:
    """`message` and `body` are fields of a request to each API, besides those that every one has; bytes are sent as
    they are. `http_reason` is set where the APIs differ; `retries` is whether trying again may help."""

    reason: str
    code: grpc.StatusCode
    status: int
    message: dict[str, Any] | bytes = field(default_factory=dict)
    body: dict[str, Any] | bytes = field(default_factory=dict)
    given: Given = ready
    config: dict[str, Any] = field(default_factory=dict)
    retries: bool = False
    http_reason: str = ""


def invalid(reason: str = "BAD_PARAMETER", **fields: Any) -> Row:
    return Row(reason, Code.INVALID_ARGUMENT, 400, **fields)


def not_found(reason: str, **fields: Any) -> Row:
    return Row(reason, Code.NOT_FOUND, 404, **fields)


def overloaded(reason: str, **fields: Any) -> Row:
    return Row(reason, Code.RESOURCE_EXHAUSTED, 429, retries=True, **fields)


def unavailable(reason: str, given: Given, **fields: Any) -> Row:
    return Row(reason, Code.UNAVAILABLE, 503, given=given, retries=True, **fields)


def late(reason: str, **fields: Any) -> Row:
    return Row(reason, Code.DEADLINE_EXCEEDED, 504, **fields)


def broken(reason: str, given: Given) -> Row:
    return Row(reason, Code.INTERNAL, 500, given=given)


UNKNOWN_EARLY_STOPPING: Final = {"beam_width": 2, "early_stopping": 77}
TABLE: Final[dict[str, Row]] = {
    "a bad parameter": invalid(message={"sampling": {"temperature": -1.0}}, body={"temperature": -1}),
    "an unknown value of an enum": invalid(
        message={"sampling": {"beam_search": UNKNOWN_EARLY_STOPPING}},
        body={"use_beam_search": True, "best_of": 2, "early_stopping": "sometimes"},
    ),
    "what is no message": invalid("BAD_MESSAGE", message=b"\xff", body=b"{", http_reason="BAD_JSON"),
    "a prompt that is too long": invalid("PROMPT_TOO_LONG", message={"text": "x" * 512}, body={"prompt": "x" * 512}),
    "an answer that is too long": invalid(message={"stopping": {"max_new_tokens": 2**31}}, body={"max_tokens": 2**31}),
    "what can never fit": invalid("NEVER_FITS_KV", given=little_fits),
    "what the scheduler finds can never fit": invalid("NEVER_FITS_KV", given=rejected(RejectReason.NEVER_FITS_KV)),
    "a bad constraint": invalid("BAD_CONSTRAINT", message={"constraint": {"regex": "("}}, body={"guided_regex": "("}),
    "a constraint that workers cannot follow": invalid("BAD_CONSTRAINT", given=rejected(RejectReason.BAD_GRAMMAR)),
    "no token left to choose": invalid("NO_TOKEN_LEFT", given=rejected(RejectReason.NO_TOKEN_LEFT)),
    "a field that is not implemented": Row(
        "UNSUPPORTED_FIELD", Code.UNIMPLEMENTED, 400, b"\x0a\x01x\x1a\x01x\xa0\x06\x01", {"suffix": "x"}
    ),
    "an unknown model": not_found("MODEL_NOT_FOUND", message={"model": "../secret"}, body={"model": "../secret"}),
    "an unknown prefix": not_found(
        "PREFIX_NOT_FOUND", message={"cache": {"pinned_prefix": "none"}}, body={"pinned_prefix": "none"}
    ),
    "an id that is taken": Row(
        "DUPLICATE_ID", Code.ALREADY_EXISTS, 409, {"request_id": "held"}, {"request_id": "held"}, one_is_held
    ),
    "no key": Row("UNAUTHENTICATED", Code.UNAUTHENTICATED, 401, config={"api_keys": True}),
    "too many requests": overloaded("TOO_MANY_REQUESTS", given=one_is_held, config={"max_requests": 1}),
    "too much work": overloaded("TOO_MUCH_WORK", given=one_is_held, config={"max_work_tokens": 12}),
    "too many requests of a tenant": overloaded("TENANT_QUOTA", given=one_is_held, config={"tenant_max_requests": 1}),
    "too much work of a tenant": overloaded("TENANT_QUOTA", given=one_is_held, config={"tenant_max_work_tokens": 12}),
    "a full queue": overloaded("QUEUE_FULL", given=rejected(RejectReason.QUEUE_FULL)),
    "no memory for it": overloaded("OUT_OF_MEMORY", given=rejected(RejectReason.OUT_OF_MEMORY)),
    "no worker": unavailable("NO_WORKER", workers_leave, config={"worker_grace_s": 0.2}),
    "workers of another model": unavailable("MODEL_MISMATCH", workers_have_another_model),
    "draining": unavailable("DRAINING", it_drains),
    "a deadline": late("DEADLINE", given=nothing_is_answered, config={"max_request_s": 0.2}),
    "the time in the queue": late("QUEUE_TIMEOUT", given=rejected(RejectReason.QUEUE_TIMEOUT)),
    "the time to wait for a worker": late(
        "QUEUE_TIMEOUT",
        given=workers_leave,
        message={"scheduling": {"max_queue_time": {"nanos": 10**8}}},
        body={"max_queue_time": 0.1},
    ),
    "an abort": Row("ABORTED", Code.CANCELLED, 409, given=whatever_runs_is_aborted),
    "a step that fails": broken("STEP_FAILED", rejected(RejectReason.STEP_FAILED)),
    "numbers that are none": broken("LOGITS_NOT_FINITE", rejected(RejectReason.NOT_FINITE)),
    "quarantine": broken("QUARANTINED", rejected(RejectReason.QUARANTINED)),
    "a stream that breaks": broken("STREAM_BROKEN", rejected(RejectReason.ALREADY_COMPLETE)),
}


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    return TABLE[request.param]


@pytest.fixture
def config(config: FrontendConfig, row: Row, tmp_path: Path) -> FrontendConfig:
    keys = {"api_keys": write_keys(tmp_path / "keys.json")} if "api_keys" in row.config else {}
    return dataclasses.replace(config, http_listen="127.0.0.1:0", **{**row.config, **keys})


@pytest.fixture
async def world(scheduler: FakeScheduler, config: FrontendConfig) -> AsyncIterator[World]:
    async with (
        running_frontend(config) as (frontend, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", trust_env=False, timeout=60) as http,
    ):
        world = World(scheduler, frontend, services.GenerationServiceStub(channel), http)
        try:
            yield world
        finally:
            for task in world.tasks:
                task.cancel()
            await asyncio.gather(*world.tasks, return_exceptions=True)


async def refusal(world: World, channel: Any, row: Row) -> grpc.aio.AioRpcError:
    if isinstance(row.message, bytes):
        call = channel.unary_stream("/octavo.v1.GenerationService/Generate")(row.message)
    else:
        call = world.stub.Generate(pb.GenerateRequest(**{**MESSAGE, **row.message}))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


@pytest.mark.parametrize("row", TABLE, indirect=True)
async def test_an_error_is_the_same_through_both_apis(world: World, row: Row) -> None:
    await row.given(world)
    held = world.frontend.generation.num_running

    async with grpc.aio.insecure_channel(f"127.0.0.1:{world.frontend.port}") as channel:
        error = await refusal(world, channel, row)
    assert (error.code(), reason_of(error)) == (row.code, row.reason), error.details()
    assert ((retry_delay_of(error) or 0) > 0) is row.retries
    assert error.details()

    content = row.body if isinstance(row.body, bytes) else httpx.Request("POST", "/", json={**BODY, **row.body}).content
    response = await world.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    said = response.json()["error"]
    assert (response.status_code, said["code"]) == (row.status, (row.http_reason or row.reason).lower()), said
    assert (int(response.headers.get("retry-after", 0)) > 0) is row.retries
    assert said["message"]

    await world.until(lambda: world.frontend.generation.num_running == held)


@pytest.mark.parametrize("row", ["a bad parameter"], indirect=True)
async def test_what_is_too_large_is_refused_unread(world: World) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(world.stub.Generate(pb.GenerateRequest(text="x" * (5 << 20))))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    response = await world.http.post("/v1/completions", json={"prompt": "x" * (5 << 20)})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize("row", ["a bad parameter"], indirect=True)
async def test_no_scheduler(config: FrontendConfig, row: Row, fake_scheduler: FakeScheduler) -> None:
    async with running_frontend(dataclasses.replace(config, scheduler_grace_s=0.2)) as (frontend, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
            stub: Any = services.GenerationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub.Generate(pb.GenerateRequest(**MESSAGE)))
        assert (caught.value.code(), reason_of(caught.value)) == (Code.UNAVAILABLE, "SCHEDULER_UNREACHABLE")
        assert (retry_delay_of(caught.value) or 0) > 0
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            response = await http.post(f"http://127.0.0.1:{frontend.http_port}/v1/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "scheduler_unreachable")
        assert int(response.headers["retry-after"]) >= 1
