"""Accepted requests that no worker there can hold: pins make way, a grace for those that may come back, then an end."""

from typing import Any

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import (
    LeaseRenewed,
    LossCause,
    PrefixPinned,
    ReplicaHeard,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.explain import explain
from octavo.scheduler.core.placement import INTERVAL_S
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.testing.cluster import FRONTEND, Cluster, make_request, reference_tokens, resubmitted
from octavo.testing.scenarios import answer, ids, references, step_until
from octavo.wire.requests import Lease, NoticeKind, Prefix, RejectReason, Request

from ..conftest import MakeCluster
from ..views import kv_of

# 16 blocks of 4: all that replica 1 has.
LARGE = make_request("large", 40, 24)


def tick(cluster: Cluster, seconds: float) -> None:
    """Time passes: the frontend renews, workers beat and compute a step a second."""
    for _ in range(round(seconds / INTERVAL_S)):
        cluster.step()
        cluster.now += INTERVAL_S - 0.01
        cluster.handle(LeaseRenewed(FRONTEND, [Lease(name, group.request.attempt) for name, group in live(cluster)]))
        for incarnation in cluster.core.replicas:
            cluster.handle(ReplicaHeard(incarnation))
        cluster.tick(0.0)


def live(cluster: Cluster) -> list[tuple[str, SequenceGroup]]:
    return list(cluster.groups.items())


class TestAMisfit:
    """`large` ran on a worker that is lost; what comes back is one block too small."""

    def lost(self, make_cluster: MakeCluster, **config: Any) -> Cluster:
        cluster = make_cluster(watermark=0.0, **config)
        cluster.join(1, num_blocks=16)
        cluster.submit(LARGE)
        for _ in range(4):
            cluster.step()
        cluster.schedule()
        cluster.leave(1, LossCause.UNREACHABLE)
        cluster.join(2, num_blocks=15, worker_id="worker-1")
        return cluster

    @pytest.mark.parametrize("grace", [0.0, 60.0])
    def test_is_told_after_a_grace_and_told_before_that_it_waits(self, make_cluster: MakeCluster, grace: float) -> None:
        cluster = self.lost(make_cluster, misfit_grace_s=grace)
        if grace:
            tick(cluster, grace)
            assert ids(cluster.core.waiting) == ["large"]
            assert cluster.notices["large"][-1].kind in (NoticeKind.WORKER_LOST, NoticeKind.QUEUED)
            assert cluster.notices["large"][-1].queue_position == 1
        tick(cluster, INTERVAL_S)
        assert cluster.groups == {}
        told = cluster.rejected["large"]
        assert told.reason is RejectReason.NEVER_FITS_KV
        assert "64 tokens exceed the KV cache of 60" in told.detail
        assert f"within {grace:g} s" in told.detail

    def test_goes_on_when_one_that_can_hold_it_comes_within_the_grace(self, make_cluster: MakeCluster) -> None:
        cluster = self.lost(make_cluster)
        tick(cluster, 50.0)
        cluster.join(3, num_blocks=16)
        cluster.run()
        assert cluster.tokens["large"] == reference_tokens(LARGE)

    def test_has_the_whole_grace_again_after_one_that_came_was_lost_too(self, make_cluster: MakeCluster) -> None:
        cluster = self.lost(make_cluster)
        tick(cluster, 50.0)
        cluster.join(3, num_blocks=16)
        tick(cluster, INTERVAL_S)
        cluster.leave(3)
        tick(cluster, 50.0)
        assert ids(cluster.core.waiting) == ["large"]
        tick(cluster, 20.0)
        assert cluster.rejected.keys() == {"large"}

    def test_waits_on_while_no_worker_is_there(self, make_cluster: MakeCluster) -> None:
        cluster = self.lost(make_cluster)
        cluster.leave(2)
        tick(cluster, 600.0)
        assert ids(cluster.core.waiting) == ["large"]

    @pytest.mark.parametrize("how", ["cordoned", "draining"])
    def test_waits_for_one_that_is_there_and_takes_nothing_new(self, make_cluster: MakeCluster, how: str) -> None:
        cluster = self.lost(make_cluster, misfit_grace_s=5.0)
        cluster.join(3, num_blocks=16)
        holds = make_request("holds", 10, 50)
        cluster.handle(WorkerCordoned("worker-1"))
        cluster.abort("large")
        cluster.submit(holds)
        cluster.step()
        assert ids(cluster.core.replicas[3].running) == ["holds"]
        cluster.handle(WorkerReadmitted("worker-1"))
        cluster.handle(WorkerCordoned("worker-3") if how == "cordoned" else WorkerDrained("worker-3", 1e6))
        cluster.submit(resubmitted(LARGE, list(cluster.tokens["large"])))
        tick(cluster, 20.0)
        assert ids(cluster.core.waiting) == ["large"]
        assert cluster.rejected == {}
        cluster.handle(WorkerReadmitted("worker-3"))
        cluster.run()
        assert cluster.finished.keys() >= {"large", "holds"}

    def test_of_a_scheduler_before_this_one_has_the_grace_too(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(1, num_blocks=15)
        cluster.submit(resubmitted(LARGE, reference_tokens(LARGE)[:3]))
        cluster.schedule()
        assert cluster.notices["large"][-1].kind is NoticeKind.QUEUED
        tick(cluster, 60.0)
        assert ids(cluster.core.waiting) == ["large"]
        tick(cluster, 2 * INTERVAL_S)
        assert cluster.rejected["large"].reason is RejectReason.NEVER_FITS_KV

    def test_keeps_nobody_else_waiting(self, make_cluster: MakeCluster) -> None:
        cluster = self.lost(make_cluster)
        cluster.submit(other := make_request("other", 8, 8))
        step_until(cluster, lambda: "other" in cluster.finished)
        assert cluster.tokens["other"] == reference_tokens(other)


PREFIX = Prefix("system", list(range(8)))
OTHER_PREFIX = Prefix("other", list(range(100, 108)))


class TestPinsOnAReplacement:
    """Accepted while the pins took less: they were given up there, or pinned while no worker was there."""

    def pinned_since(
        self, make_cluster: MakeCluster, *prefixes: Prefix, during: str = "decode", **config: Any
    ) -> Cluster:
        """`large` ran, or had lost its blocks, on a worker that is lost; `prefixes` were pinned then; and a worker as
        large as the first comes."""
        cluster = make_cluster(watermark=0.0, **config)
        cluster.join(1, num_blocks=16, num_cpu_blocks=16 if during == "swapped" else 0)
        cluster.submit(make_request("first", 10, 30), LARGE)
        if during == "waiting":
            cluster.schedule()
        else:
            step_until(cluster, lambda: "first" in cluster.finished or cluster.groups["large"].preemptions > 0)
        cluster.schedule()
        cluster.leave(1, LossCause.UNREACHABLE)
        for prefix in prefixes:
            cluster.handle(PrefixPinned(prefix))
        cluster.join(2, num_blocks=16, worker_id="worker-1")
        return cluster

    @pytest.mark.parametrize(
        ("during", "preemption"),
        [
            ("waiting", Preemption.RECOMPUTE),
            ("preempted", Preemption.RECOMPUTE),
            ("swapped", Preemption.SWAP),
        ],
    )
    def test_wait_for_an_accepted_request_that_needs_the_blocks(
        self, make_cluster: MakeCluster, during: str, preemption: Preemption
    ) -> None:
        cluster = self.pinned_since(make_cluster, PREFIX, during=during, preemption=preemption)
        assert [given_up.name for given_up in cluster.given_up] == ["system"]
        assert "request large" in cluster.given_up[0].reason
        cluster.run()
        first = make_request("first", 10, 30)
        assert cluster.outputs("large") == references(LARGE)["large"]
        assert cluster.outputs("first") == references(first)["first"]
        tick(cluster, 2 * INTERVAL_S)
        for _ in range(4):
            cluster.step()
        assert "system" in kv_of(cluster, 2).pinned
        assert cluster.core.replicas[2].prefixes.owed == {}

    def test_are_made_where_they_leave_room(self, make_cluster: MakeCluster) -> None:
        cluster = self.pinned_since(make_cluster)
        cluster.handle(PrefixPinned(PREFIX))
        cluster.join(3, num_blocks=18)
        assert cluster.core.replicas[3].prefixes.names == {"system"}
        assert cluster.given_up == []
        cluster.run()

    def test_are_made_where_another_replica_can_hold_the_request(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.submit(make_request("a", 10, 54))
        cluster.handle(PrefixPinned(PREFIX))
        cluster.join(1, num_blocks=16)
        assert cluster.core.replicas[1].prefixes.names == set()
        cluster.join(2, num_blocks=18)
        assert cluster.core.replicas[2].prefixes.names == {"system"}
        tick(cluster, INTERVAL_S)
        cluster.run()

    def test_of_several_only_what_is_in_the_way_waits(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.submit(make_request("large", 40, 24))
        cluster.handle(PrefixPinned(PREFIX))
        cluster.handle(PrefixPinned(OTHER_PREFIX))
        cluster.join(1, num_blocks=18)
        assert cluster.core.replicas[1].prefixes.names == {"system"}
        assert cluster.core.replicas[1].prefixes.owed == {"other": 2}
        cluster.run()
        tick(cluster, INTERVAL_S)
        assert cluster.core.replicas[1].prefixes.names == {"system", "other"}

    def test_make_way_for_what_comes_from_a_scheduler_before_this_one(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(1, num_blocks=16)
        cluster.handle(PrefixPinned(PREFIX))
        cluster.submit(using := make_request("using", 12, 8, shared=8))
        for _ in range(4):
            cluster.step()
        assert "system" in kv_of(cluster).pinned
        cluster.submit(resubmitted(LARGE, reference_tokens(LARGE)[:2]))
        tick(cluster, INTERVAL_S)
        assert [given_up.name for given_up in cluster.given_up] == ["system"]
        cluster.run()
        assert cluster.tokens["large"] == reference_tokens(LARGE)
        assert cluster.tokens["using"] == reference_tokens(using)

    def test_make_way_when_the_replica_that_could_hold_the_request_is_lost(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(1, num_blocks=16)
        cluster.join(2, num_blocks=24)
        cluster.handle(PrefixPinned(PREFIX))
        cluster.submit(LARGE)
        for _ in range(3):
            cluster.step()
        assert ids(cluster.core.replicas[2].running) == ["large"]
        cluster.schedule()
        cluster.leave(2, LossCause.UNREACHABLE)
        tick(cluster, INTERVAL_S)
        cluster.run()
        assert cluster.tokens["large"] == reference_tokens(LARGE)

    def test_make_way_while_they_are_being_computed(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0, max_num_batched_tokens=4)
        cluster.join(1, num_blocks=16)
        cluster.handle(PrefixPinned(PREFIX))
        cluster.schedule()
        assert [group.request_id for group in cluster.core.replicas[1].running] == ["prefix system"]
        cluster.submit(resubmitted(LARGE, reference_tokens(LARGE)[:2]))
        tick(cluster, INTERVAL_S)
        while cluster.replicas[1].plans:
            answer(cluster)
        cluster.run()
        assert cluster.tokens["large"] == reference_tokens(LARGE)

    @pytest.mark.parametrize("is_known", [True, False])
    def test_that_are_owed_are_not_kept_away_by_new_requests(self, make_cluster: MakeCluster, is_known: bool) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.submit(make_request("large", 40, 24))
        cluster.handle(PrefixPinned(PREFIX))
        cluster.join(1, num_blocks=16)
        new: Request = make_request("new", 40, 24)
        cluster.submit(resubmitted(new) if is_known else new)
        assert ("new" in cluster.rejected) is not is_known
        cluster.run()

    def test_that_are_owed_and_unpinned_are_owed_no_more(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.submit(make_request("large", 40, 24))
        cluster.handle(PrefixPinned(PREFIX))
        cluster.join(1, num_blocks=16)
        cluster.core.prefixes.unpin("system", cluster.core.replicas.values())
        assert cluster.core.replicas[1].prefixes.owed == {}
        cluster.run()
        tick(cluster, INTERVAL_S)

    def test_a_request_they_made_way_for_is_explained(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(1, num_blocks=16)
        cluster.handle(PrefixPinned(PREFIX))
        cluster.submit(resubmitted(LARGE, reference_tokens(LARGE)[:2]))
        [before] = explain(cluster.core.state, cluster.core.policy, "large", cluster.now)
        assert [str(each.obstacle.kind) for each in before.obstacles] == ["capacity"]
        tick(cluster, INTERVAL_S)
        assert explain(cluster.core.state, cluster.core.policy, "large", cluster.now)[0].obstacles == []
        cluster.run()
