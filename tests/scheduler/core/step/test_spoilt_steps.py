"""Whose doing it is that nothing finite comes back: a request's, which ends, or a replica's, which is ended."""

import pytest

from octavo.scheduler.core.events import (
    LossCause,
    PrefixPinned,
    SchedulerObserver,
    StepAnswered,
    WorkerCordoned,
    WorkerReadmitted,
)
from octavo.testing.cluster import Cluster, make_request, reference_tokens
from octavo.testing.scenarios import ids, step_until
from octavo.wire.requests import Prefix, RejectReason, Request
from octavo.wire.steps import WorkerRefused

from ...conftest import MakeCluster

BROKEN = 999


def broken(name: str, length: int = 9) -> Request:
    """A request to which a replica with the fault `nan=999` gives nothing finite."""
    request = make_request(name, length, 6)
    request.prompt_token_ids[-1] = BROKEN
    return request


def good(count: int) -> list[Request]:
    return [make_request(f"good{i}", 6 + i, 9) for i in range(count)]


class Losses(SchedulerObserver):
    def __init__(self) -> None:
        self.causes: list[str] = []

    def replica_lost(self, cause: str) -> None:
        self.causes.append(cause)


def assert_served(cluster: Cluster, *requests: Request) -> None:
    cluster.run()
    assert {each.request_id: cluster.tokens[each.request_id] for each in requests} == {
        each.request_id: reference_tokens(each) for each in requests
    }


# -- a request's doing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2])
def test_one_request_is_computed_once_more_on_another_replica(make_cluster: MakeCluster, num_steps: int) -> None:
    cluster = make_cluster()
    cluster.join(1, faults=f"nan={BROKEN}")
    cluster.submit(request := broken("r"), *good(2))
    for _ in range(num_steps):
        cluster.schedule()
    cluster.join(2)
    assert_served(cluster, request, *good(2))
    assert cluster.rejected == {}
    assert set(cluster.core.replicas) == {1, 2}


def test_one_request_that_gets_no_better_elsewhere_ends(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for incarnation in (1, 2, 3):
        cluster.join(incarnation, faults=f"nan={BROKEN}")
    cluster.submit(broken("r"), *good(6))
    assert_served(cluster, *good(6))
    assert {name: each.reason for name, each in cluster.rejected.items()} == {"r": RejectReason.NOT_FINITE}


def test_without_another_replica_one_request_ends_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, faults=f"nan={BROKEN}")
    cluster.submit(broken("r"), *good(2))
    cluster.step()
    assert cluster.rejected["r"].reason is RejectReason.NOT_FINITE
    assert_served(cluster, *good(2))


def test_it_goes_elsewhere_even_if_that_is_busier(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=64)
    cluster.join(1, faults=f"nan={BROKEN}")
    cluster.submit(request := broken("r"), *good(1))
    cluster.schedule()
    cluster.join(2, num_blocks=512)
    cluster.handle(WorkerCordoned("worker-1"))
    cluster.submit(*(make_request(f"busy{i}", 400, 4) for i in range(4)))
    cluster.schedule()
    cluster.handle(WorkerReadmitted("worker-1"))
    step_until(cluster, lambda: "r" in ids(cluster.core.replicas[2].running))
    assert_served(cluster, request)
    assert cluster.rejected == {}


# -- a replica's doing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 6], ids=["nothing shared", "the beginning shared"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_several_that_get_nothing_finite_are_all_computed_elsewhere(
    make_cluster: MakeCluster, shared: int, num_steps: int
) -> None:
    cluster = make_cluster(max_failed_steps=1)
    cluster.join(1, faults="nan=*")
    requests = [make_request(f"r{i}", 6 + i, 9, shared=shared) for i in range(4)]
    cluster.submit(*requests)
    for _ in range(num_steps):
        cluster.schedule()
    cluster.join(2)
    step_until(cluster, lambda: len(cluster.core.replicas[2].running) == 4, 4)
    assert len(cluster.core.replicas[1].steps.non_finite_at) == 1
    assert_served(cluster, *requests)
    assert cluster.rejected == {}


def test_one_that_got_no_better_before_ends_with_a_spoilt_step_that_others_survive(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, faults=f"nan={BROKEN}")
    cluster.submit(broken("r"), *good(1))
    cluster.schedule()
    cluster.join(2, faults="nan=*>2")
    cluster.handle(WorkerCordoned("worker-1"))
    others = [make_request(name, 9, 9) for name in "ab"]
    cluster.submit(*others)
    cluster.handle(StepAnswered(1, cluster.replicas[1].execute()))
    cluster.step()
    assert cluster.rejected.keys() == {"r"}
    cluster.handle(WorkerReadmitted("worker-1"))
    assert_served(cluster, *others, *good(1))
    assert cluster.rejected.keys() == {"r"}


def test_with_one_replica_they_are_computed_there_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    # As long as there are four of them.
    cluster.join(1, faults="nan=*>3")
    cluster.submit(*good(4))
    cluster.step()
    assert cluster.rejected == {}
    cluster.abort("good3")
    assert_served(cluster, *good(3))
    assert cluster.rejected == {}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_replica_that_spoils_three_steps_is_ended(make_cluster: MakeCluster, in_flight: int) -> None:
    losses = Losses()
    cluster = make_cluster(max_steps_in_flight=in_flight, observer=losses)
    replica = cluster.join(1, faults="nan=*")
    cluster.submit(*good(4))
    known = cluster.core.replicas[1]
    step_until(cluster, lambda: not cluster.core.replicas, 20)
    assert len(known.steps.non_finite_at) == 3
    assert losses.causes == [LossCause.BROKEN]
    assert [type(message) for message in replica.received].count(WorkerRefused) == 1
    assert cluster.rejected == {}
    cluster.join(2)
    assert_served(cluster, *good(4))


def test_three_spoilt_steps_in_a_long_time_are_forgiven(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, faults="nan=*>1")
    for _ in range(5):
        cluster.submit(*(make_request(f"{cluster.now}-{i}", 6, 6) for i in range(2)))
        cluster.step()
        cluster.abort(cluster.core.groups[0].request_id)
        cluster.run()
        cluster.now += 30.0
    assert set(cluster.core.replicas) == {1}
    assert cluster.rejected == {}


def test_requests_that_get_no_better_elsewhere_end_and_do_not_count(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, faults=f"nan={BROKEN}")
    cluster.submit(broken("a"), broken("b", 11))
    cluster.schedule()
    cluster.join(2, faults=f"nan={BROKEN}")
    cluster.run()
    assert cluster.rejected.keys() == {"a", "b"}
    assert [replica.steps.non_finite_at for replica in cluster.core.replicas.values()] == [[0.01], []]


def test_those_that_shared_what_was_not_finite_count_too(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    requests = [make_request(name, 11, 7, shared=9) for name in ("first", "second", "third")]
    cluster.submit(*requests)
    cluster.step(spoil="first")
    assert len(cluster.core.replicas[1].steps.non_finite_at) == 1
    assert_served(cluster, *requests)
    assert cluster.rejected == {}


def test_a_prefix_that_is_not_finite_is_given_up(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, faults="nan=*")
    cluster.join(2)
    cluster.handle(PrefixPinned(Prefix("p", list(range(9)))))
    cluster.step()
    assert [(each.replica_id, each.name) for each in cluster.given_up] == [(1, "p")]
