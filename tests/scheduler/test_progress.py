"""A scheduler serves as long as steps come back, or there is nothing that could run; and its health says so."""

import tempfile
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.scheduler.admin import SERVICE, HealthServicer, start_admin_server
from octavo.scheduler.progress import Progress
from octavo.scheduler.step_feed import StepFeed
from octavo.scheduler.vitals import Vitals
from octavo.telemetry import optional
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.operated import OperatedCluster
from octavo.v1.admin_pb2 import GetLoadResponse

from .conftest import MakeCluster

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """Steps of a known shape: these may take 2 s, of another 60 s."""
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("known", 8, 4))
    cluster.run()
    return cluster


@pytest.fixture
def progress() -> Progress:
    return Progress()


def stalled_after(seconds: float, cluster: Cluster, progress: Progress) -> str | None:
    """What is said once so much time has passed in which nothing happened."""
    assert progress.stalled(cluster.core, cluster.now) is None
    cluster.now += seconds
    return progress.stalled(cluster.core, cluster.now)


def test_a_scheduler_without_work_may_rest_for_ever(cluster: Cluster, progress: Progress) -> None:
    assert stalled_after(1e6, cluster, progress) is None


def test_a_scheduler_without_workers_waits_for_them(make_cluster: MakeCluster, progress: Progress) -> None:
    cluster = make_cluster()
    cluster.submit(make_request("a", 8, 4))
    assert stalled_after(1e6, cluster, progress) is None


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_work_without_an_answer_for_ten_seconds_is_a_stall(cluster: Cluster, progress: Progress, where: str) -> None:
    cluster.now += 1e4
    cluster.submit(make_request("a", 8, 4))
    if where == "running":
        cluster.schedule()
    assert stalled_after(10.0, cluster, progress) is None
    cluster.now += 0.1
    assert progress.stalled(cluster.core, cluster.now) == (
        "there is work, and no step was answered for 10.1 s of 10.0 s"
    )


def test_an_answer_ends_a_stall(cluster: Cluster, progress: Progress) -> None:
    cluster.submit(make_request("a", 8, 4))
    assert stalled_after(20.0, cluster, progress)
    cluster.step()
    assert progress.stalled(cluster.core, cluster.now) is None
    assert stalled_after(10.1, cluster, progress)


def test_the_time_of_work_begins_when_it_comes(cluster: Cluster, progress: Progress) -> None:
    cluster.submit(make_request("a", 8, 4))
    assert stalled_after(5.0, cluster, progress) is None
    cluster.run()
    assert stalled_after(1e4, cluster, progress) is None
    cluster.submit(make_request("b", 8, 4))
    assert stalled_after(9.9, cluster, progress) is None


def test_a_step_that_may_take_long_is_given_three_times_as_long(make_cluster: MakeCluster, progress: Progress) -> None:
    # The first of all.
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("long", 100, 4))
    cluster.schedule()
    assert stalled_after(179.0, cluster, progress) is None
    cluster.now += 2
    assert progress.stalled(cluster.core, cluster.now)


def test_what_fits_no_worker_that_is_left_waits_rightly(make_cluster: MakeCluster, progress: Progress) -> None:
    cluster = make_cluster()
    cluster.join(1, num_blocks=64, block_size=4)
    cluster.submit(make_request("large", 100, 4))
    cluster.join(2, num_blocks=8, block_size=4)
    cluster.leave(1)
    assert stalled_after(1e6, cluster, progress) is None


async def test_health_and_books_follow_the_core(cluster: Cluster) -> None:
    published: list[GetLoadResponse] = []
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        address, shell, servicer = f"unix:{directory}/admin.sock", OperatedCluster(cluster), HealthServicer()
        vitals = Vitals(shell, servicer, published.append)
        server = await start_admin_server(shell, StepFeed(), address, servicer)
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)

                async def told() -> set[int]:
                    await vitals.look()
                    requests = (health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE))
                    return {(await stub.Check(request, timeout=5)).status for request in requests}

                assert await told() == {SERVING}
                cluster.submit(make_request("a", 8, 4))
                assert await told() == {SERVING}
                cluster.now += 11
                assert await told() == {NOT_SERVING}
                cluster.step()
                assert await told() == {SERVING}
        finally:
            await server.stop(None)
    assert [(load.waiting, load.running) for load in published] == [(0, 0), (1, 0), (1, 0), (0, 1)]


async def test_books_that_cannot_be_told_do_not_end_the_service(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "_failing", set())

    def publish(load: GetLoadResponse) -> None:
        raise ValueError("a fault of whoever tells them")

    servicer = HealthServicer()
    vitals = Vitals(OperatedCluster(cluster), servicer, publish)
    for _ in range(3):
        await vitals.look()
    assert caplog.messages == ["metrics: a fault of whoever tells them; the numbers stay as they were"]
    answer = await servicer.Check(health_pb2.HealthCheckRequest(service=SERVICE), None)
    assert answer.status == SERVING
