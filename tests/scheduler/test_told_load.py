"""Frontends hear how busy the service is: soon after it changes, seldom enough to cost nothing, and never twice."""

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import LeaseRenewed, ReplicaHeard
from octavo.testing.cluster import FRONTEND, Cluster, make_request
from octavo.wire.requests import LOAD_INTERVAL_S, BlockUse, Lease, Renewed, ServiceLoad, StatusChanged

from .conftest import MakeCluster

_TICK_S = 0.1


def told(cluster: Cluster) -> list[ServiceLoad | None]:
    """The loads that frontends were told besides their renewals since the last call."""
    found = [message.status.load for message in cluster.to_frontend if isinstance(message, StatusChanged)]
    cluster.to_frontend.clear()
    return found


def rest(cluster: Cluster) -> None:
    """Lets all be told that there is to tell, and time pass after it."""
    for _ in range(2):
        cluster.tick(LOAD_INTERVAL_S)
    cluster.to_frontend.clear()


def test_a_load_counts_what_waits_and_runs_and_the_blocks_of_each_size(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=2, prefix_caching=True)
    cluster.submit(*(make_request(name, 8, 4) for name in "abc"))
    assert cluster.core.status().load == ServiceLoad(3, 0, [])
    cluster.join(1, num_blocks=64, block_size=4)
    cluster.join(2, num_blocks=10, block_size=8)
    cluster.join(3, num_blocks=6, block_size=4)
    for name in ("worker-2", "worker-3"):
        cluster.core.replica_of_worker(name).availability.cordon()  # type: ignore[union-attr]
    cluster.schedule()
    # Two prompts of two blocks each.
    assert cluster.core.status().load == ServiceLoad(1, 2, [BlockUse(4, 70, 4), BlockUse(8, 10, 0)])
    cluster.run()
    # What is cached and held by nobody is free.
    assert cluster.core.replica_of_worker("worker-1").kv.num_cached  # type: ignore[union-attr]
    assert cluster.core.status().load == ServiceLoad(0, 0, [BlockUse(4, 70, 0), BlockUse(8, 10, 0)])


def test_what_is_swapped_out_waits(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0)
    cluster.join(num_blocks=6, block_size=4, num_cpu_blocks=6)
    cluster.submit(make_request("a", 8, 12), make_request("b", 8, 12))
    loads = []
    while cluster.groups:
        cluster.step()
        load = cluster.core.status().load
        assert load is not None
        assert load.waiting + load.running == len(cluster.groups)
        if any(replica.swapped for replica in cluster.core.replicas.values()):
            loads.append((load.waiting, load.running))
    assert (1, 1) in loads


def test_a_change_is_told_within_a_tick_and_further_ones_within_half_a_second(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    rest(cluster)
    cluster.submit(make_request("a", 8, 4))
    cluster.tick(_TICK_S)
    (load,) = told(cluster)
    assert load == cluster.core.status().load
    assert load is not None
    assert load.waiting == 1
    # What changes now waits for its time, and comes as it is by then.
    cluster.schedule()
    cluster.submit(make_request("b", 8, 4))
    quiet = 0
    while not (later := told(cluster)):
        cluster.tick(_TICK_S)
        quiet += 1
    assert later == [cluster.core.status().load]
    assert quiet * _TICK_S <= LOAD_INTERVAL_S + _TICK_S


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_load_is_told_twice_a_second_at_most_and_an_old_one_never_again(
    make_cluster: MakeCluster, is_busy: bool
) -> None:
    cluster = make_cluster()
    cluster.join()
    rest(cluster)
    for i in range(40):
        cluster.handle(ReplicaHeard(1, draining=False))
        if is_busy:
            cluster.submit(make_request(f"r{i}", 8, 1))
        for _ in range(10):
            cluster.tick(_TICK_S / 10)
    # Four seconds.
    assert len(told(cluster)) == (8 if is_busy else 0)


def test_renewals_bring_the_load_of_now(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("a", 8, 4))
    cluster.schedule()
    cluster.handle(LeaseRenewed(FRONTEND, [Lease("a", 1)]))
    answers = [message for message in cluster.to_frontend if isinstance(message, Renewed)]
    assert answers[-1].status.load == cluster.core.status().load == ServiceLoad(0, 1, [BlockUse(4, 64, 2)])
