"""Every gRPC method but those of a short list asks for a key, and the key names the caller."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.frontend.access.access import Access, Bounds, read_api_keys
from octavo.frontend.config import FrontendConfig
from octavo.frontend.grpc.access import caller_of, interceptors, reading
from octavo.frontend.server import V1
from octavo.runtime.transport.grpc_reading import ReadingInterceptor
from octavo.runtime.transport.reading_room import ReadingRoom
from octavo.testbed.credentials import KEYS, bearer, write_keys
from octavo.testbed.grpc_calls import collect, reason_of, retry_delay_of
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb

Code = grpc.StatusCode
# Probes carry no key. Nothing else is to be added here.
OPEN = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
ALICE = (("authorization", bearer("alice")),)


@pytest.fixture
def config(config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
    return dataclasses.replace(config, api_keys=write_keys(tmp_path / "keys.json"))


def identity(message: bytes) -> bytes:
    return message


def call(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> Any:
    """A call of any method, which may send a stream and may get one."""
    invoke: Any = channel.stream_stream(method, request_serializer=identity, response_deserializer=identity)
    # Nothing is sent, for the refusal does not wait for it, and a message that comes too late is an error of its own.
    return invoke(iter(()), metadata=metadata, timeout=60)


async def methods(channel: grpc.aio.Channel) -> set[str]:
    """What reflection says there is, and reflection's own newer name."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask(**question: str) -> Any:
        request = reflection_pb2.ServerReflectionRequest(**question)
        [answer] = [a async for a in stub.ServerReflectionInfo(iter([request]), metadata=ALICE)]
        return answer

    names = [service.name for service in (await ask(list_services="")).list_services_response.service]
    found = {f"/{V1}/ServerReflectionInfo"}
    for name in names:
        for file in (await ask(file_containing_symbol=name)).file_descriptor_response.file_descriptor_proto:
            found |= set(_methods_in(FileDescriptorProto.FromString(file)))
    return found


def _methods_in(file: FileDescriptorProto) -> Iterable[str]:
    return (f"/{file.package}.{service.name}/{method.name}" for service in file.service for method in service.method)


async def test_every_method_but_those_of_the_list_asks_for_a_key(channel: grpc.aio.Channel) -> None:
    known = await methods(channel)
    assert len(known) > len(OPEN) + 6
    assert "/octavo.v1.GenerationService/Generate" in known
    for method in sorted({*known, "/octavo.v1.GenerationService/Divine", "/no.Such/Thing", "/"} - OPEN):
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(call(channel, method, metadata))
            assert (caught.value.code(), reason_of(caught.value)) == (Code.UNAUTHENTICATED, "UNAUTHENTICATED"), method


async def test_probes_need_no_key(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await anext(aiter(watch))).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


@pytest.mark.parametrize("metadata", [ALICE, (("x-api-key", KEYS["alice"]),), (("authorization", bearer("gateway")),)])
async def test_a_call_with_a_key_is_answered(scheduler: FakeScheduler, stub: Any, metadata: Any) -> None:
    request = pb.GenerateRequest(text="x", stopping=pb.StoppingCriteria(max_new_tokens=2))
    assert await collect(stub.Generate(request, metadata=metadata))


async def test_a_client_is_refused_before_it_has_sent_anything(channel: grpc.aio.Channel) -> None:
    async def nothing_yet() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    untyped: Any = channel
    invoke = untyped.stream_unary("/octavo.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await invoke(nothing_yet(), timeout=60)
    assert caught.value.code() is Code.UNAUTHENTICATED


async def test_each_of_many_streams_knows_its_own_caller(tmp_path: Path) -> None:
    async def who(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield caller_of(context).tenant.encode()

    server = grpc.aio.server(interceptors=interceptors(Access(read_api_keys(write_keys(tmp_path / "k"), Bounds()))))
    handler = grpc.method_handlers_generic_handler("t.T", {"Who": grpc.stream_stream_rpc_method_handler(who)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        untyped: Any = channel
        tenants = [*KEYS] * 10
        calls = [untyped.stream_stream("/t.T/Who")(metadata=(("authorization", bearer(t)),)) for t in tenants]
        for _ in range(3):
            for stream in calls:
                await stream.write(b"x")
            assert [(await stream.read()).decode() for stream in calls] == tenants
        await asyncio.gather(*(stream.done_writing() for stream in calls))
    await server.stop(0)


def test_where_no_keys_are_asked_for_only_reading_stands_before_the_methods() -> None:
    [innermost] = interceptors(Access())
    assert isinstance(innermost, ReadingInterceptor)


async def test_a_stream_whose_message_holds_up_others_is_told_why_and_when_to_come_back() -> None:
    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    # One client has half of the places, so one of its calls waits for the other, which sends nothing more.
    server = grpc.aio.server(interceptors=[reading(ReadingRoom(places=2, patience_s=0.01))])
    handler = grpc.stream_stream_rpc_method_handler(echo, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        untyped: Any = channel

        async def fall_silent() -> None:
            stream = untyped.stream_stream("/t.T/Echo")()
            await stream.write(b"x")
            assert await stream.read() == b"x"
            await stream.read()

        calls = [asyncio.create_task(fall_silent()) for _ in range(2)]
        [ended], [other] = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        other.cancel()
    await server.stop(0)
    error = ended.exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert (error.code(), reason_of(error)) == (Code.RESOURCE_EXHAUSTED, "TOO_MUCH_WORK")
    assert retry_delay_of(error) == 1.0
    assert "without a pause" in (error.details() or "")
