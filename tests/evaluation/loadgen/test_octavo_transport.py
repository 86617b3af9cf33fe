"""What a gRPC frontend answers, and what becomes of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from octavo.loadgen.grpc_transport import GrpcTransport
from octavo.loadgen.servers import AnswerRecorder, Asking, Failure, Record, Secrets, ServerAddress, TargetError
from octavo.testbed.stack import free_address
from octavo.testing.fakes.fake_frontend import FakeFrontend, script, serving, status
from octavo.v1 import generation_pb2 as pb
from octavo.workload.job import Job
from octavo.workload.measures import Gaps

JOB = Job(0.0, 4, 12, n=2, priority=3, tenant="blue")


@pytest.fixture
def frontend() -> FakeFrontend:
    fake = FakeFrontend()
    fake.script = script("one ", "two ", "three")
    return fake


@pytest.fixture
def address(frontend: FakeFrontend) -> Iterator[str]:
    with serving(frontend) as address:
        yield address


@pytest.fixture
async def transport(address: str) -> AsyncIterator[GrpcTransport]:
    transport = GrpcTransport(ServerAddress("grpc", address), Asking(), Secrets("a-secret-key"))
    yield transport
    await transport.aclose()


async def ask(transport: GrpcTransport, job: Job = JOB) -> Record:
    record = Record(job, sent_s=0.0)
    async with asyncio.timeout(60):
        await transport.prepare(job, 0)(AnswerRecorder(record, Gaps(), asyncio.get_running_loop().time))
    return record


async def test_a_stream_is_counted(frontend: FakeFrontend, transport: GrpcTransport) -> None:
    assert await transport.open() == "m"
    record = await ask(transport)
    assert (record.num_tokens, record.prompt_tokens, record.deliveries) == (13, 3, 3)
    [request] = frontend.generated
    assert (request.model, len(request.token_ids.ids), request.sampling.num_sequences) == ("m", 4, 2)
    stopping = request.stopping
    assert (stopping.max_new_tokens, stopping.min_new_tokens, stopping.ignore_eos) == (12, 12, True)
    assert (request.scheduling.priority, request.scheduling.tenant) == (3, "blue")
    assert not request.scheduling.HasField("detach_grace")
    assert frontend.metadata["authorization"] == "Bearer a-secret-key"


async def test_a_beam_search_is_asked_for(frontend: FakeFrontend, transport: GrpcTransport) -> None:
    await ask(transport, Job(0.0, 4, 12, beam_width=4))
    [request] = frontend.generated
    assert (request.sampling.beam_search.beam_width, request.sampling.num_sequences) == (4, 1)
    assert not request.sampling.HasField("temperature")


async def test_a_refusal_is_counted_and_not_tried_again(frontend: FakeFrontend, transport: GrpcTransport) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    frontend.refusals.append((code, status(code, "QUEUE_FULL", retry_after_s=0.01)))
    with pytest.raises(Failure) as caught:
        await ask(transport)
    assert caught.value.kind == "RESOURCE_EXHAUSTED QUEUE_FULL"
    assert [name for name, _ in frontend.calls] == ["generate"]


async def test_a_stream_that_is_lost_is_counted_and_not_taken_up_again(
    frontend: FakeFrontend, transport: GrpcTransport
) -> None:
    frontend.losses.append(3)
    with pytest.raises(Failure, match="connection lost"):
        await ask(transport)
    assert [name for name, _ in frontend.calls] == ["generate"]


async def test_nobody_there_is_told_before_the_run_and_counted_in_it() -> None:
    transport = GrpcTransport(ServerAddress("grpc", free_address()), Asking(), Secrets())
    with pytest.raises(TargetError, match=r"cannot ask grpc://.*: nothing listens there.*For HTTP, write http://"):
        await transport.open()
    with pytest.raises(Failure, match="connection lost: nothing listens there"):
        await ask(transport)
    await transport.aclose()


async def test_what_is_no_octavo_server_is_said_to_be_none() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        target = ServerAddress("grpc", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        transport = GrpcTransport(target, Asking(), Secrets())
        with pytest.raises(TargetError) as caught:
            await transport.open()
        await transport.aclose()
    assert str(caught.value) == (
        f"cannot ask {target}: it answers in HTTP/1, not in gRPC: Octavo serves the two on different ports"
        " [UNAVAILABLE]. For HTTP, write http://HOST:PORT"
    )


class Suspicious(FakeFrontend):
    """It knows nobody."""

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")


async def test_a_key_that_is_missing_is_told() -> None:
    with serving(Suspicious()) as address:
        transport = GrpcTransport(ServerAddress("grpc", address), Asking(), Secrets())
        with pytest.raises(TargetError, match="asks for an API key; set OCTAVO_API_KEY"):
            await transport.open()
        await transport.aclose()


async def test_a_model_that_is_not_served_is_told_with_those_that_are(address: str) -> None:
    transport = GrpcTransport(ServerAddress("grpc", address), Asking(model="mine"), Secrets())
    with pytest.raises(TargetError, match="has no model 'mine'; it has m"):
        await transport.open()
    await transport.aclose()
