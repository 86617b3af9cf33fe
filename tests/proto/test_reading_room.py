"""Messages that clients begin and do not finish take bounded memory, and keep nobody else out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import pytest

from octavo.runtime.transport.grpc_reading import READING_OPTIONS, ReadingInterceptor
from octavo.runtime.transport.reading_room import ReadingRoom
from octavo.testing.half_sent import WINDOW, HalfSent
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services

LONG_S: Final = 600.0


class Reader:
    """Holds a place in a task of its own until it is told to go on."""

    def __init__(self, room: ReadingRoom, client: str) -> None:
        self.client = client
        self.reads = False
        self.finish = asyncio.Event()
        self.task = asyncio.create_task(self._read(room))

    async def _read(self, room: ReadingRoom) -> None:
        async with room.place(self.client):
            self.reads = True
            await self.finish.wait()

    async def end(self) -> None:
        self.finish.set()
        await self.task


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_places_go_to_those_who_came_first() -> None:
    room = ReadingRoom(places=4, patience_s=LONG_S)
    readers = [Reader(room, client) for client in ("a", "b", "a", "b", "a", "b")]
    await settled()
    assert [reader.reads for reader in readers] == [True, True, True, True, False, False]
    await readers[1].end()
    await settled()
    # The first that waits is of the client that has half of the places already.
    assert [reader.reads for reader in readers] == [True, True, True, True, False, True]
    for reader in readers:
        await reader.end()


async def test_no_client_has_more_than_half_of_the_places_and_those_that_wait_take_turns() -> None:
    room = ReadingRoom(places=4, patience_s=LONG_S)
    crowd = [Reader(room, "crowd") for _ in range(50)]
    await settled()
    assert sum(reader.reads for reader in crowd) == 2
    others = [Reader(room, client) for client in ("x", "y", "z")]
    await settled()
    assert [reader.reads for reader in others] == [True, True, False]
    await others[0].end()
    await settled()
    assert others[2].reads
    for reader in [*others, *crowd]:
        await reader.end()


async def test_the_client_with_the_most_places_loses_old_ones_while_others_wait() -> None:
    room = ReadingRoom(places=4, patience_s=0.01)
    crowd = [Reader(room, "crowd") for _ in range(5)]
    slow = Reader(room, "slow")
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*(reader.task for reader in crowd[:3]), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TimeoutError] * 3
    assert slow.reads
    for reader in [slow, *crowd[3:]]:
        await reader.end()


async def test_nobody_loses_a_place_for_which_nobody_waits() -> None:
    room = ReadingRoom(places=4, patience_s=0.0)
    readers = [Reader(room, client) for client in ("a", "a", "b", "b")]
    await settled()
    await asyncio.sleep(0.01)
    assert all(reader.reads and not reader.task.done() for reader in readers)
    for reader in readers:
        await reader.end()


async def test_a_place_is_taken_back_once_however_often_they_are_looked_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Without patience they are looked through in every turn of the event loop.
    room = ReadingRoom(places=4, patience_s=0.0)
    crowd = [Reader(room, "crowd") for _ in range(6)]
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*(reader.task for reader in crowd[:4]), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TimeoutError] * 4
    await settled()
    assert [reader.reads and not reader.task.done() for reader in crowd[4:]] == [True, True]
    for reader in crowd[4:]:
        await reader.end()
    # The event loop logs what its callbacks raise.
    assert not caplog.records


async def test_one_that_waits_costs_one_its_place_however_slowly_that_one_leaves() -> None:
    # Looked through in every turn, the second time before who has lost a place has left.
    room = ReadingRoom(places=4, patience_s=0.0)
    crowd = [Reader(room, "crowd") for _ in range(5)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(reader.task for reader in crowd[:3]), return_exceptions=True)
    await settled()
    assert [reader.reads and not reader.task.done() for reader in crowd[3:]] == [True, True]
    for reader in crowd[3:]:
        await reader.end()


async def test_calls_that_end_while_they_wait_or_read_leave_nothing_behind() -> None:
    room = ReadingRoom(places=4, patience_s=LONG_S)
    readers = [Reader(room, "a") for _ in range(4)]
    await settled()
    for gone in (readers[2], readers[0]):
        gone.task.cancel()
    await settled()
    assert [reader.reads for reader in readers] == [True, True, False, True]
    # The place of a call is granted that is cancelled at the same moment.
    late = [Reader(room, "a") for _ in range(2)]
    await settled()
    readers[1].finish.set()
    late[0].task.cancel()
    await settled()
    assert late[1].reads
    for reader in (readers[3], late[1]):
        await reader.end()


# -- over the wire ---------------------------------------------------------------------------------------------------

PLACES: Final = 4
GET_LOAD: Final = "/octavo.v1.AdminService/GetLoad"
# A method that takes a stream of messages.
EACH: Final = "/Echo/Each"


class Admin(services.AdminServiceServicer):
    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(waiting=7)


async def answer_each(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def refuse(context: Any, why: str) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)


async def refuse_late(context: Any, why: str) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    servers = []

    async def start(patience_s: float) -> int:
        room = ReadingRoom(PLACES, patience_s)
        options = [*READING_OPTIONS, ("grpc.http2.max_ping_strikes", 0)]
        server = grpc.aio.server(interceptors=[ReadingInterceptor(refuse, refuse_late, room)], options=options)
        services.add_AdminServiceServicer_to_server(Admin(), server)
        echo = grpc.stream_stream_rpc_method_handler(answer_each, bytes, bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"Each": echo}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        await server.stop(0)


@pytest.mark.parametrize("method", [GET_LOAD, EACH])
async def test_only_as_many_messages_as_there_are_places_for_come_in_beyond_a_window(serve: Any, method: str) -> None:
    client = HalfSent(await serve(LONG_S), method, num_calls=40)
    async with asyncio.timeout(120), client:
        await client.run(lambda: sum(sent > 3 << 20 for sent in client.sent.values()) >= PLACES // 2)
        for _ in range(20):
            await client.ping()
    assert sum(sent > WINDOW for sent in client.sent.values()) == PLACES // 2
    assert not client.ended


async def test_calls_behind_unfinished_messages_are_answered(serve: Any) -> None:
    port = await serve(0.05)
    client = HalfSent(port, GET_LOAD, num_calls=40)
    async with asyncio.timeout(120), client, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        crowd = asyncio.create_task(client.run(lambda: len(client.ended) == 30))
        stub: Any = services.AdminServiceStub(channel)
        assert (await stub.GetLoad(pb.GetLoadRequest())).waiting == 7
        await crowd


async def test_streams_that_send_nothing_give_way_to_calls_that_wait(serve: Any) -> None:
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{await serve(0.05)}") as channel:
        begin: Any = channel.stream_stream(EACH, bytes, bytes)
        streams = [begin() for _ in range(PLACES // 2)]
        for stream in streams:
            for _ in range(2):
                await stream.write(b"x")
                assert await stream.read() == b"x"
        stub: Any = services.AdminServiceStub(channel)
        assert (await stub.GetLoad(pb.GetLoadRequest())).waiting == 7
        assert await streams[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_without_a_message_is_refused(serve: Any) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await serve(LONG_S)}") as channel:
        call: Any = channel.stream_unary(GET_LOAD, bytes, bytes)(iter(()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no message" in (caught.value.details() or "")
