"""Blocks found again: at admission, within a step, after preemption; never the last token, never what a step failed."""

import msgspec
import pytest

from octavo.scheduler.events import StepAnswered
from octavo.scheduler.prefix_cache import PrefixCache, block_hashes
from octavo.scheduler.sequence import Sequence, SequenceGroup
from octavo.testing.cluster import FRONTEND, Cluster, FakeReplica, make_request, reference_tokens
from octavo.wire.requests import Deltas
from octavo.wire.steps import StepPlan

from .conftest import MakeCluster


def computed(replica: FakeReplica) -> list[int]:
    """Tokens computed by each plan so far."""
    return [sum(w.num_tokens for w in plan.work) for plan in replica.received if isinstance(plan, StepPlan)]


def cached(cluster: Cluster) -> dict[str, int]:
    """Cached prompt tokens as reported with each request's deltas."""
    deltas = [delta for message in cluster.to_frontend if isinstance(message, Deltas) for delta in message.deltas]
    return {delta.request_id: delta.cached_prompt_tokens for delta in deltas}


def sequence_of(prompt: list[int]) -> Sequence:
    request = msgspec.structs.replace(make_request("r", 1, 4), prompt_token_ids=prompt)
    return SequenceGroup.of(request, FRONTEND, 0.0, 1).sequences[0]


class TestHashes:
    def test_cover_full_blocks_only(self) -> None:
        assert [len(block_hashes(sequence_of([1] * n), 4)) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]

    def test_depend_on_all_that_comes_before(self) -> None:
        first, second = block_hashes(sequence_of([1, 2, 3, 4]), 2), block_hashes(sequence_of([9, 2, 3, 4]), 2)
        assert first[0] != second[0]
        assert first[1] != second[1]
        assert block_hashes(sequence_of([3, 4]), 2)[0] != first[1]

    def test_grow_with_the_sequence_across_the_border_of_prompt_and_answer(self) -> None:
        growing = sequence_of([1, 2, 3])
        before = list(block_hashes(growing, 2))
        growing.num_in_flight = 1
        growing.append(4)
        assert block_hashes(growing, 2) == [*before, block_hashes(sequence_of([1, 2, 3, 4]), 2)[1]]

    def test_do_not_confuse_tokens_with_their_digits(self) -> None:
        assert block_hashes(sequence_of([1, 256]), 2) != block_hashes(sequence_of([257, 0]), 2)


class TestIndex:
    def test_finds_the_longest_prefix_that_is_held(self) -> None:
        cache = PrefixCache()
        for value, block_id in ((b"a", 5), (b"b", 3), (b"d", 9)):
            cache.insert(value, block_id)
        assert cache.find([b"a", b"b", b"c", b"d"]) == [5, 3]
        assert cache.find([b"x", b"a"]) == []

    def test_the_first_holder_of_a_content_stays_the_one_to_be_found(self) -> None:
        cache = PrefixCache()
        cache.insert(b"a", 5)
        cache.insert(b"a", 6)
        assert (5 in cache, 6 in cache) == (True, False)
        cache.remove(6)
        assert cache.find([b"a"]) == [5]
        cache.remove(5)
        assert cache.find([b"a"]) == []


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_end(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=4)
    first, again = make_request("first", 16, 3, shared=16), make_request("again", 16, 3, shared=16)
    cluster.submit(first)
    cluster.run()
    cluster.submit(again)
    cluster.run()
    # All 16 are in full blocks, but the last of them is needed for its logits.
    assert cached(cluster) == {"first": 0, "again": 12}
    assert computed(replica) == [16, 1, 1, 4, 1, 1]
    assert cluster.tokens["again"] == reference_tokens(again)


def test_requests_that_arrive_together_compute_their_common_prefix_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=2048, max_steps_in_flight=1)
    replica = cluster.join(num_blocks=400, block_size=16)
    requests = [make_request(f"r{i:02}", 512 + 32, 4, shared=512) for i in range(32)]
    cluster.submit(*requests)
    cluster.step()
    assert computed(replica) == [512 + 32 * 32]
    # The prefix once, and two blocks and a first decode's for each.
    assert cluster.core.replicas[1].kv.num_free == 400 - 512 // 16 - 32 * 2
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}
    assert sorted(cached(cluster).values()) == [0, *[512] * 31]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_answer_is_found_by_who_continues_it(make_cluster: MakeCluster, in_flight: int) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight)
    cluster.join(block_size=4)
    turn = make_request("turn", 6, 11)
    cluster.submit(turn)
    cluster.run()
    history = turn.prompt_token_ids + cluster.tokens["turn"]
    follow_up = msgspec.structs.replace(make_request("next", 1, 5), prompt_token_ids=[*history, 1, 2, 3])
    cluster.submit(follow_up)
    cluster.run()
    assert cached(cluster)["next"] == 16
    assert cluster.tokens["next"] == reference_tokens(follow_up)


def test_a_preempted_group_finds_what_nobody_has_taken_since(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
    replica = cluster.join(num_blocks=12, block_size=2)
    cluster.submit(make_request("early", 8, 8), make_request("late", 8, 8))
    cluster.run()
    assert cluster.core.preemptions > 0
    resumed = [start for plan in replica.received if isinstance(plan, StepPlan) for start in plan.starts][2]
    assert resumed.num_computed > 0
    # What is reported is what the request found when it came.
    assert cached(cluster)["late"] == 0


def test_cached_blocks_give_way_to_new_ones_oldest_and_tails_first(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
    cluster.join(num_blocks=10, block_size=2)
    # Three full blocks each, and one with a single token.
    old, new = make_request("old", 7, 1), make_request("new", 7, 1)
    for request in (old, new):
        cluster.submit(request)
        cluster.run()
    kv = cluster.core.replicas[1].kv
    assert (kv.num_cached, kv.num_free) == (6, 10)
    # Four blocks hold nothing worth keeping; the fifth that it needs is the tail of the oldest chain.
    cluster.submit(make_request("taker", 9, 1))
    cluster.run()
    for request in (new, old):
        cluster.submit(msgspec.structs.replace(request, request_id=f"{request.request_id} again"))
        cluster.run()
    assert cached(cluster) == {"old": 0, "new": 0, "taker": 0, "new again": 6, "old again": 4}


def test_cached_blocks_never_keep_a_request_out(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(num_blocks=8, block_size=2)
    for i in range(6):
        request = make_request(f"r{i}", 10, 6)
        cluster.submit(request)
        cluster.run()
        assert cluster.tokens[request.request_id] == reference_tokens(request)


def test_sharing_lets_in_what_would_not_fit_twice(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=64, max_steps_in_flight=1, watermark=0.0)
    cluster.join(num_blocks=12, block_size=2)
    cluster.submit(*(make_request(f"r{i}", 18, 2, shared=16) for i in range(3)))
    cluster.step()
    assert len(cluster.core.replicas[1].running) == 3
    cluster.run()


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_failed_step_wrote_is_never_found(make_cluster: MakeCluster, failing: int) -> None:
    cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=2)
    replica = cluster.join(block_size=2)
    requests = [make_request(f"r{i}", 12, 4, shared=10) for i in range(3)]
    cluster.submit(*requests)
    cluster.schedule()
    cluster.schedule()
    for step in range(2):
        cluster.handle(StepAnswered(1, replica.execute(fail=step == failing)))
    assert cluster.core.replicas[1].kv.num_cached == 0
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}


def test_blocks_of_a_request_aborted_in_a_step_that_fails_are_not_found(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=2)
    cluster.submit(make_request("aborted", 8, 4, shared=8))
    cluster.schedule()
    cluster.abort("aborted")
    cluster.handle(StepAnswered(1, replica.execute(fail=True)))
    assert cluster.core.replicas[1].kv.num_cached == 0


def test_who_shares_a_block_keeps_it_when_its_maker_is_aborted(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=64)
    cluster.join(num_blocks=16, block_size=2)
    maker, sharer = make_request("maker", 10, 8, shared=10), make_request("sharer", 12, 8, shared=10)
    cluster.submit(maker, sharer)
    cluster.step()
    cluster.abort("maker")
    cluster.submit(make_request("greedy", 8, 6))
    cluster.run()
    assert cluster.tokens["sharer"] == reference_tokens(sharer)


def test_without_prefix_caching_everything_is_computed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, prefix_caching=False)
    replica = cluster.join(block_size=4)
    for name in ("first", "again"):
        cluster.submit(make_request(name, 16, 1, shared=16))
        cluster.run()
    assert computed(replica) == [16, 16]
    assert cluster.core.replicas[1].kv.num_cached == 0
