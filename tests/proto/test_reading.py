"""Messages that cannot be read, and methods that nobody wrote, end as what they are, and not as faults in the log."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from octavo.runtime.transport.grpc_reading import ReadingInterceptor
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services

Code = grpc.StatusCode
ECHO = "/test.Echo/Echo"


async def refuse(context: Any, why: str) -> None:
    await context.abort(Code.INVALID_ARGUMENT, why)


class Admin(services.AdminServiceServicer):
    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(waiting=7)

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Any) -> AsyncIterator[pb.WatchStepsResponse]:
        for number in (1, 2):
            yield pb.WatchStepsResponse(step=number)

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: Any) -> None:
        await context.write(pb.WatchBlocksResponse())


async def echo(requests: Any, context: Any) -> AsyncIterator[pb.UnpinPrefixRequest]:
    async for request in requests:
        yield request


def echoing() -> Any:
    kind = pb.UnpinPrefixRequest
    handler = grpc.stream_stream_rpc_method_handler(echo, kind.FromString, kind.SerializeToString)
    return grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler})


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[ReadingInterceptor(refuse, refuse)])
    services.add_AdminServiceServicer_to_server(Admin(), server)
    servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_generic_rpc_handlers((echoing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_what_can_be_read_is_answered(channel: Any) -> None:
    stub: Any = services.AdminServiceStub(channel)
    assert (await stub.GetLoad(pb.GetLoadRequest())).waiting == 7
    assert [step.step async for step in stub.WatchSteps(pb.WatchStepsRequest())] == [1, 2]
    assert [step async for step in stub.WatchBlocks(pb.WatchBlocksRequest())] == [pb.WatchBlocksResponse()]
    call: Any = channel.stream_stream(ECHO)(iter([b"\x0a\x01a", b"\x0a\x01b"]))
    assert [answer async for answer in call] == [b"\x0a\x01a", b"\x0a\x01b"]


@pytest.mark.parametrize("method", ["GetLoad", "WatchSteps", "WatchBlocks"])
async def test_what_cannot_be_read_is_the_clients_fault(
    channel: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    call: Any = channel.unary_stream(f"/octavo.v1.AdminService/{method}")(b"\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [answer async for answer in call]
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert ".proto" in (caught.value.details() or "")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stream_ends_with_what_cannot_be_read(channel: Any) -> None:
    call: Any = channel.stream_stream(ECHO)()
    await call.write(b"\x0a\x01a")
    assert await call.read() == b"\x0a\x01a"
    await call.write(b"\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is Code.INVALID_ARGUMENT


async def test_what_nobody_wrote_is_unimplemented(channel: Any, caplog: pytest.LogCaptureFixture) -> None:
    for method in ("/grpc.health.v1.Health/List", "/octavo.v1.AdminService/ListRequests"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"")
        assert caught.value.code() is Code.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
