"""Requests that will not wait for ever: they are told so in time, and nothing is computed of them."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import LeaseRenewed
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.testing.cluster import FRONTEND, Cluster, make_request, resubmitted
from octavo.testing.scenarios import admissions, answer, step_until
from octavo.wire.requests import Lease, RejectReason, Request

from ..conftest import MakeCluster


def hasty(name: str, max_queue_ms: int, **fields: Any) -> Request:
    return msgspec.structs.replace(make_request(name, 4, max_tokens=40), max_queue_ms=max_queue_ms, **fields)


def narrow(make_cluster: MakeCluster, *requests: Request) -> Cluster:
    """One request runs for long, and these wait for its place."""
    cluster = make_cluster(max_num_seqs=1, max_steps_in_flight=1, first_step_timeout_s=1e9)
    cluster.join()
    cluster.submit(make_request("runs", 4, max_tokens=40))
    cluster.schedule()
    cluster.submit(*requests)
    return cluster


def wait(cluster: Cluster, seconds: float) -> None:
    """Time passes, and nothing else."""
    cluster.now += seconds
    cluster.schedule()


def test_it_is_rejected_once_its_time_is_over_and_not_before(make_cluster: MakeCluster) -> None:
    cluster = narrow(make_cluster, hasty("a", 500))
    wait(cluster, 0.5)
    assert not cluster.rejected
    wait(cluster, 0.001)
    rejection = cluster.rejected["a"]
    assert (rejection.attempt, rejection.reason) == (1, RejectReason.QUEUE_TIMEOUT)
    assert cluster.groups.keys() == {"runs"}


def test_others_wait_on(make_cluster: MakeCluster) -> None:
    cluster = narrow(make_cluster, hasty("long", 60_000), hasty("short", 100), make_request("patient", 4, 3))
    wait(cluster, 1.0)
    assert cluster.rejected.keys() == {"short"}
    assert cluster.groups.keys() == {"runs", "long", "patient"}


def test_the_age_counts_from_the_first_arrival(make_cluster: MakeCluster) -> None:
    cluster = narrow(make_cluster, hasty("a", 500, age_ms=400))
    wait(cluster, 0.2)
    assert cluster.rejected["a"].reason is RejectReason.QUEUE_TIMEOUT
    assert "waited 0.6 s of at most 0.5 s" in cluster.rejected["a"].detail


def test_it_is_never_admitted_past_its_time(make_cluster: MakeCluster) -> None:
    """Even if its turn comes in the very pass that finds it late."""
    cluster = narrow(make_cluster, late := hasty("late", 500), other := make_request("other", 4, 3))
    cluster.abort("runs")
    answer(cluster)
    cluster.now += 0.6
    cluster.schedule()
    assert cluster.rejected.keys() == {"late"}
    cluster.run()
    assert admissions(cluster.replicas[1], late, other) == ["other"]


def test_without_any_time_it_is_admitted_at_once_or_not_at_all(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=1)
    cluster.join()
    cluster.submit(hasty("a", 0), hasty("b", 0))
    cluster.schedule()
    wait(cluster, 0.001)
    assert cluster.groups["a"].status is SequenceStatus.RUNNING
    assert cluster.rejected.keys() == {"b"}


def test_one_that_was_admitted_is_safe_whatever_becomes_of_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(hasty("a", 500))
    cluster.schedule()
    cluster.leave(1)
    wait(cluster, 10.0)
    assert not cluster.rejected
    cluster.handle(LeaseRenewed(FRONTEND, [Lease("a", 1)]))
    cluster.join(2)
    cluster.run()
    assert len(cluster.tokens["a"]) == 40


def test_one_that_comes_again_with_tokens_has_run_before(make_cluster: MakeCluster) -> None:
    cluster = narrow(make_cluster, resubmitted(hasty("a", 500), [1, 2, 3], age_ms=10_000))
    wait(cluster, 10.0)
    assert not cluster.rejected


def test_one_that_comes_again_without_any_has_only_waited(make_cluster: MakeCluster) -> None:
    cluster = narrow(make_cluster, resubmitted(hasty("a", 500), age_ms=10_000))
    wait(cluster, 0.0)
    rejection = cluster.rejected["a"]
    assert (rejection.attempt, rejection.reason) == (2, RejectReason.QUEUE_TIMEOUT)


@pytest.mark.parametrize("gone", ["abort", "admission"])
def test_nothing_is_kept_of_one_that_has_gone(make_cluster: MakeCluster, gone: str) -> None:
    cluster = narrow(make_cluster, *(hasty(f"r{i}", 1000 - i) for i in range(5)), hasty("a", 997))
    if gone == "abort":
        cluster.abort("a")
    else:
        for other in ("runs", *(f"r{i}" for i in range(5))):
            cluster.abort(other)
        step_until(cluster, lambda: cluster.groups["a"].status is SequenceStatus.RUNNING)
    assert "a" not in [group.request_id for group in cluster.core.request_table.queue_times._groups]
    wait(cluster, 0.99)
    assert "a" not in cluster.rejected


class TestWhatItWaitedFor:
    def test_those_in_front(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, make_request("first", 4, 9), make_request("second", 4, 9), hasty("a", 500))
        wait(cluster, 0.7)
        detail = cluster.rejected["a"].detail
        assert detail.startswith("waited 0.7 s of at most 0.5 s behind 2 other requests; ")

    def test_room_on_a_worker(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, hasty("a", 500))
        wait(cluster, 0.7)
        assert "for sequence_slots of worker worker-1 (1 needed, 0 available)" in cluster.rejected["a"].detail

    def test_a_worker(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.submit(hasty("a", 500))
        wait(cluster, 0.7)
        assert "for a worker: there is none" in cluster.rejected["a"].detail

    def test_its_turn(self, make_cluster: MakeCluster) -> None:
        """There was room, but no step began meanwhile."""
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("runs", 4, max_tokens=9))
        cluster.schedule()
        cluster.submit(hasty("a", 500))
        wait(cluster, 0.7)
        assert "for its turn" in cluster.rejected["a"].detail
