"""Calls that come all at once, faster than the frontend can take them."""

import asyncio
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from octavo.frontend.server import FrontendServer
from octavo.runtime.transport.reading_room import ReadingRoom
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.half_sent import WINDOW, HalfSent
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

CONNECTIONS, CALLS = 3, 800


async def test_no_call_is_cancelled_for_having_to_wait(frontend: FrontendServer, scheduler: FakeScheduler) -> None:
    with ExitStack() as stack:
        stubs = [_stub(frontend.port, stack) for _ in range(CONNECTIONS)]
        # Nothing of the frontend runs before the first await: it shares this thread.
        calls = [stub.ListModels.future(pb.ListModelsRequest()) for stub in stubs for _ in range(CALLS)]
        await asyncio.to_thread(_wait_for_all, calls)
    assert {call.code() for call in calls} == {grpc.StatusCode.OK}


def _stub(port: int, stack: ExitStack) -> Any:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
    stack.enter_context(channel)
    grpc.channel_ready_future(channel).result(60)
    return services.GenerationServiceStub(channel)


def _wait_for_all(calls: list[Any]) -> None:
    for call in calls:
        call.exception(60)


async def test_unfinished_messages_are_not_taken_in_beyond_a_window(
    frontend: FrontendServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is: where one lost its place, another would be read.
    monkeypatch.setattr(ReadingRoom, "_look", lambda room: None)
    client = HalfSent(frontend.port, "/octavo.v1.GenerationService/Generate", num_calls=40)
    async with asyncio.timeout(120), client:
        # As many as one client may have read at a time.
        await client.run(lambda: sum(sent > 3 << 20 for sent in client.sent.values()) == 32)
        assert sum(sent > WINDOW for sent in client.sent.values()) == 32
