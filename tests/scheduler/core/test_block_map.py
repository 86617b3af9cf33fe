"""What every block is used for. (That it is so in any state, `test_scheduler_machine` sees.)"""

from collections import Counter
from typing import Any

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import PrefixPinned
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.scheduler.server.admin_messages import Owner
from octavo.testing.cluster import Cluster, FakeDisk, make_request
from octavo.testing.scenarios import beams, drain, step_until
from octavo.v1 import admin_pb2 as pb
from octavo.wire.requests import Prefix

from ..conftest import MakeCluster
from ..plain_block_map import assert_block_map_agrees

FREE, CACHED, PRIVATE, SHARED, PINNED, PARKED, SWAPPED = (
    pb.BLOCK_STATE_FREE,
    pb.BLOCK_STATE_CACHED,
    pb.BLOCK_STATE_PRIVATE,
    pb.BLOCK_STATE_SHARED,
    pb.BLOCK_STATE_PINNED,
    pb.BLOCK_STATE_PARKED,
    pb.BLOCK_STATE_SWAPPED,
)


def counts(cluster: Cluster) -> dict[int, int]:
    return dict(Counter(assert_block_map_agrees(cluster.core.replicas[1]).states))


def owners(cluster: Cluster) -> dict[str, Owner]:
    return {owner.name: owner for owner in assert_block_map_agrees(cluster.core.replicas[1]).owners}


def test_an_empty_pool_is_free(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=10, num_cpu_blocks=3)
    found = assert_block_map_agrees(cluster.core.replicas[1])
    assert (found.states, found.cpu_states, found.owners) == (bytes([FREE]) * 10, bytes([FREE]) * 3, [])


def test_what_one_sequence_holds_is_private_and_then_cached(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(num_blocks=10)
    cluster.submit(make_request("a", 9, max_tokens=2))
    cluster.schedule()
    assert counts(cluster) == {PRIVATE: 3, FREE: 7}
    assert owners(cluster)["a"].block_ids == cluster.core.replicas[1].kv.block_table(cluster.groups["a"].live[0])[0]
    cluster.run()
    assert counts(cluster) == {CACHED: 2, FREE: 8}


def test_what_two_requests_hold_is_shared(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=20)
    cluster.submit(make_request("a", 10, max_tokens=9, shared=8), make_request("b", 10, max_tokens=9, shared=8))
    cluster.step()
    assert counts(cluster) == {SHARED: 2, PRIVATE: 2, FREE: 16}
    both = owners(cluster)
    assert both["a"].block_ids[:2] == both["b"].block_ids[:2]
    assert both["a"].block_ids[2] != both["b"].block_ids[2]


def test_what_sequences_of_one_request_share_is_named_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(num_blocks=20)
    cluster.submit(make_request("a", 8, max_tokens=9, num_sequences=3, temperature=1.0))
    cluster.step()
    cluster.step()
    assert counts(cluster) == {SHARED: 2, PRIVATE: 3, FREE: 15}
    assert len(owners(cluster)["a"].block_ids) == 5


def test_what_an_outstanding_step_may_touch_is_parked(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(num_blocks=10)
    cluster.submit(make_request("a", 9, max_tokens=2))
    cluster.schedule()
    cluster.abort("a")
    assert counts(cluster) == {PARKED: 3, FREE: 7}
    assert owners(cluster) == {}
    drain(cluster)
    assert counts(cluster) == {CACHED: 2, FREE: 8}


def test_a_pinned_prefix_stays_pinned_whoever_uses_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=40)
    cluster.handle(PrefixPinned(Prefix("system", list(range(10)))))
    cluster.schedule()
    assert owners(cluster)["system"].is_prefix
    cluster.step()
    cluster.step()
    assert counts(cluster) == {PINNED: 3, FREE: 37}
    cluster.submit(make_request("a", 12, max_tokens=9, shared=10))
    cluster.step()
    assert counts(cluster) == {PINNED: 3, PRIVATE: 2, FREE: 35}
    assert owners(cluster)["a"].block_ids[:2] == owners(cluster)["system"].block_ids[:2]


def test_what_was_swapped_out_is_in_cpu_blocks(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, preemption=Preemption.SWAP, max_steps_in_flight=1, prefix_caching=False)
    cluster.join(num_blocks=16, block_size=2, num_cpu_blocks=16)
    for name in ("first", "second", "third"):
        cluster.submit(make_request(name, 5, max_tokens=11))
        cluster.now += 0.001
    step_until(cluster, lambda: cluster.groups["third"].status is SequenceStatus.SWAPPED)
    found = assert_block_map_agrees(cluster.core.replicas[1])
    third = owners(cluster)["third"]
    assert third.block_ids == []
    assert Counter(found.cpu_states)[SWAPPED] == len(third.cpu_block_ids) > 0


@pytest.mark.parametrize("windows", [(0,), (0, 6), (3,)])
def test_it_is_so_in_every_step_of_a_crowd(make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
    """With all kinds of requests, too little memory, and a pinned prefix: all states were there."""
    cluster = make_cluster(watermark=0.0, preemption=Preemption.SWAP)
    cluster.join(num_blocks=30 * len(windows), block_size=2, num_cpu_blocks=20 * len(windows), windows=windows)
    cluster.handle(PrefixPinned(Prefix("p", list(range(5)))))
    for i in range(5):
        cluster.submit(make_request(f"one{i}", 9, max_tokens=14, shared=6))
        cluster.submit(make_request(f"pair{i}", 7, max_tokens=12, num_sequences=2, temperature=1.0))
        cluster.submit(make_request(f"beams{i}", 6, max_tokens=10, beam=beams(3)))
        cluster.now += 0.001
    seen: set[int] = set()
    while cluster.groups:
        for _ in range(2):
            cluster.schedule()
            found = assert_block_map_agrees(cluster.core.replicas[1])
            seen |= {*found.states, *found.cpu_states}
        if len(cluster.groups) == 12:
            cluster.abort(cluster.core.replicas[1].running[0].request_id)
            seen |= {*assert_block_map_agrees(cluster.core.replicas[1]).states}
        cluster.step()
    assert seen == {FREE, CACHED, PRIVATE, SHARED, PINNED, PARKED, SWAPPED}


def test_what_a_disk_reads_arrives_and_is_cached_then(make_cluster: MakeCluster) -> None:
    cluster, disk = make_cluster(max_steps_in_flight=1), FakeDisk()
    sizes: dict[str, Any] = {"num_blocks": 20, "block_size": 4, "num_cpu_blocks": 8, "disk": disk, "mirror": True}
    cluster.join(1, **sizes)
    cluster.submit(make_request("a", 13, 2, shared=13))
    cluster.run()
    cluster.step()
    cluster.leave(1)
    cluster.join(2, **sizes)
    cluster.disks_answer = False
    cluster.submit(make_request("b", 13, 2, shared=13))
    cluster.step()
    replica = cluster.core.replicas[2]
    arriving = assert_block_map_agrees(replica).cpu_states.count(pb.BLOCK_STATE_ARRIVING)
    assert arriving == len(replica.kv.arriving_block_ids) > 0
    cluster.disks_answer = True
    cluster.run()
    found = assert_block_map_agrees(replica)
    assert Counter(found.cpu_states) == {pb.BLOCK_STATE_CACHED: 3, FREE: 5}
