"""The second tier of the prefix cache: what device blocks held comes back from CPU blocks, and nothing that is not
certainly there does."""

from collections.abc import Iterable

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import ReplicaJoined, StepAnswered
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.testing.cluster import Cluster, FakeReplica, make_request, reference_tokens
from octavo.testing.scenarios import outputs, plan_until, plans, references
from octavo.wire.requests import Request
from octavo.wire.steps import BlockMove

from ..conftest import MakeCluster
from ..views import cached_tokens, kv_of

OLD, NEW = make_request("old", 16, 3), make_request("new", 24, 3)


def again(request: Request, name: str = "again") -> Request:
    """The same prompt and sampling, as another request."""
    return msgspec.structs.replace(request, request_id=name)


def small(make_cluster: MakeCluster, num_cpu_blocks: int = 20, **config: object) -> tuple[Cluster, FakeReplica]:
    """Room for one of `OLD` and `NEW`; `OLD` has ended, and `NEW` has taken its blocks."""
    cluster = make_cluster(watermark=0.0, **{"max_steps_in_flight": 1, **config})
    replica = cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=num_cpu_blocks)
    for request in (OLD, NEW):
        cluster.submit(request)
        cluster.run()
    return cluster, replica


def moved(plan_moves: Iterable[list[BlockMove]]) -> int:
    return sum(map(len, plan_moves))


def test_what_was_taken_on_the_device_comes_back_by_a_move(make_cluster: MakeCluster) -> None:
    cluster, replica = small(make_cluster)
    num_stored = moved(plan.moves.swap_out for plan in plans(replica))
    assert num_stored > 0
    cluster.submit(again(OLD))
    cluster.run()
    # All full blocks before the last token.
    assert cached_tokens(cluster)["again"] == 14
    # 7 blocks, but what was still on the device.
    assert 0 < moved(plan.moves.swap_in for plan in plans(replica)) <= min(7, num_stored)
    assert cluster.tokens["again"] == reference_tokens(again(OLD))


def test_what_comes_back_is_neither_stored_twice_nor_lost(make_cluster: MakeCluster) -> None:
    cluster, replica = small(make_cluster)
    for name in "abcdef":
        cluster.submit(again(OLD, f"old {name}"))
        cluster.run()
        cluster.submit(again(NEW, f"new {name}"))
        cluster.run()
        assert cached_tokens(cluster)[f"old {name}"] == 14
        assert cached_tokens(cluster)[f"new {name}"] == 22
        assert cluster.tokens[f"new {name}"] == reference_tokens(again(NEW, f"new {name}"))
    kv = kv_of(cluster)
    assert kv.cpu_tier is not None
    # All that was ever computed: 9 full blocks of one (16 + 3 tokens), 13 of the other, but what the device has now.
    assert kv.cpu_tier.num_stored <= 9 + 13
    assert kv.cpu_tier.num_loaded == moved(plan.moves.swap_in for plan in plans(replica))


def test_requests_that_start_together_move_a_block_once(make_cluster: MakeCluster) -> None:
    cluster, replica = small(make_cluster, max_num_batched_tokens=64)
    before = len(plans(replica))
    cluster.submit(again(OLD, "one"), again(OLD, "two"))
    cluster.step()
    (plan,) = plans(replica)[before:]
    targets = [move.target for move in plan.moves.swap_in]
    assert targets
    assert len(targets) == len({move.source for move in plan.moves.swap_in}) == len(set(targets))
    assert len(plan.starts) == 2
    cluster.run()
    assert cached_tokens(cluster)["one"] == cached_tokens(cluster)["two"] == 14
    for name in ("one", "two"):
        assert cluster.tokens[name] == reference_tokens(again(OLD, name))


def test_where_cpu_memory_is_short_what_was_used_last_stays(make_cluster: MakeCluster) -> None:
    cluster, _ = small(make_cluster, num_cpu_blocks=4)
    kv = kv_of(cluster)
    assert len(kv.cpu_cached_behind(None)) == 4
    cluster.submit(again(OLD))
    cluster.run()
    # Chains are eaten from their tails: what is left is the beginning.
    assert 0 < cached_tokens(cluster)["again"] < 14
    assert cluster.tokens["again"] == reference_tokens(again(OLD))


def test_swapped_groups_take_what_blocks_they_need(make_cluster: MakeCluster) -> None:
    """The CPU's blocks are full of cached content when the first group is swapped out."""
    cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0, max_steps_in_flight=1)
    replica = cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=9)
    for name in "abc":
        cluster.submit(make_request(name, 20, 2))
        cluster.run()
    kv = kv_of(cluster)
    assert len(kv.cpu_cached_behind(None)) == 9 == kv.num_cpu_free
    early = make_request("early", 8, max_tokens=14)
    late = make_request("late", 5, max_tokens=9, num_sequences=2, temperature=1.0)
    for request in (early, late):
        cluster.submit(request)
        cluster.now += 0.001
    plan_until(cluster, lambda plan: bool(plan.moves.swap_out) and cluster.core.swaps > 0)
    assert kv.num_cpu_free < 9
    cluster.run()
    assert outputs(cluster, early, late) == references(early, late)
    assert kv.num_cpu_free == 9
    assert cluster.core.swaps > 0
    assert plans(replica)


@pytest.mark.parametrize("failing", ["stores", "loads"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_move_of_a_failed_step_is_relied_on_by_nobody(
    make_cluster: MakeCluster, failing: str, in_flight: int
) -> None:
    cluster, replica = small(make_cluster, max_steps_in_flight=in_flight)
    kv = kv_of(cluster)
    cluster.submit(again(OLD) if failing == "loads" else make_request("other", 26, 2))
    cluster.schedule()
    plan = plans(replica)[-1]
    assert plan.moves.swap_in if failing == "loads" else plan.moves.swap_out
    filled = {move.target for move in plan.moves.swap_out}
    cluster.handle(StepAnswered(1, replica.execute(fail=True)))
    assert filled.isdisjoint(kv.cpu_cached_behind(None)) or not filled
    cluster.run()
    cluster.submit(again(OLD, "at last"), again(NEW, "new at last"))
    cluster.run()
    for request in (again(OLD, "at last"), again(NEW, "new at last")):
        assert cluster.tokens[request.request_id] == reference_tokens(request)
    if failing == "loads":
        assert cluster.tokens["again"] == reference_tokens(again(OLD))


def test_a_reset_reaches_what_is_in_cpu_blocks(make_cluster: MakeCluster) -> None:
    cluster, _ = small(make_cluster)
    kv = kv_of(cluster)
    num_cached = kv.num_cached + len(kv.cpu_cached_behind(None))
    assert kv.cpu_cached_behind(None)
    assert cluster.core.state.count_cached(None).num_blocks == num_cached
    cluster.core.state.reset_cache(None)
    assert not kv.cpu_cached_behind(None)
    cluster.submit(again(OLD))
    cluster.run()
    assert cached_tokens(cluster)["again"] == 0


def test_a_salt_finds_its_own_alone(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=40)
    salted = make_request("salted", 16, 3, salt="mine")
    for request in (salted, NEW):
        cluster.submit(request)
        cluster.run()
    plain = msgspec.structs.replace(salted, request_id="plain", cache_key=OLD.cache_key)
    for request in (plain, again(salted, "mine again")):
        cluster.submit(request)
        cluster.run()
    assert cached_tokens(cluster)["plain"] == 0
    assert cached_tokens(cluster)["mine again"] == 14


def test_what_was_computed_of_a_non_finite_sequence_is_not_found_in_cpu_blocks_either(
    make_cluster: MakeCluster,
) -> None:
    cluster, _ = small(make_cluster)
    kv = kv_of(cluster)
    cluster.submit(again(OLD))
    cluster.step()
    assert kv.cpu_cached_behind(None)
    (sequence,) = cluster.groups["again"].sequences
    found = sequence.block_hashes[2][:7]
    kv.distrust(sequence.placement.sequence_id, sequence)
    left = {content.value for block in kv.cpu_cached_behind(None) if (content := kv.cpu_blocks.cache.content(block))}
    assert left.isdisjoint(found)


@pytest.mark.parametrize("windows", [(6,), (0, 4), (4, 9)])
def test_windows_find_what_they_see(make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1, max_num_batched_tokens=8)
    num_blocks = 14 * len(windows)
    replica = cluster.join(num_blocks=num_blocks, block_size=2, num_cpu_blocks=2 * num_blocks, windows=windows)
    requests = [OLD, NEW, make_request("third", 26, 2), again(OLD), again(NEW, "new again")]
    roomy = make_cluster()
    roomy.join(num_blocks=400, block_size=2, windows=windows)
    for request in requests:
        for each in (cluster, roomy):
            each.submit(request)
            each.run()
    assert cluster.tokens == roomy.tokens
    assert moved(plan.moves.swap_in for plan in plans(replica)) > 0
    assert cached_tokens(cluster)["again"] > 0


def test_a_worker_that_refuses_moves_both_ways_is_sent_none(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    replica = cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=20)
    cluster.leave(1)
    replica.hello = msgspec.structs.replace(replica.hello, schema_version=8, incarnation=2)
    cluster.replicas[2] = replica
    cluster.handle(ReplicaJoined(replica.hello))
    for request in (OLD, NEW, again(OLD)):
        cluster.submit(request)
        cluster.run()
        assert cluster.tokens[request.request_id] == reference_tokens(request)
    assert not any(plan.moves for plan in plans(replica))


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = KVCacheManager(14, 2, prefix_caching=False, num_cpu_blocks=20, cpu_tier=True)
    assert kv.cpu_tier is None
