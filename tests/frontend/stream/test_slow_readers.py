"""An API that does not take its events is cut off, and nothing is computed for its request any more."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Aborted, Reason
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.metrics import FrontendMetrics
from octavo.frontend.stream.pacing import paced
from octavo.testbed.grpc_calls import collect, reason_of
from octavo.testing import no_waiting
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

STALL_S = 0.05


class Outcomes(FrontendMetrics):
    """Why requests have ended."""

    seen: list[Any]

    def failed(self, error: Any) -> None:
        self.seen.append(error.reason)

    def refused(self, error: Any) -> None:
        self.seen.append(("refused", error.reason))

    def finished(self, usage: Any, since_arrival_s: float) -> None:
        self.seen.append("finished")

    def left(self) -> None:
        self.seen.append("left")


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    Outcomes.seen = []
    monkeypatch.setattr("octavo.frontend.server.FrontendMetrics", Outcomes)
    return Outcomes.seen


@pytest.fixture
async def impatient(config: FrontendConfig, outcomes: list[Any]) -> AsyncIterator[FrontendServer]:
    async with running_frontend(dataclasses.replace(config, stall_timeout_s=STALL_S, max_request_s=60.0)) as (
        server,
        _,
    ):
        yield server


async def read_with(server: FrontendServer, request: GenerationRequest, write: Any) -> None:
    """Reads the events of a request as every API does."""
    async with (
        paced(server.generation.stall_timeout_s) as pace,
        contextlib.aclosing(server.generation.generate(request)) as events,
    ):
        async for emitted in events:
            with pace:
                await write(emitted)


async def never(emitted: object) -> None:
    await asyncio.Event().wait()


async def at_once(emitted: object) -> None:
    pass


def test_many_writes_may_together_take_longer_than_one() -> None:
    async def write() -> None:
        async with paced(STALL_S) as pace:
            for _ in range(6):
                with pace:
                    await asyncio.sleep(STALL_S / 3)

    no_waiting.run(write())


def test_a_write_that_begins_late_has_its_whole_time() -> None:
    async def write() -> None:
        async with paced(STALL_S) as pace:
            await asyncio.sleep(STALL_S * 0.8)
            with pace:
                await never(None)

    async def write_late() -> float:
        with pytest.raises(Aborted):
            await write()
        return asyncio.get_running_loop().time()

    assert no_waiting.run(write_late()) == pytest.approx(1.8 * STALL_S)


async def test_a_timeout_of_another_kind_is_not_the_readers() -> None:
    with pytest.raises(TimeoutError, match="mine"):
        async with paced(STALL_S):
            raise TimeoutError("mine")


async def test_a_reader_that_stalls_is_cut_off_and_its_work_freed(
    scheduler: FakeScheduler, impatient: FrontendServer, outcomes: list[Any], eventually: Any
) -> None:
    scheduler.hold_after = 9
    with pytest.raises(Aborted) as caught:
        await read_with(impatient, GenerationRequest(prompt="hello", request_id="mine", max_new_tokens=20), never)
    assert caught.value.reason is Reason.SLOW_READER
    assert outcomes == [Reason.SLOW_READER]
    await eventually(lambda: scheduler.aborted == ["mine"] and scheduler.running == set())
    assert impatient.generation.num_running == 0


async def test_a_reader_that_stalls_may_come_back_where_the_request_is_kept(
    scheduler: FakeScheduler, impatient: FrontendServer, outcomes: list[Any]
) -> None:
    scheduler.hold_after = 9
    request = GenerationRequest(prompt="hello", request_id="mine", max_new_tokens=20, detach_grace_s=100.0)
    with pytest.raises(Aborted):
        await read_with(impatient, request, never)
    assert (outcomes, scheduler.aborted) == ([], [])
    scheduler.hold_after = 1 << 30
    offsets = [emitted.offset async for emitted in impatient.generation.attach("mine", 0)]
    assert offsets == list(range(1, len(offsets) + 1))
    assert outcomes == ["finished"]


async def test_a_reader_that_waits_for_tokens_is_not_slow(
    scheduler: FakeScheduler, impatient: FrontendServer, outcomes: list[Any]
) -> None:
    scheduler.hold_after = 3
    reading = asyncio.create_task(read_with(impatient, GenerationRequest(prompt="hello", max_new_tokens=20), at_once))
    await asyncio.sleep(3 * STALL_S)
    scheduler.hold_after = 1 << 30
    await reading
    assert outcomes == ["finished"]


async def test_a_reader_that_leaves_has_left(
    scheduler: FakeScheduler, outcomes: list[Any], frontend: FrontendServer
) -> None:
    scheduler.hold_after = 3
    events = frontend.generation.generate(GenerationRequest(prompt="hello", max_new_tokens=20))
    await anext(events)
    await events.aclose()
    assert outcomes == ["left"]


async def test_what_is_refused_is_told_as_refused(
    scheduler: FakeScheduler, impatient: FrontendServer, outcomes: list[Any]
) -> None:
    for request in (GenerationRequest(prompt=""), GenerationRequest(prompt="hello", stop_token_ids=[300])):
        with pytest.raises(Exception, match=r"empty|vocabulary"):
            await read_with(impatient, request, at_once)
    assert outcomes == [("refused", Reason.BAD_PARAMETER)] * 2


async def test_a_client_that_does_not_read_its_stream_is_cut_off(
    scheduler: FakeScheduler, impatient: FrontendServer, outcomes: list[Any], eventually: Any
) -> None:
    # Nothing but what flow control lets through is taken from the server.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{impatient.port}", options=options) as channel:
        request = pb.GenerateRequest(
            text="hello",
            sampling=pb.SamplingParams(num_sequences=8),
            stopping=pb.StoppingCriteria(max_new_tokens=500, ignore_eos=True),
            response=pb.ResponseOptions(top_logprobs=20),
        )
        call = services.GenerationServiceStub(channel).Generate(request)
        await eventually(lambda: outcomes != [])
        assert outcomes == [Reason.SLOW_READER]
        assert impatient.generation.num_running == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ABORTED, "SLOW_READER")
