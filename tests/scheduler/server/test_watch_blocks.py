"""The live view of all blocks, as an operator's tools meet it."""

import asyncio
from typing import Any

import grpc
import pytest

from octavo.scheduler.core.events import PrefixPinned
from octavo.scheduler.server.admin_messages import write_load
from octavo.testing.cluster import Cluster, make_request
from octavo.v1 import admin_pb2 as pb
from octavo.wire.requests import Prefix

from ..conftest import Connect, MakeCluster

_PATIENCE_S = 60.0


async def read(call: Any) -> pb.WatchBlocksResponse:
    response: pb.WatchBlocksResponse = await asyncio.wait_for(call.read(), _PATIENCE_S)
    return response


def busy(make_cluster: MakeCluster) -> Cluster:
    cluster = make_cluster(max_num_seqs=3, max_steps_in_flight=1)
    cluster.join(1, num_blocks=40)
    cluster.join(2, num_blocks=20, num_cpu_blocks=5)
    cluster.handle(PrefixPinned(Prefix("system", list(range(8)))))
    cluster.step()
    for i in range(8):
        cluster.submit(make_request(f"r{i}", 9, max_tokens=30))
    cluster.step()
    return cluster


async def test_an_answer_shows_every_block_of_every_worker(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = busy(make_cluster)
    stub = await connect(cluster)
    answer = await read(stub.WatchBlocks(pb.WatchBlocksRequest()))
    assert answer.load == await stub.GetLoad(pb.GetLoadRequest())
    assert list(answer.requests) == list((await stub.ListRequests(pb.ListRequestsRequest())).requests)
    assert [worker.worker_id for worker in answer.workers] == ["worker-1", "worker-2"]
    assert [(len(worker.states), len(worker.cpu_states)) for worker in answer.workers] == [(40, 0), (20, 5)]
    for worker, load in zip(answer.workers, answer.load.workers, strict=True):
        assert worker.states.count(pb.BLOCK_STATE_PINNED) == load.blocks_pinned == 2
        free = worker.states.count(pb.BLOCK_STATE_FREE) + worker.states.count(pb.BLOCK_STATE_CACHED)
        assert free == load.blocks_free
        assert {owner.WhichOneof("owner") for owner in worker.owners} == {"request_id", "prefix_name"}
        held = {block_id for owner in worker.owners for block_id in owner.block_ids}
        assert all(worker.states[block_id] not in (pb.BLOCK_STATE_FREE, pb.BLOCK_STATE_CACHED) for block_id in held)
        assert len(held) == len(worker.states) - free
    running = {owner.request_id for worker in answer.workers for owner in worker.owners} - {""}
    assert running == {each.request_id for each in answer.requests if each.state == pb.REQUEST_STATE_RUNNING}


async def test_answers_follow_what_happens(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster()
    stub = await connect(cluster)
    call = stub.WatchBlocks(pb.WatchBlocksRequest(interval_ms=100))
    assert not (await read(call)).workers
    cluster.join(num_blocks=7)
    while not (answer := await read(call)).workers:
        pass
    assert answer.workers[0].states == bytes([pb.BLOCK_STATE_FREE]) * 7
    call.cancel()


async def test_under_load_all_readers_together_are_told_less_often(
    make_cluster: MakeCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a reading takes a hundredth of the time, nobody takes another, whatever the interval."""
    cluster = make_cluster()
    count = 0

    def slow(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        cluster.now += 0.002
        return write_load(*arguments)

    monkeypatch.setattr("octavo.scheduler.server.admin_service.write_load", slow)
    stub = await connect(cluster)
    first, second = (stub.WatchBlocks(pb.WatchBlocksRequest(interval_ms=100)) for _ in range(2))
    assert await read(first) == await read(second)
    assert count == 1
    cluster.now += 0.3
    # What was read before may have been sent again meanwhile.
    while count == 1:
        await read(first)
    assert count == 2


async def test_the_first_thousand_requests_are_shown(make_cluster: MakeCluster, connect: Connect) -> None:
    cluster = make_cluster(max_waiting=2000)
    cluster.submit(*(make_request(f"r{i}", 1, max_tokens=1) for i in range(1001)))
    stub = await connect(cluster)
    answer = await read(stub.WatchBlocks(pb.WatchBlocksRequest()))
    assert [each.request_id for each in answer.requests] == [f"r{i}" for i in range(1000)]


@pytest.mark.parametrize("interval_ms", [1, 99, 60_001, 2**32 - 1])
async def test_an_interval_out_of_range_is_refused(
    make_cluster: MakeCluster, connect: Connect, interval_ms: int
) -> None:
    stub = await connect(make_cluster())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read(stub.WatchBlocks(pb.WatchBlocksRequest(interval_ms=interval_ms)))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"interval_ms is {interval_ms}; use 100 to 60000" in (error.value.details() or "")


@pytest.mark.parametrize("interval_ms", [0, 100, 60_000])
async def test_the_ends_of_the_range_are_taken(make_cluster: MakeCluster, connect: Connect, interval_ms: int) -> None:
    stub = await connect(make_cluster())
    await read(stub.WatchBlocks(pb.WatchBlocksRequest(interval_ms=interval_ms)))
