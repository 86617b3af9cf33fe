"""A scheduler serves as long as steps come back, or there is nothing that could run; else its log, its metrics, its
health and its frontends say so."""

import tempfile
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.runtime.telemetry import optional
from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import (
    Event,
    LeaseRenewed,
    ReplicaHeard,
    ReplicaMovedOn,
    ReplicaStalled,
    Tick,
    WorkerCordoned,
    WorkerDrained,
)
from octavo.scheduler.core.explain import describe, explain
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.scheduler.server.admin_messages import write_load
from octavo.scheduler.server.admin_service import start_admin_server
from octavo.scheduler.server.event_log import StepFeed
from octavo.scheduler.server.health import SERVICE, HealthLoop, HealthServicer
from octavo.testing.cluster import FRONTEND, Cluster, make_request
from octavo.testing.operated import OperatedCluster
from octavo.testing.scenarios import drain, step_until
from octavo.v1.admin_pb2 import GetLoadResponse
from octavo.wire.requests import Lease, RejectReason, Renewed, StatusChanged

from ...conftest import MakeCluster

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """Steps of a known shape: these may take 2 s, of another 60 s."""
    cluster = make_cluster(watchdog_s=10.0)
    cluster.join()
    cluster.submit(make_request("known", 8, 4))
    cluster.run()
    return cluster


def stalls(cluster: Cluster) -> list[str]:
    return [str(stall) for stall in cluster.core.watchdog.stalls(cluster.now)]


def stalled_after(seconds: float, cluster: Cluster) -> list[str]:
    """What is said once so much time has passed in which nothing happened."""
    assert stalls(cluster) == []
    cluster.now += seconds
    return stalls(cluster)


def test_a_scheduler_without_work_may_rest_for_ever(cluster: Cluster) -> None:
    assert stalled_after(1e6, cluster) == []


def test_a_scheduler_without_workers_waits_for_them(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watchdog_s=10.0)
    cluster.submit(make_request("a", 8, 4))
    assert stalled_after(1e6, cluster) == []


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_work_without_an_answer_for_ten_seconds_is_a_stall(cluster: Cluster, where: str) -> None:
    cluster.now += 1e4
    cluster.submit(make_request("a", 8, 4))
    if where == "running":
        cluster.schedule()
    assert stalled_after(10.0, cluster) == []
    cluster.now += 0.1
    assert stalls(cluster) == ["worker worker-1 has work, and has answered no step for 10.1 s of 10.0 s"]


def test_an_answer_ends_a_stall(cluster: Cluster) -> None:
    cluster.submit(make_request("a", 8, 4))
    assert stalled_after(20.0, cluster)
    cluster.step()
    assert stalls(cluster) == []
    assert stalled_after(10.1, cluster)


def test_the_time_of_work_begins_when_it_comes(cluster: Cluster) -> None:
    cluster.submit(make_request("a", 8, 4))
    assert stalled_after(5.0, cluster) == []
    cluster.run()
    assert stalled_after(1e4, cluster) == []
    cluster.submit(make_request("b", 8, 4))
    assert stalled_after(9.9, cluster) == []


def test_a_step_that_may_take_long_is_given_three_times_as_long(make_cluster: MakeCluster) -> None:
    # The first of all.
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("long", 100, 4))
    cluster.schedule()
    assert stalled_after(179.0, cluster) == []
    cluster.now += 2
    assert stalls(cluster)


def test_what_fits_no_worker_that_is_left_waits_rightly(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, num_blocks=64, block_size=4)
    cluster.submit(make_request("large", 100, 4))
    cluster.join(2, num_blocks=8, block_size=4)
    cluster.leave(1)
    assert stalled_after(1e6, cluster) == []


def test_each_worker_is_looked_at_by_itself(make_cluster: MakeCluster) -> None:
    """One answers step after step, and the other is asked for none."""
    cluster = make_cluster(watchdog_s=10.0)
    cluster.join(2)
    cluster.submit(make_request("b", 8, 200))
    cluster.step()
    cluster.join(1)
    cluster.submit(make_request("a", 8, 200))
    cluster.step()
    still = cluster.core.replicas[2]
    assert still.running
    assert cluster.core.replicas[1].running
    drain(cluster)
    # It waits for the answer to a step that is not under way.
    still.restarts[still.running[0]] = (RejectReason.STEP_FAILED, "")
    for _ in range(12):
        assert stalls(cluster) == [] or cluster.now > still.steps.answered_at + 10.0
        cluster.now += 1.0
        cluster.step()
    assert [stall.replica for stall in cluster.core.watchdog.stalls(cluster.now)] == [still]


def test_what_a_worker_is_to_give_up_is_no_stall(cluster: Cluster) -> None:
    cluster.submit(make_request("a", 8, 40))
    cluster.step()
    drain(cluster)
    cluster.core.replicas[1].availability.is_paused = True
    assert stalled_after(1e6, cluster) == []


@pytest.mark.parametrize("state", ["cordoned", "draining"])
def test_what_waits_while_no_worker_takes_anything_new_waits_rightly(cluster: Cluster, state: str) -> None:
    events: dict[str, Event] = {"cordoned": WorkerCordoned("worker-1"), "draining": WorkerDrained("worker-1", 1e9)}
    cluster.submit(make_request("runs", 8, 200))
    cluster.step()
    cluster.handle(events[state])
    cluster.submit(make_request("waits", 8, 4))
    for _ in range(30):
        cluster.now += 1.0
        cluster.step()
        assert stalls(cluster) == []
    assert cluster.groups["waits"].status is SequenceStatus.WAITING


def test_what_only_a_busy_worker_could_hold_makes_no_other_a_stall(make_cluster: MakeCluster) -> None:
    """An idle worker that is too small for all that waits does nothing, and rightly."""
    cluster = make_cluster(watchdog_s=10.0, watermark=0.0)
    cluster.join(1, num_blocks=32, block_size=4)
    cluster.submit(make_request("runs", 60, 60), make_request("waits", 60, 60))
    cluster.step()
    cluster.join(2, num_blocks=8, block_size=4)
    for _ in range(30):
        cluster.now += 1.0
        cluster.step()
        assert stalls(cluster) == []
    assert not cluster.core.replicas[2].stats.steps


def test_a_prompt_that_lets_the_papers_policy_wait_is_no_stall(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watchdog_s=10.0, policy=Policy.PAPER, delay_factor=1e6, max_steps_in_flight=1)
    cluster.join(1)
    cluster.submit(make_request("runs", 8, 200))
    cluster.step()
    cluster.submit(make_request("waits", 8, 4))
    for _ in range(30):
        cluster.now += 1.0
        cluster.step()
        assert stalls(cluster) == []
    assert cluster.groups["waits"].status is SequenceStatus.WAITING


def wait(cluster: Cluster, seconds: int) -> None:
    """Time goes by in which the frontend and the workers are heard, and nothing is planned."""
    for _ in range(seconds):
        cluster.now += 1.0
        cluster.handle(LeaseRenewed(FRONTEND, [Lease(name, 1) for name in cluster.groups]))
        for incarnation in list(cluster.replicas):
            cluster.handle(ReplicaHeard(incarnation))
        cluster.handle(Tick())


def test_is_told_once_to_the_shell_and_to_every_frontend(cluster: Cluster) -> None:
    cluster.submit(make_request("a", 8, 4))
    wait(cluster, 10)
    assert cluster.standstills == []
    cluster.to_frontend.clear()
    wait(cluster, 5)
    reason = "worker worker-1 has work, and has answered no step for 11.0 s of 10.0 s"
    assert cluster.standstills == [ReplicaStalled(1, "a", reason)]
    changes = [message for message in cluster.to_frontend if isinstance(message, StatusChanged)]
    assert [message.status.stalled for message in changes] == [True]
    assert isinstance(cluster.to_frontend[-1], Renewed)
    assert cluster.to_frontend[-1].status.stalled
    cluster.step()
    wait(cluster, 1)
    assert cluster.standstills[1:] == [ReplicaMovedOn(1, "worker-1")]
    assert not cluster.core.status().stalled


def test_a_worker_that_is_free_for_new_requests_keeps_the_cell_ready(cluster: Cluster) -> None:
    cluster.submit(make_request("a", 8, 4))
    cluster.schedule()
    drain(cluster)
    wait(cluster, 12)
    assert cluster.core.status().stalled
    cluster.join(2)
    assert not cluster.core.status().stalled
    cluster.handle(WorkerCordoned("worker-2"))
    assert cluster.core.status().stalled
    cluster.leave(1)
    assert not cluster.core.status().stalled


def test_a_line_of_a_log_says_where_a_request_is_and_what_keeps_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1, preemption=Preemption.SWAP)
    cluster.join(num_blocks=10, block_size=2, num_cpu_blocks=10)
    cluster.submit(make_request("old", 4, 16), make_request("young", 4, 16))
    step_until(cluster, lambda: bool(cluster.core.replicas[1].swapped))
    [explanation] = explain(cluster.core.state, cluster.core.policy, "young", cluster.now)
    line = describe(explanation)
    assert line.startswith("young is swapped on worker-1; steps under way with it: none; what keeps it: kv_blocks (")
    [explanation] = explain(cluster.core.state, cluster.core.policy, "old", cluster.now)
    assert describe(explanation).startswith("old is running on worker-1; steps under way with it: none")


async def test_health_and_books_follow_the_core(cluster: Cluster) -> None:
    published: list[GetLoadResponse] = []
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        address, shell, servicer = f"unix:{directory}/admin.sock", OperatedCluster(cluster), HealthServicer()
        health_loop = HealthLoop(
            cluster.core, shell.now, servicer, lambda: published.append(write_load(cluster.core, 0))
        )
        server = await start_admin_server(shell, StepFeed(), address, servicer)
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)

                async def told() -> set[int]:
                    await health_loop.look()
                    requests = (health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE))
                    return {(await stub.Check(request, timeout=60)).status for request in requests}

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

    def publish() -> None:
        raise ValueError("a fault of whoever tells them")

    servicer = HealthServicer()
    health_loop = HealthLoop(cluster.core, lambda: cluster.now, servicer, publish)
    for _ in range(3):
        await health_loop.look()
    assert caplog.messages == ["metrics: a fault of whoever tells them; the numbers stay as they were"]
    answer = await servicer.Check(health_pb2.HealthCheckRequest(service=SERVICE), None)
    assert answer.status == SERVING
