"""How long a request may take: until its caller's deadline, the server's own, and the time it may wait."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import grpc
import pytest
import uvloop
from google.protobuf.duration_pb2 import Duration

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Aborted, DeadlineExceeded, Reason
from octavo.frontend.request.events import RequestStarted, TextDelta
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.pacing import Turns
from octavo.testbed.grpc_calls import collect, reason_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import RejectReason

REQUEST = GenerationRequest(prompt="hello", request_id="mine", max_new_tokens=20)
# Times that a busy machine may let pass before anything has begun; then the next is tried.
SHORT_TIMES_S = (0.2, 2.0, 60.0)


async def refusal(server: FrontendServer, request: GenerationRequest, deadline: float | None = None) -> Reason:
    with pytest.raises(DeadlineExceeded) as caught:
        [event async for event in server.generation.generate(request, deadline=deadline)]
    return caught.value.reason


async def test_a_deadline_ends_a_request_where_nobody_takes_its_events(
    scheduler: FakeScheduler, frontend: FrontendServer, eventually: Any
) -> None:
    scheduler.hold_after = 3
    await eventually(lambda: frontend.generation.ready)
    for seconds in SHORT_TIMES_S:
        events = frontend.generation.generate(REQUEST, deadline=asyncio.get_running_loop().time() + seconds)
        with contextlib.suppress(DeadlineExceeded):
            await anext(events)
            break
    # Its reader does nothing, and still its work ends.
    await eventually(lambda: "mine" in scheduler.aborted and frontend.generation.num_running == 0)
    with pytest.raises(DeadlineExceeded):
        [event async for event in events]


async def test_the_deadline_of_who_attaches_ends_the_reading_alone(
    scheduler: FakeScheduler, frontend: FrontendServer, eventually: Any
) -> None:
    scheduler.hold_after = 3
    await eventually(lambda: frontend.generation.ready)
    loop = asyncio.get_running_loop()
    first = frontend.generation.generate(dataclasses.replace(REQUEST, detach_grace_s=60.0))
    told = [await anext(first)]
    await first.aclose()

    async def read_on() -> None:
        async for emitted in frontend.generation.attach("mine", len(told), deadline=loop.time() + 0.2):
            told.append(emitted)

    with pytest.raises(DeadlineExceeded):
        await read_on()
    # Between two events too.
    for seconds in SHORT_TIMES_S:
        late = frontend.generation.attach("mine", 0, deadline=loop.time() + seconds)
        with contextlib.suppress(DeadlineExceeded):
            assert await anext(late) == told[0]
            break
    await asyncio.sleep(1.1 * seconds)
    with pytest.raises(DeadlineExceeded):
        await anext(late)
    assert frontend.generation.num_running == 1
    scheduler.hold_after = 1 << 30
    again = [emitted async for emitted in frontend.generation.attach("mine", 0)]
    assert again[: len(told)] == told
    assert [emitted.offset for emitted in again] == list(range(1, len(again) + 1))


# The second is the command's, whose timers are others.
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_deadline_that_has_passed_when_its_reader_attaches_ends_no_request(
    fake_scheduler: FakeScheduler, config: FrontendConfig, run: Any
) -> None:
    async def attach_late() -> None:
        fake_scheduler.hold_after = 3
        async with fake_scheduler.serving(), running_frontend(config) as (server, _):
            first = server.generation.generate(dataclasses.replace(REQUEST, detach_grace_s=60.0))
            await anext(first)
            await first.aclose()
            for past_s in (0.0, 10.0):
                deadline = asyncio.get_running_loop().time() - past_s
                with pytest.raises(DeadlineExceeded):
                    [event async for event in server.generation.attach("mine", 0, deadline=deadline)]
            assert server.generation.num_running == 1
            server.generation.abort("mine")

    run(attach_late())


async def test_a_request_that_ends_just_before_a_sequence_of_it_is_read_to_its_end_has_that_outcome(
    scheduler: FakeScheduler, frontend: FrontendServer, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await eventually(lambda: frontend.generation.ready)
    request = dataclasses.replace(REQUEST, num_sequences=2, seed=7)
    pieces = [event async for _, event in frontend.generation.generate(request) if isinstance(event, TextDelta)]
    text = "".join(piece.text for piece in pieces if piece.index == 0)
    scheduler.hold_after = 3
    # The stop string ends one sequence, which the frontend tells the scheduler.
    events = frontend.generation.generate(dataclasses.replace(request, stop_strings=(text[:3],)))
    assert isinstance((await anext(events)).event, RequestStarted)

    def take_now(turns: Turns) -> bool:
        frontend.generation.abort("mine")
        return True

    monkeypatch.setattr(Turns, "take_now", take_now)
    with pytest.raises(Aborted):
        [event async for event in events]


async def test_no_request_takes_longer_than_the_server_lets_it(
    scheduler: FakeScheduler, config: FrontendConfig
) -> None:
    scheduler.hold_after = 3
    async with running_frontend(dataclasses.replace(config, max_request_s=0.1)) as (server, _):
        assert await refusal(server, REQUEST) is Reason.DEADLINE
        assert await refusal(server, REQUEST, asyncio.get_running_loop().time() + 60) is Reason.DEADLINE


@pytest.mark.parametrize("num_replicas", [0])
async def test_waiting_for_a_worker_is_waiting_in_the_queue(scheduler: FakeScheduler, config: FrontendConfig) -> None:
    async with running_frontend(config) as (server, _):
        assert await refusal(server, dataclasses.replace(REQUEST, max_queue_s=0.1)) is Reason.QUEUE_TIMEOUT
        assert server.generation.num_running == 0
    assert scheduler.submitted == []


async def test_a_scheduler_that_has_not_begun_in_time_says_so(scheduler: FakeScheduler, stub: Any) -> None:
    scheduler.rejection = RejectReason.QUEUE_TIMEOUT
    request = pb.GenerateRequest(text="x", scheduling=pb.SchedulingHints(max_queue_time=Duration(seconds=1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(request))
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT")
    assert scheduler.submitted[0].max_queue_ms == 1000
