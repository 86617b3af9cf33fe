"""The shell over real sockets: who is known, what is stale, and what garbage costs."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.runtime.transport.wakeup import Wakeup
from octavo.scheduler.core.config import Preemption, SchedulerConfig
from octavo.scheduler.core.events import PrefixPinned, PrefixUnpinned
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.admin_service import start_admin_server
from octavo.scheduler.server.event_log import Handled, Record, StepFeed, log_file, read_records, recorder, replay
from octavo.scheduler.server.health import SERVICE
from octavo.scheduler.server.loop import SchedulerShell
from octavo.testing.cluster import FakeReplica, make_request, reference_tokens, write_fake_model
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.base import OLDEST_SCHEMA_VERSION, SCHEMA_VERSION, Message
from octavo.wire.codec import decode_to_frontend, decode_to_worker, encode
from octavo.wire.costs import StepCosts
from octavo.wire.requests import (
    Abort,
    Deltas,
    EndSequence,
    FrontendHello,
    FrontendWelcome,
    Lease,
    Notices,
    PinPrefixes,
    Prefix,
    PrefixesChanged,
    Refused,
    Renew,
    Renewed,
    StatusChanged,
    Submit,
    ToFrontend,
    Unregistered,
)
from octavo.wire.steps import (
    FailureReason,
    Heartbeat,
    SequenceFailure,
    StepPlan,
    ToWorker,
    WorkerDismissed,
    WorkerGoodbye,
    WorkerRefused,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.wire.versions import encode_for
from octavo.worker.fake.runner import FAKE_COSTS, FakeRunner

EPOCH = 4711
_PATIENCE_S = 60.0


class Service:
    """A shell that runs in this test's event loop, with sockets to reach it."""

    def __init__(self, directory: Path, context: zmq.asyncio.Context) -> None:
        self.frontend_endpoint = f"ipc://{directory}/frontends.sock"
        self.worker_endpoint = f"ipc://{directory}/workers.sock"
        self.admin_address = f"unix:{directory}/admin.sock"
        self._sync: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self.feed = StepFeed()
        self._departure = Wakeup()
        self.shell = SchedulerShell(
            Scheduler(SchedulerConfig(), EPOCH),
            bind_router(self._sync, self.frontend_endpoint),
            bind_router(self._sync, self.worker_endpoint, on_disconnect=self._departure.ring),
            recorder(self.feed.append),
            departure=self._departure,
        )
        self._context = context
        self._sockets: list[zmq.asyncio.Socket] = []

    def frontend(self) -> zmq.asyncio.Socket:
        return self._connect(self.frontend_endpoint)

    def worker(self) -> zmq.asyncio.Socket:
        return self._connect(self.worker_endpoint)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self.admin_address) as channel:
            yield admin_pb2_grpc.AdminServiceStub(channel)

    async def load(self) -> admin_pb2.GetLoadResponse:
        async with self.admin() as stub:
            load: admin_pb2.GetLoadResponse = await stub.GetLoad(admin_pb2.GetLoadRequest())
            return load

    def _connect(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = connect_dealer(self._context, endpoint)
        self._sockets.append(socket)
        return socket

    def close(self) -> None:
        for socket in (*self._sockets, self.shell._frontends.socket, self.shell._workers.socket):
            socket.close()
        self._departure.close()


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


@pytest.fixture
async def service(tmp_path: Path, context: zmq.asyncio.Context) -> AsyncIterator[Service]:
    service = Service(tmp_path, context)
    server = await start_admin_server(service.shell, service.feed, service.admin_address)
    running = asyncio.create_task(service.shell.run())
    yield service
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await server.stop(None)
    service.close()


async def send(socket: zmq.asyncio.Socket, message: Message) -> None:
    await asyncio.wait_for(socket.send(encode(message)), _PATIENCE_S)


async def to_frontend(socket: zmq.asyncio.Socket) -> ToFrontend:
    return decode_to_frontend(await asyncio.wait_for(socket.recv(), _PATIENCE_S))


async def answer(socket: zmq.asyncio.Socket) -> ToFrontend:
    """What a frontend hears next but for news, which come with whatever turn or tick has them."""
    while isinstance(message := await to_frontend(socket), Notices | StatusChanged):
        pass
    return message


async def to_worker(socket: zmq.asyncio.Socket) -> ToWorker:
    return decode_to_worker(await asyncio.wait_for(socket.recv(), _PATIENCE_S))


@pytest.fixture
def replica(tmp_path: Path) -> FakeReplica:
    model = write_fake_model(tmp_path / "model")
    return FakeReplica(FakeRunner(model, block_size=4, num_blocks=64, num_cpu_blocks=0), 5)


async def greet(socket: zmq.asyncio.Socket) -> FrontendWelcome:
    """A frontend says hello, and hears what it must know."""
    await send(socket, FrontendHello(SCHEMA_VERSION, 1))
    welcome = await answer(socket)
    assert isinstance(welcome, FrontendWelcome)
    assert isinstance(await answer(socket), PrefixesChanged)
    return welcome


async def join(socket: zmq.asyncio.Socket, replica: FakeReplica) -> None:
    await send(socket, replica.hello)
    assert await to_worker(socket) == WorkerWelcome(EPOCH)


async def serve_plans(socket: zmq.asyncio.Socket, replica: FakeReplica) -> None:
    while True:
        message = decode_to_worker(await socket.recv())
        if isinstance(message, StepPlan):
            replica.take(message)
            await send(socket, msgspec.structs.replace(replica.execute(), epoch=EPOCH))


async def test_a_request_streams_through_the_shell(service: Service, replica: FakeReplica) -> None:
    frontend, worker = service.frontend(), service.worker()
    await greet(frontend)
    await join(worker, replica)
    assert isinstance(await to_frontend(frontend), StatusChanged)
    serving = asyncio.create_task(serve_plans(worker, replica))
    request = make_request("r", 6, max_tokens=9)
    await send(frontend, Submit(EPOCH, request))
    tokens: list[int] = []
    while len(tokens) < 9:
        message = await answer(frontend)
        assert isinstance(message, Deltas)
        tokens += [token for delta in message.deltas for token in delta.token_ids]
    serving.cancel()
    assert tokens == reference_tokens(request)
    load = await service.load()
    assert (load.workers[0].blocks_free, load.workers[0].tokens_sampled, load.running) == (64, 9, 0)


@pytest.mark.parametrize(
    "message",
    [
        Submit(EPOCH, make_request("r", 3, 3)),
        Renew(EPOCH, []),
        Abort(EPOCH, ["r"]),
        EndSequence(EPOCH, "r", 1, 0),
        PinPrefixes(EPOCH, [Prefix("name", [1])]),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_a_frontend_that_said_no_hello_is_told_so(service: Service, message: Message) -> None:
    frontend = service.frontend()
    await send(frontend, message)
    assert await to_frontend(frontend) == Unregistered(EPOCH)
    assert not service.shell.core.groups


async def test_a_frontend_that_asks_what_is_pinned_has_not_joined_anew(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    frontend = service.frontend()
    for _ in range(3):
        await greet(frontend)
    assert sum("joined" in record.getMessage() for record in caplog.records) == 1


async def test_what_a_frontend_ends_and_pins_reaches_the_core(service: Service) -> None:
    frontend, prefix = service.frontend(), Prefix("name", [1, 2, 3])
    await greet(frontend)
    await send(frontend, PinPrefixes(EPOCH, [prefix]))
    assert await answer(frontend) == PrefixesChanged(EPOCH, [prefix])
    assert isinstance(await to_frontend(frontend), StatusChanged)
    await send(frontend, Submit(EPOCH, make_request("r", 3, 3, num_sequences=2)))
    await send(frontend, EndSequence(EPOCH, "r", 1, 1))
    await send(frontend, Renew(EPOCH, [Lease("r", 1)]))
    assert isinstance(await answer(frontend), Renewed)
    (group,) = service.shell.core.groups
    assert [sequence.index for sequence in group.live] == [0]


async def test_a_message_of_another_epoch_is_told_the_current_one(service: Service) -> None:
    frontend = service.frontend()
    await greet(frontend)
    await send(frontend, Submit(EPOCH + 1, make_request("r", 3, 3)))
    assert await to_frontend(frontend) == Unregistered(EPOCH)
    assert not service.shell.core.groups


async def test_a_frontend_that_reconnects_keeps_its_requests(service: Service) -> None:
    first, second = service.frontend(), service.frontend()
    await greet(first)
    await send(first, Submit(EPOCH, make_request("r", 3, 3)))
    await send(first, Renew(EPOCH, [Lease("r", 1)]))
    assert isinstance(await answer(first), Renewed)
    first.close()
    await greet(second)
    await send(second, Renew(EPOCH, [Lease("r", 1)]))
    renewed = await answer(second)
    assert isinstance(renewed, Renewed)
    assert renewed.unknown == []
    assert [group.request.request_id for group in service.shell.core.groups] == ["r"]


@pytest.mark.parametrize(("epoch", "incarnation"), [(EPOCH + 1, 5), (EPOCH, 6)])
async def test_a_stale_worker_is_told_to_register_anew(
    service: Service, replica: FakeReplica, epoch: int, incarnation: int
) -> None:
    worker = service.worker()
    await join(worker, replica)
    await send(worker, Heartbeat(epoch, incarnation, 0))
    assert await to_worker(worker) == WorkerUnregistered(EPOCH)


async def test_another_connection_cannot_speak_for_a_worker(service: Service, replica: FakeReplica) -> None:
    worker, impostor = service.worker(), service.worker()
    await join(worker, replica)
    await send(impostor, Heartbeat(EPOCH, 5, 0))
    assert await to_worker(impostor) == WorkerUnregistered(EPOCH)
    assert list(service.shell.core.replicas) == [5]


async def test_a_second_worker_of_the_same_name_waits_until_the_first_is_gone(
    service: Service, replica: FakeReplica
) -> None:
    first, second = service.worker(), service.worker()
    await join(first, replica)
    rival = msgspec.structs.replace(replica.hello, incarnation=6)
    await send(second, rival)
    # The scheduler looked whether the first one lives, and answered the second nothing.
    assert await to_worker(first) == WorkerWelcome(EPOCH)
    assert list(service.shell.core.replicas) == [5]
    first.close()
    while 6 not in service.shell.core.replicas:
        await send(second, rival)
        await asyncio.sleep(0.01)
    assert list(service.shell.core.replicas) == [6]
    assert await to_worker(second) == WorkerWelcome(EPOCH)


async def test_a_worker_that_registers_anew_on_its_connection_replaces_itself(
    service: Service, replica: FakeReplica
) -> None:
    worker = service.worker()
    await join(worker, replica)
    await send(worker, msgspec.structs.replace(replica.hello, incarnation=6))
    assert await to_worker(worker) == WorkerWelcome(EPOCH)
    assert list(service.shell.core.replicas) == [6]


async def test_a_hello_of_a_life_that_is_over_takes_no_connection_from_the_present_one(
    service: Service, replica: FakeReplica
) -> None:
    worker = service.worker()
    await join(worker, replica)
    present = msgspec.structs.replace(replica.hello, incarnation=6)
    for late_or_not in (present, replica.hello, present):
        await send(worker, late_or_not)
        await send(worker, Heartbeat(EPOCH, 6, 0))
        assert await to_worker(worker) == WorkerWelcome(EPOCH)
    assert list(service.shell.core.replicas) == [6]


async def test_a_worker_whose_connection_ends_in_a_step_is_lost_at_once(
    service: Service, replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step of a shape has a minute, and what computes says nothing."""
    frontend, worker, other = service.frontend(), service.worker(), service.worker()
    await greet(frontend)
    await join(worker, replica)
    await send(frontend, Submit(EPOCH, make_request("r", 6, max_tokens=9)))
    while not isinstance(await to_worker(worker), StepPlan):
        pass
    await join(other, FakeReplica(replica.runner, 6))
    worker.close()
    async with asyncio.timeout(_PATIENCE_S):
        while not isinstance(message := await to_worker(other), StepPlan):
            assert message == WorkerWelcome(EPOCH), "it was looked whether this one is there"
    assert list(service.shell.core.replicas) == [6]
    assert "worker worker-5 lost (unreachable): its connection has ended" in caplog.text


async def test_a_worker_that_says_goodbye_and_goes_has_not_died(
    service: Service, replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    worker = service.worker()
    await join(worker, replica)
    await send(worker, WorkerGoodbye(EPOCH, 5))
    worker.close(linger=1000)
    while service.shell.core.replicas:
        await asyncio.sleep(0.01)
    assert "worker worker-5 lost (goodbye): said goodbye" in caplog.text


async def test_a_worker_that_is_to_end_is_dismissed_once_it_holds_nothing(
    service: Service, replica: FakeReplica
) -> None:
    frontend, worker = service.frontend(), service.worker()
    await greet(frontend)
    await join(worker, replica)
    await send(frontend, Submit(EPOCH, make_request("r", 6, max_tokens=9)))
    results, message = 0, await to_worker(worker)
    await send(worker, Heartbeat(EPOCH, 5, 0, draining=True))
    while isinstance(message, StepPlan):
        replica.take(message)
        await send(worker, msgspec.structs.replace(replica.execute(), epoch=EPOCH))
        results, message = results + 1, await to_worker(worker)
    assert (message, results) == (WorkerDismissed(EPOCH), 9)
    assert not service.shell.core.replicas
    await send(worker, Heartbeat(EPOCH, 5, 9, draining=True))
    assert await to_worker(worker) == WorkerUnregistered(EPOCH)


async def test_another_schema_version_is_refused_by_name(service: Service, replica: FakeReplica) -> None:
    frontend, worker = service.frontend(), service.worker()
    await send(frontend, FrontendHello(SCHEMA_VERSION + 1, 1))
    refused = await to_frontend(frontend)
    assert isinstance(refused, Refused)
    assert f"schema {SCHEMA_VERSION + 1}" in refused.detail
    await send(worker, msgspec.structs.replace(replica.hello, schema_version=SCHEMA_VERSION + 1))
    assert isinstance(await to_worker(worker), WorkerRefused)
    assert not service.shell.core.replicas


async def test_peers_of_the_schema_before_are_served(service: Service, replica: FakeReplica) -> None:
    frontend, worker = service.frontend(), service.worker()
    await send(frontend, FrontendHello(OLDEST_SCHEMA_VERSION, 1))
    frame = await asyncio.wait_for(frontend.recv(), _PATIENCE_S)
    welcome = decode_to_frontend(frame)
    assert isinstance(welcome, FrontendWelcome)
    assert frame == encode_for(welcome, OLDEST_SCHEMA_VERSION)
    await send(worker, msgspec.structs.replace(replica.hello, schema_version=OLDEST_SCHEMA_VERSION))
    assert isinstance(await to_worker(worker), WorkerWelcome)
    assert len(service.shell.core.replicas) == 1


async def test_a_newer_hello_is_refused_though_it_holds_what_nobody_here_knows(service: Service) -> None:
    frontend, worker = service.frontend(), service.worker()
    await frontend.send(msgspec.msgpack.encode(["FrontendHello", SCHEMA_VERSION + 1, 1, "unheard of"]))
    refused = await to_frontend(frontend)
    assert isinstance(refused, Refused)
    assert "upgrade the scheduler first" in refused.detail
    await worker.send(msgspec.msgpack.encode(["WorkerHello", SCHEMA_VERSION + 1]))
    assert isinstance(await to_worker(worker), WorkerRefused)


async def test_garbage_on_either_socket_is_counted_and_harms_nobody(service: Service, replica: FakeReplica) -> None:
    frontend, worker = service.frontend(), service.worker()
    for socket in (frontend, worker):
        await socket.send(b"\xc1 garbage")
        await socket.send_multipart([b"too", b"many", b"frames"])
        await socket.send(b"")
    await join(worker, replica)
    assert (await greet(frontend)).status.replicas == 1
    assert (await service.load()).dropped_messages == 6


async def written_down(feed: StepFeed) -> list[Record]:
    """All that the shell has recorded so far."""
    file = io.BytesIO()
    append = log_file(file)
    async with aclosing(feed.follow(1)) as entries:
        for _ in range(feed.last):
            append((await anext(entries)).record)
    file.seek(0)
    return list(read_records(file))


async def test_what_an_operator_pins_is_told_and_computed_and_written_down(
    service: Service, replica: FakeReplica
) -> None:
    frontend, worker = service.frontend(), service.worker()
    await greet(frontend)
    await join(worker, replica)
    serving = asyncio.create_task(serve_plans(worker, replica))
    async with service.admin() as stub, asyncio.timeout(_PATIENCE_S):
        await stub.PinPrefix(admin_pb2.PinPrefixRequest(name="a", token_ids=range(8)))
        while not isinstance(told := await to_frontend(frontend), PrefixesChanged):
            pass
        while not (await stub.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes[0].ready_worker_ids:
            await asyncio.sleep(0.005)
        await stub.UnpinPrefix(admin_pb2.UnpinPrefixRequest(name="a"))
    serving.cancel()
    assert told.prefixes == [Prefix("a", list(range(8)))]
    records = await written_down(service.feed)
    events = [entry.event for entry in records if isinstance(entry, Handled)]
    assert {PrefixPinned, PrefixUnpinned} <= set(map(type, events))
    result = replay(iter(records))
    assert (result.plans, result.difference) == (1, None)


async def test_a_prefix_that_a_worker_gives_up_is_written_to_the_log(
    service: Service, replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    frontend, worker = service.frontend(), service.worker()
    await greet(frontend)
    await join(worker, replica)
    await send(frontend, PinPrefixes(EPOCH, [Prefix("system", list(range(8)))]))
    plan = await to_worker(worker)
    assert isinstance(plan, StepPlan)
    replica.take(plan)
    failed = [SequenceFailure(plan.work[0].sequence_id, FailureReason.NOT_FINITE, "NaN")]
    await send(worker, msgspec.structs.replace(replica.execute(), epoch=EPOCH, sampled=[], failed=failed))
    await send(worker, Heartbeat(EPOCH + 1, 5, 1))
    assert isinstance(await to_worker(worker), WorkerUnregistered)
    assert "replica 0000000000000005 goes on without the pinned prefix 'system': NaN" in caplog.text


@pytest.mark.parametrize(
    ("preemption", "num_cpu_blocks", "costs", "warned"),
    [
        (Preemption.MEASURED, 8, None, True),
        (Preemption.MEASURED, 8, FAKE_COSTS, False),
        (Preemption.MEASURED, 0, None, False),
        (Preemption.AUTO, 8, None, False),
    ],
)
async def test_a_worker_without_costs_is_written_to_the_log_once_where_they_are_wanted(
    service: Service,
    replica: FakeReplica,
    caplog: pytest.LogCaptureFixture,
    preemption: Preemption,
    num_cpu_blocks: int,
    costs: StepCosts | None,
    warned: bool,
) -> None:
    service.shell.core.config = SchedulerConfig(preemption=preemption)
    replica.hello = msgspec.structs.replace(replica.hello, num_cpu_blocks=num_cpu_blocks, costs=costs)
    worker = service.worker()
    await join(worker, replica)
    await join(worker, replica)
    assert caplog.text.count("worker-5 has not measured its costs: preemption there is as with auto") == warned


async def test_health_and_admin_answer_on_the_same_address(service: Service) -> None:
    async with grpc.aio.insecure_channel(service.admin_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await service.load()).frontends == 0
