"""Attach over real gRPC: the same events again, one reader at a time, and requests that outlive their readers."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect, ids_of, reason_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.requests import NoticeKind, RejectReason

Code = grpc.StatusCode


def ask(detach_grace_s: float = 0.0, *, max_new_tokens: int = 20, **sampling: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id="mine",
        text="hello",
        sampling=pb.SamplingParams(seed=7, **sampling),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens),
    )
    if detach_grace_s:
        grace = Duration()
        grace.FromNanoseconds(round(detach_grace_s * 1e9))
        request.scheduling.detach_grace.CopyFrom(grace)
    return request


async def attach(stub: Any, after: int = 0, request_id: str = "mine", **response: Any) -> list[pb.GenerateResponse]:
    """All events of an Attach call."""
    request = pb.AttachRequest(request_id=request_id, after_event_offset=after, response=pb.ResponseOptions(**response))
    return [answer.event async for answer in stub.Attach(request)]


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), reason_of(caught.value)


async def read(call: Any, count: int) -> list[pb.GenerateResponse]:
    """The next events of a Generate call."""
    events = aiter(call)
    return [await anext(events) for _ in range(count)]


@pytest.fixture
async def short_patience(config: FrontendConfig) -> AsyncIterator[FrontendServer]:
    """A frontend that keeps nothing for longer than a moment."""
    async with running_frontend(dataclasses.replace(config, max_detach_grace_s=0.05)) as (server, _):
        yield server


async def test_a_finished_request_is_read_again_after_any_offset(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask(100, num_sequences=2)
    request.response.top_logprobs = 1
    told = await collect(stub.Generate(request))
    for after in range(len(told) + 1):
        assert await attach(stub, after, top_logprobs=1) == told[after:]


async def test_who_lost_the_stream_goes_on_after_what_was_received(scheduler: FakeScheduler, stub: Any) -> None:
    expected = await collect(stub.Generate(ask()))
    scheduler.hold_after = 7
    call = stub.Generate(ask(100))
    received = await read(call, 2)
    call.cancel()
    scheduler.hold_after = 1 << 30
    rest = await attach(stub, received[-1].event_offset)
    assert [e.event_offset for e in received + rest] == list(range(1, len(received + rest) + 1))
    assert ids_of(received + rest) == ids_of(expected)
    assert rest[-1].usage.completion_tokens == 20
    assert len(scheduler.submitted) == 2


async def test_a_second_reader_takes_over_from_the_first(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.hold_after = 3
    call = stub.Generate(ask())
    received = await read(call, 2)
    second = asyncio.create_task(attach(stub, received[-1].event_offset))
    assert await failure(collect(call)) == (Code.ABORTED, "SUPERSEDED")
    scheduler.hold_after = 1 << 30
    assert len(ids_of(received + await second)) == 20
    assert len(scheduler.submitted) == 1


async def test_a_request_without_a_grace_goes_with_whoever_attached(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 3
    first = stub.Generate(ask())
    await read(first, 2)
    second = stub.Attach(pb.AttachRequest(request_id="mine"))
    await anext(aiter(second))
    assert await failure(collect(first)) == (Code.ABORTED, "SUPERSEDED")
    assert frontend.generation.num_running == 1
    second.cancel()
    await eventually(lambda: scheduler.aborted == ["mine"] and frontend.generation.num_running == 0)
    assert await failure(attach(stub)) == (Code.NOT_FOUND, "REQUEST_NOT_FOUND")


async def test_a_request_that_nobody_reads_runs_on_to_its_end(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    answer = frontend.generation.tokenizer.encode("one STOP two" * 9)
    scheduler.answer = lambda request, index: answer[:50]
    scheduler.hold_after = 2
    request = ask(100, max_new_tokens=50)
    request.stopping.stop_strings.append("STOP")
    call = stub.Generate(request)
    await read(call, 1)
    call.cancel()
    scheduler.hold_after = 12
    # By its stop string, which the scheduler does not know of.
    await eventually(lambda: scheduler.aborted == ["mine"] and frontend.generation.num_running == 0)
    told = await attach(stub)
    assert "".join(event.delta.text for event in told) == "one "
    assert [event.event_offset for event in told] == list(range(1, len(told) + 1))


@pytest.mark.parametrize("num_replicas", [0])
async def test_a_client_that_goes_before_the_request_is_prepared_may_come_back(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    call = stub.Generate(ask(100))
    await eventually(lambda: frontend.generation.num_running == 1)
    call.cancel()
    second = asyncio.create_task(attach(stub))
    await scheduler.set_replicas(1)
    assert len(ids_of(await second)) == 20


async def test_a_request_that_nobody_comes_back_to_ends_with_its_grace(
    scheduler: FakeScheduler, short_patience: FrontendServer, eventually: Any
) -> None:
    scheduler.hold_after = 3
    async with grpc.aio.insecure_channel(f"127.0.0.1:{short_patience.port}") as channel:
        stub = services.GenerationServiceStub(channel)
        call = stub.Generate(ask(100))
        await read(call, 2)
        call.cancel()
        await eventually(lambda: scheduler.aborted == ["mine"] and scheduler.running == set())
        assert short_patience.generation.num_running == 0
        assert await failure(attach(stub)) == (Code.NOT_FOUND, "REQUEST_NOT_FOUND")


async def test_a_finished_request_is_forgotten_after_its_grace(
    scheduler: FakeScheduler, short_patience: FrontendServer, eventually: Any
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{short_patience.port}") as channel:
        stub = services.GenerationServiceStub(channel)
        told = await collect(stub.Generate(ask(100)))
        forgotten = short_patience.generation.prompt_tokens_of
        await eventually(lambda: forgotten("mine") is None)
        # The id is free again.
        assert ids_of(await collect(stub.Generate(ask()))) == ids_of(told)


async def test_what_is_kept_counts_as_admitted_until_it_is_forgotten(
    scheduler: FakeScheduler, config: FrontendConfig, eventually: Any
) -> None:
    async with (
        running_frontend(dataclasses.replace(config, max_requests=1)) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = services.GenerationServiceStub(channel)
        await collect(stub.Generate(ask(100)))
        other = ask()
        other.request_id = "other"
        assert await failure(collect(stub.Generate(other))) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        # Who reads it now is the last.
        registry = server.generation._registry
        registry.timeouts = dataclasses.replace(registry.timeouts, max_detach_grace_s=0.0)
        assert await attach(stub)
        await eventually(lambda: server.generation.prompt_tokens_of("mine") is None)
        assert len(ids_of(await collect(stub.Generate(other)))) == 20


async def test_the_error_of_a_request_is_told_to_who_comes_back(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 3
    call = stub.Generate(ask(100))
    told = await read(call, 1)
    await eventually(lambda: len(scheduler.running) == 1)
    call.cancel()
    await eventually(lambda: scheduler.submitted != [])
    scheduler.rejection = RejectReason.STEP_FAILED
    scheduler.forget_everything()
    await eventually(lambda: frontend.generation.num_running == 0)
    again = stub.Attach(pb.AttachRequest(request_id="mine"))
    assert (await anext(aiter(again))).event == told[0]
    assert await failure(collect(again)) == (Code.INTERNAL, "STEP_FAILED")


async def test_an_id_in_use_or_kept_is_not_free(scheduler: FakeScheduler, stub: Any) -> None:
    await collect(stub.Generate(ask(100)))
    assert await failure(collect(stub.Generate(ask()))) == (Code.ALREADY_EXISTS, "DUPLICATE_ID")


async def test_abort_ends_a_request_that_nobody_reads(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    scheduler.hold_after = 3
    call = stub.Generate(ask(100))
    await read(call, 2)
    call.cancel()
    assert list((await stub.Abort(pb.AbortRequest(request_ids=["mine"]))).aborted) == ["mine"]
    await eventually(lambda: scheduler.aborted == ["mine"] and frontend.generation.num_running == 0)
    assert await failure(attach(stub, 2)) == (Code.CANCELLED, "ABORTED")


async def test_a_drain_waits_for_a_request_that_nobody_reads(
    scheduler: FakeScheduler, config: FrontendConfig, eventually: Any
) -> None:
    scheduler.hold_after = 3
    async with (
        running_frontend(config) as (server, stopping),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = services.GenerationServiceStub(channel)
        call = stub.Generate(ask(100))
        received = await read(call, 2)
        call.cancel()
        stopping.set()
        await eventually(lambda: server.generation.draining)
        second = asyncio.create_task(attach(stub, received[-1].event_offset))
        scheduler.hold_after = 1 << 30
        assert len(ids_of(received + await second)) == 20


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (pb.AttachRequest(request_id="other"), (Code.NOT_FOUND, "REQUEST_NOT_FOUND")),
        (pb.AttachRequest(request_id="mine", after_event_offset=99), (Code.OUT_OF_RANGE, "ATTACH_OFFSET_GONE")),
        (pb.AttachRequest(request_id="mine", after_event_offset=2**64 - 1), (Code.OUT_OF_RANGE, "ATTACH_OFFSET_GONE")),
        (
            pb.AttachRequest(request_id="mine", response={"incremental": False}),
            (Code.INVALID_ARGUMENT, "BAD_PARAMETER"),
        ),
        (pb.AttachRequest(request_id="mine", response={"top_logprobs": 1}), (Code.INVALID_ARGUMENT, "BAD_PARAMETER")),
        (pb.AttachRequest.FromString(b"\xa0\x06\x01"), (Code.UNIMPLEMENTED, "UNSUPPORTED_FIELD")),
    ],
)
async def test_bad_ways_to_attach(scheduler: FakeScheduler, stub: Any, request_: Any, expected: Any) -> None:
    await collect(stub.Generate(ask(100)))
    assert await failure(collect(stub.Attach(request_))) == expected
    assert await attach(stub)


async def test_a_reader_may_see_less_than_the_first_did(scheduler: FakeScheduler, stub: Any) -> None:
    request = ask(100)
    request.response.top_logprobs = 2
    told = await collect(stub.Generate(request))
    again = await attach(stub, text=False, incremental=True)
    assert ids_of(again) == ids_of(told)
    assert not any(event.delta.text or event.delta.logprobs for event in again)


async def test_a_reading_has_a_deadline_of_its_own(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any
) -> None:
    scheduler.hold_after = 3
    call = stub.Generate(ask(100))
    received = await read(call, 2)
    loop = asyncio.get_running_loop()
    reading = frontend.generation.attach("mine", 2, deadline=loop.time() + 0.05)
    with pytest.raises(Exception, match="the deadline passed"):
        [event async for event in reading]
    scheduler.hold_after = 1 << 30
    assert len(ids_of(received + await attach(stub, 2))) == 20


async def test_notices_are_told_in_their_place(scheduler: FakeScheduler, stub: Any, eventually: Any) -> None:
    scheduler.hold_after = 0
    call = stub.Generate(ask(100))
    events = aiter(call)
    await eventually(lambda: len(scheduler.running) == 1)
    await scheduler.tell("mine", NoticeKind.QUEUED, queue_position=3)
    told = [await anext(events)]
    scheduler.hold_after = 1
    told += [await anext(events), await anext(events)]
    await scheduler.tell("mine", NoticeKind.PREEMPTED)
    told.append(await anext(events))
    await scheduler.tell("mine", NoticeKind.RESUMED)
    scheduler.hold_after = 1 << 30
    told += [event async for event in events]
    kinds = [event.WhichOneof("event") for event in told]
    assert kinds[:4] == ["notice", "started", "delta", "notice"]
    assert told[0].notice == pb.Notice(kind=pb.Notice.KIND_QUEUED, queue_position=3)
    assert told[3].notice == pb.Notice(kind=pb.Notice.KIND_PREEMPTED)
    assert kinds.count("notice") == 3
    assert [event.event_offset for event in told] == list(range(1, len(told) + 1))
    assert await attach(stub) == told
