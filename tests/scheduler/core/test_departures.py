"""Workers that get no new requests: cordoned until readmitted, or drained until they hold none."""

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import (
    LossCause,
    PrefixPinned,
    ReplicaHeard,
    ReplicaLeft,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.replica import ReplicaState
from octavo.testing.cluster import Cluster, FakeReplica, make_request, reference_tokens
from octavo.testing.scenarios import answer, ids, step_until
from octavo.wire.requests import NoticeKind, Prefix, Request
from octavo.wire.steps import StepPlan, WorkerDismissed

from ..conftest import MakeCluster


def held_by(cluster: Cluster, incarnation: int) -> list[str]:
    return sorted(ids(cluster.core.replicas[incarnation].requests))


def drain(cluster: Cluster, incarnation: int = 1, grace_s: float | None = None) -> None:
    cluster.handle(WorkerDrained(f"worker-{incarnation}", grace_s))


def is_dismissed(replica: FakeReplica) -> bool:
    return any(isinstance(message, WorkerDismissed) for message in replica.received)


def running_on_one_of_two(make_cluster: MakeCluster, *requests: Request, num_blocks: int = 64) -> Cluster:
    """All requests run on worker-1; worker-2, of `num_blocks`, has just come."""
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(*requests)
    cluster.step()
    cluster.join(2, num_blocks=num_blocks)
    return cluster


# -- cordon ------------------------------------------------------------------------------------------------------------


def test_a_cordoned_worker_finishes_what_it_has_and_gets_nothing_new(make_cluster: MakeCluster) -> None:
    cluster = running_on_one_of_two(make_cluster, make_request("old", 8, 20))
    cluster.handle(WorkerCordoned("worker-1"))
    cluster.submit(*(make_request(f"new{i}", 8, 4) for i in range(4)))
    cluster.step()
    assert (held_by(cluster, 1), held_by(cluster, 2)) == (["old"], ["new0", "new1", "new2", "new3"])
    cluster.run()
    assert set(cluster.core.replicas) == {1, 2}


def test_a_cordon_outlives_the_registration(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.handle(WorkerCordoned("worker-1"))
    cluster.leave(1)
    cluster.join(2, worker_id="worker-1")
    cluster.submit(request := make_request("r", 8, 4))
    cluster.step()
    assert list(cluster.core.waiting) == cluster.core.groups
    cluster.handle(WorkerReadmitted("worker-1"))
    cluster.run()
    assert cluster.tokens["r"] == reference_tokens(request)


def test_a_request_that_only_a_cordoned_worker_could_hold_waits_for_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, num_blocks=64)
    cluster.join(2, num_blocks=8)
    cluster.handle(WorkerCordoned("worker-1"))
    cluster.submit(make_request("large", 100, 4), make_request("small", 8, 4))
    step_until(cluster, lambda: "small" in cluster.finished)
    assert not cluster.rejected
    assert list(cluster.groups) == ["large"]
    cluster.handle(WorkerReadmitted("worker-1"))
    cluster.run()
    assert "large" in cluster.finished


@pytest.mark.parametrize("grace_s", [None, 0.0])
def test_what_loses_its_blocks_on_the_only_worker_comes_back_to_it(
    make_cluster: MakeCluster, grace_s: float | None
) -> None:
    """Cordoned (no grace) or drained: it is not new there."""
    cluster = make_cluster(watermark=0.0, preemption=Preemption.RECOMPUTE)
    cluster.join(1, num_blocks=6)
    requests = [make_request(name, 8, 12) for name in "ab"]
    cluster.submit(*requests)
    cluster.step()
    cluster.handle(WorkerCordoned("worker-1") if grace_s is None else WorkerDrained("worker-1", grace_s))
    cluster.submit(make_request("new", 4, 4))
    step_until(cluster, lambda: cluster.core.preemptions > 0)
    step_until(cluster, lambda: len(cluster.groups) == 1)
    assert list(cluster.groups) == ["new"]
    assert [cluster.tokens[name] for name in "ab"] == [reference_tokens(request) for request in requests]


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_drained_worker_is_let_go_once_its_requests_have_ended(make_cluster: MakeCluster) -> None:
    cluster = running_on_one_of_two(make_cluster, make_request("old", 8, 20))
    worker = cluster.replicas[1]
    drain(cluster)
    cluster.submit(make_request("new", 8, 4))
    cluster.schedule()
    assert (held_by(cluster, 1), held_by(cluster, 2)) == (["old"], ["new"])
    step_until(cluster, lambda: 1 not in cluster.core.replicas)
    assert is_dismissed(worker)
    assert cluster.finished.keys() == {"old", "new"}
    assert cluster.groups == {}
    assert NoticeKind.PREEMPTED not in [notice.kind for notice in cluster.notices["old"]]


def test_after_the_grace_requests_move_with_equal_tokens(make_cluster: MakeCluster) -> None:
    requests = [
        make_request("greedy", 8, 60),
        make_request("parallel", 8, 60, num_sequences=2, temperature=1.0),
    ]
    cluster = running_on_one_of_two(make_cluster, *requests)
    worker = cluster.replicas[1]
    drain(cluster, grace_s=0.05)
    step_until(cluster, lambda: 1 not in cluster.core.replicas)
    assert is_dismissed(worker)
    assert cluster.now < 0.2
    assert sorted(cluster.groups) == ["greedy", "parallel"]
    cluster.run()
    assert cluster.tokens["greedy"] == reference_tokens(requests[0])
    assert cluster.outputs("parallel") == [reference_tokens(requests[1], index) for index in range(2)]
    assert {notice.kind for notice in cluster.notices["greedy"]} >= {NoticeKind.PREEMPTED, NoticeKind.RESUMED}
    assert NoticeKind.WORKER_LOST not in [notice.kind for notice in cluster.notices["greedy"]]


def test_nothing_moves_while_a_step_with_it_is_outstanding(make_cluster: MakeCluster) -> None:
    cluster = running_on_one_of_two(make_cluster, make_request("r", 8, 60))
    cluster.schedule()
    num_plans = len(cluster.replicas[1].plans)
    assert num_plans == 2
    drain(cluster, grace_s=0.0)
    for _ in range(num_plans):
        cluster.schedule()
        assert held_by(cluster, 1) == ["r"]
        answer(cluster, 1)
    assert 1 not in cluster.core.replicas
    cluster.schedule()
    assert held_by(cluster, 2) == ["r"]


def test_swapped_out_requests_move_too(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, preemption=Preemption.SWAP)
    cluster.join(1, num_blocks=6, num_cpu_blocks=6)
    requests = [make_request(name, 8, 12) for name in "ab"]
    cluster.submit(*requests)
    step_until(cluster, lambda: bool(cluster.core.replicas[1].swapped))
    cluster.join(2)
    drain(cluster, grace_s=0.0)
    step_until(cluster, lambda: 1 not in cluster.core.replicas)
    cluster.run()
    assert [cluster.tokens[name] for name in "ab"] == [reference_tokens(request) for request in requests]


def test_what_no_other_worker_can_hold_runs_to_its_end(make_cluster: MakeCluster) -> None:
    large, small = make_request("large", 20, 60), make_request("small", 8, 20)
    cluster = running_on_one_of_two(make_cluster, large, small, num_blocks=8)
    drain(cluster, grace_s=0.0)
    step_until(cluster, lambda: held_by(cluster, 2) == ["small"])
    assert held_by(cluster, 1) == ["large"]
    step_until(cluster, lambda: 1 not in cluster.core.replicas)
    assert cluster.tokens["large"] == reference_tokens(large)
    assert all(notice.kind is NoticeKind.QUEUED for notice in cluster.notices["large"])


def test_without_another_worker_requests_end_there_and_new_ones_wait(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    worker = cluster.join(1)
    cluster.submit(make_request("old", 8, 20))
    cluster.step()
    drain(cluster, grace_s=0.0)
    cluster.submit(request := make_request("new", 8, 4))
    step_until(cluster, lambda: 1 not in cluster.core.replicas)
    assert is_dismissed(worker)
    assert cluster.finished.keys() == {"old"}
    assert list(cluster.core.waiting) == cluster.core.groups
    cluster.join(2)
    cluster.run()
    assert cluster.tokens["new"] == reference_tokens(request)


def test_a_worker_that_comes_while_another_is_drained_gets_what_was_left_there(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(request := make_request("r", 8, 60))
    cluster.step()
    drain(cluster, grace_s=0.0)
    step_until(cluster, lambda: len(cluster.tokens["r"]) > 4)
    cluster.join(2)
    step_until(cluster, lambda: set(cluster.core.replicas) == {2})
    cluster.run()
    assert cluster.tokens["r"] == reference_tokens(request)


def test_an_idle_worker_is_let_go_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    worker = cluster.join(1)
    drain(cluster)
    cluster.schedule()
    assert is_dismissed(worker)
    assert not cluster.core.replicas


def test_a_prefix_does_not_hold_a_drain_up(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=4, max_pinned_share=0.9)
    worker = cluster.join(1)
    cluster.handle(PrefixPinned(Prefix("p", list(range(1, 101)))))
    cluster.step()
    drain(cluster)
    for _ in range(3):
        cluster.step()
    assert is_dismissed(worker)


def test_the_same_worker_may_come_back_after_its_dismissal(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    drain(cluster)
    cluster.schedule()
    cluster.join(2, worker_id="worker-1")
    cluster.submit(make_request("r", 8, 4))
    cluster.run()
    assert "r" in cluster.finished


def test_a_worker_that_dies_while_it_is_drained_is_lost_like_others(make_cluster: MakeCluster) -> None:
    cluster = running_on_one_of_two(make_cluster, request := make_request("r", 8, 20))
    drain(cluster)
    cluster.handle(ReplicaLeft(1, LossCause.UNREACHABLE, "test"))
    cluster.run()
    assert cluster.tokens["r"] == reference_tokens(request)
    assert NoticeKind.WORKER_LOST in [notice.kind for notice in cluster.notices["r"]]


def test_a_worker_that_wants_to_end_is_drained_with_the_configured_grace(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(drain_grace_s=1.0)
    worker = cluster.join(1)
    cluster.submit(make_request("r", 8, 200))
    cluster.step()
    cluster.join(2)
    began = cluster.now
    while 1 in cluster.core.replicas:
        cluster.handle(ReplicaHeard(1, draining=True))
        cluster.step()
    assert is_dismissed(worker)
    assert 1.0 <= cluster.now - began < 1.1


def test_a_second_drain_changes_the_grace(make_cluster: MakeCluster) -> None:
    cluster = running_on_one_of_two(make_cluster, make_request("r", 8, 200))
    drain(cluster, grace_s=1000.0)
    cluster.step()
    drain(cluster, grace_s=0.0)
    step_until(cluster, lambda: 1 not in cluster.core.replicas, max_steps=5)


# -- readmit -----------------------------------------------------------------------------------------------------------


def test_readmission_ends_a_drain(make_cluster: MakeCluster) -> None:
    cluster = running_on_one_of_two(make_cluster, make_request("r", 8, 60))
    cluster.schedule()
    drain(cluster, grace_s=0.0)
    # It waits for what is outstanding.
    cluster.schedule()
    assert cluster.core.replicas[1].availability.is_paused
    cluster.handle(WorkerReadmitted("worker-1"))
    assert cluster.core.replicas[1].availability.state is ReplicaState.READY
    cluster.handle(WorkerCordoned("worker-2"))
    cluster.submit(make_request("new", 8, 4))
    cluster.run()
    assert set(cluster.core.replicas) == {1, 2}
    assert not [message for message in cluster.replicas[2].received if isinstance(message, StepPlan)]


# -- a worker joins ----------------------------------------------------------------------------------------------------


def test_a_worker_that_joins_takes_what_waits_for_room_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=2)
    cluster.join(1)
    cluster.submit(*(make_request(f"r{i}", 8, 50) for i in range(4)))
    cluster.step()
    assert len(cluster.core.waiting) == 2
    cluster.join(2)
    cluster.schedule()
    assert held_by(cluster, 2) == ["r2", "r3"]
