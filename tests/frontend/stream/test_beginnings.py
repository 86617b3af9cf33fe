"""Requests that begin together: what runs goes on meanwhile, and no turn of the event loop holds many of them."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import pytest
from starlette.requests import Request

from octavo.frontend.access.connections import ConnectionBook
from octavo.frontend.api.body import read_call
from octavo.frontend.http.server import Acceptor
from octavo.frontend.openai.schemas import CompletionBody
from octavo.frontend.request.events import RequestStarted, TextDelta
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.server import FrontendServer
from octavo.frontend.stream.pacing import Turns
from octavo.testing.fakes.fake_scheduler import FakeScheduler

BURST: Final = 300
# In one turn of the event loop.
FEW: Final = 16


async def test_a_stream_that_runs_does_not_wait_behind_those_that_begin(
    frontend: FrontendServer, scheduler: FakeScheduler, eventually: Any
) -> None:
    await eventually(lambda: frontend.generation.ready)
    scheduler.hold_after = 1
    generation, asked = frontend.generation, GenerationRequest([5, 6], max_new_tokens=2)
    running = generation.generate(asked)
    assert isinstance((await anext(running)).event, RequestStarted)
    await eventually(lambda: frontend.scheduler.journals[0].begun)
    tasks = [asyncio.ensure_future(anext(generation.generate(asked))) for _ in range(BURST)]
    while generation.num_running <= BURST:
        await asyncio.sleep(0)
    # All have come, and want to begin.
    await asyncio.sleep(0)
    assert isinstance((await anext(running)).event, TextDelta)
    assert len(frontend.scheduler.journals) < BURST // 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await running.aclose()


async def test_bodies_are_read_a_few_in_a_turn() -> None:
    turns, read = Turns.of_beginnings(), 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

    async def call() -> None:
        nonlocal read
        await read_call(Request({"type": "http", "headers": []}, receive), CompletionBody, {}, turns)
        read += 1

    tasks = [asyncio.create_task(call()) for _ in range(BURST)]
    most = before = 0
    while read < BURST:
        await asyncio.sleep(0)
        most, before = max(most, read - before), read
    await asyncio.gather(*tasks)
    assert 0 < most <= FEW


class Counted(asyncio.Protocol):
    """A connection that counts those that were made before it."""

    made: ClassVar[list[asyncio.BaseTransport]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=BURST) as listener:
        listener.setblocking(False)
        yield listener


async def test_connections_are_taken_in_a_few_in_a_turn(listener: socket.socket) -> None:
    clients = [socket.create_connection(listener.getsockname()) for _ in range(4 * FEW)]
    book = ConnectionBook(BURST)
    acceptor = Acceptor(listener, book, lambda place: Counted(), None)
    acceptor.start()
    most = before = 0
    async with asyncio.timeout(60):
        while len(Counted.made) < len(clients):
            await asyncio.sleep(0)
            most, before = max(most, len(book) - before), len(book)
    assert 0 < most <= FEW
    acceptor.close()
    for transport in Counted.made:
        transport.close()
    for client in clients:
        client.close()
    await asyncio.sleep(0)
