"""The Admin service and the commands about workers: a real server over a core that the test drives."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.duration_pb2 import Duration

from octavo.cli.main import main
from octavo.scheduler.core.events import ReplicaHeard, WorkerReadmitted
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.operated import admin_server
from octavo.v1 import admin_pb2 as pb

from ..conftest import Connect, MakeCluster

READY, CORDONED, DRAINING = pb.WORKER_STATE_READY, pb.WORKER_STATE_CORDONED, pb.WORKER_STATE_DRAINING


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """Two workers; a request runs on the first."""
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(make_request("r", 8, 100))
    cluster.step()
    cluster.join(2)
    return cluster


@pytest.fixture
async def operated(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """The same, where the commands look for their scheduler."""
    async with admin_server(cluster) as address:
        monkeypatch.setenv("OCTAVO_ADMIN_ADDRESS", address)
        yield cluster


async def run(*arguments: str) -> Result:
    """The server answers in this thread meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def output(*arguments: str) -> str:
    result = await run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


async def test_what_an_operator_does_shows_in_the_load(cluster: Cluster, connect: Connect) -> None:
    stub = await connect(cluster)

    async def states() -> dict[str, int]:
        load = await stub.GetLoad(pb.GetLoadRequest())
        assert [worker.world_size for worker in load.workers] == [1] * len(load.workers)
        return {worker.id: worker.state for worker in load.workers}

    assert await states() == {"worker-1": READY, "worker-2": READY}
    await stub.CordonWorker(pb.CordonWorkerRequest(worker_id="worker-2"))
    await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="worker-1"))
    assert await states() == {"worker-1": DRAINING, "worker-2": CORDONED}
    for worker_id in ("worker-1", "worker-2"):
        await stub.ReadmitWorker(pb.ReadmitWorkerRequest(worker_id=worker_id))
    assert await states() == {"worker-1": READY, "worker-2": READY}
    await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="worker-1", grace=Duration()))
    cluster.step()
    assert await states() == {"worker-2": READY}


@pytest.mark.parametrize("method", ["CordonWorker", "DrainWorker", "ReadmitWorker"])
async def test_an_unknown_worker_is_not_found(cluster: Cluster, connect: Connect, method: str) -> None:
    stub = await connect(cluster)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await getattr(stub, method)(getattr(pb, f"{method}Request")(worker_id="worker-3"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert error.value.details() == "no worker is called 'worker-3'; there are worker-1, worker-2"


async def test_what_makes_no_sense_is_refused(cluster: Cluster, connect: Connect) -> None:
    stub = await connect(cluster)

    async def objection(method: str, worker_id: str) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await getattr(stub, method)(getattr(pb, f"{method}Request")(worker_id=worker_id))
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        return error.value.details() or ""

    assert "gets requests already" in await objection("ReadmitWorker", "worker-1")
    cluster.handle(ReplicaHeard(1, draining=True))
    assert "was asked to end" in await objection("ReadmitWorker", "worker-1")
    await stub.CordonWorker(pb.CordonWorkerRequest(worker_id="worker-2"))
    cluster.leave(2)
    assert "is not there" in await objection("DrainWorker", "worker-2")
    await stub.ReadmitWorker(pb.ReadmitWorkerRequest(worker_id="worker-2"))


@pytest.mark.parametrize("seconds", [-1, 86_401])
async def test_a_grace_beyond_reason_is_refused(cluster: Cluster, connect: Connect, seconds: int) -> None:
    stub = await connect(cluster)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="worker-1", grace=Duration(seconds=seconds)))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokens_that_wait_are_counted(make_cluster: MakeCluster, connect: Connect) -> None:
    """Prompts, and what was generated before; sequences that are still equal count once."""
    cluster = make_cluster()
    stub = await connect(cluster)
    cluster.submit(make_request("a", 8, 4), make_request("b", 5, 4, num_sequences=3, temperature=1.0))
    assert (await stub.GetLoad(pb.GetLoadRequest())).waiting_tokens == 13
    cluster.join()
    cluster.step()
    assert (await stub.GetLoad(pb.GetLoadRequest())).waiting_tokens == 0
    cluster.leave(1)
    assert (await stub.GetLoad(pb.GetLoadRequest())).waiting_tokens == 9 + 3 * 6


async def test_workers_lists_them(operated: Cluster) -> None:
    await output("cordon", "worker-2")
    assert [line.split() for line in (await output("workers")).splitlines()] == [
        ["ID", "STATE", "DEVICE", "RANKS", "RUNNING", "SWAPPED", "BLOCKS-FREE", "BLOCKS", "TOKENS/S"],
        ["worker-1", "ready", "fake", "1", "1", "0", "61", "64", "0.0"],
        ["worker-2", "cordoned", "fake", "1", "0", "0", "64", "64", "0.0"],
    ]


async def test_cordon_readmit_and_drain_say_what_they_did(operated: Cluster) -> None:
    assert await output("cordon", "worker-2") == "cordoned worker-2\n"
    assert await output("readmit", "worker-2") == "readmitted worker-2\n"
    assert await output("drain", "worker-1", "--grace", "0.5") == "draining worker-1\n"
    assert operated.core.replicas[1].availability.drain_until == operated.now + 0.5
    result = await run("readmit", "worker-3")
    assert (result.exit_code, result.output) == (
        1,
        "Error: no worker is called 'worker-3'; there are worker-1, worker-2 [NOT_FOUND]\n",
    )


async def test_drain_waits_until_the_worker_is_let_go(operated: Cluster) -> None:
    waiting = asyncio.create_task(output("drain", "worker-1", "--grace", "0", "--wait"))
    while operated.core.replicas[1].availability.drain_until is None:
        await asyncio.sleep(0.01)
    assert not waiting.done()
    operated.step()
    operated.step()
    assert await waiting == "drained worker-1\n"


async def test_drain_says_if_the_worker_was_readmitted_meanwhile(operated: Cluster) -> None:
    waiting = asyncio.create_task(run("drain", "worker-1", "--wait"))
    while operated.core.replicas[1].availability.drain_until is None:
        await asyncio.sleep(0.01)
    # Not by a command: two at a time would take each other's output.
    operated.handle(WorkerReadmitted("worker-1"))
    result = await waiting
    assert result.exit_code == 1
    assert "worker-1 drains no more" in result.output
