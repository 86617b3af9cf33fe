"""Blocks found again: at admission, within a step, after preemption; never the last token, never what a step failed."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import StepAnswered
from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.scheduler.kv.prefix_cache import CachedBlock, PrefixCache, block_hashes
from octavo.testing.cluster import Cluster, FakeReplica, make_request, reference_tokens
from octavo.wire.requests import CacheKey, Request
from octavo.wire.steps import Remap, SequenceStart

from ..conftest import MakeCluster
from ..expectations import assert_worker_agrees
from ..views import cached_tokens, computed, group_of, kv_of, num_found, num_held, plans, sequence, sequence_of, table

A, B, C, D, E, F, G, H, I, J, K, L, M, N, X0, X1 = range(100, 116)  # noqa: E741


def prompted(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
    """A request with this very prompt."""
    return msgspec.structs.replace(make_request(name, 1, max_tokens, **sampling), prompt_token_ids=prompt)


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
        growing.append(4)
        assert block_hashes(growing, 2) == [*before, block_hashes(sequence_of([1, 2, 3, 4]), 2)[1]]

    def test_do_not_confuse_tokens_with_their_digits(self) -> None:
        assert block_hashes(sequence_of([1, 256]), 2) != block_hashes(sequence_of([257, 0]), 2)

    def test_of_another_adapter_or_salt_are_others_from_the_first_block_on(self) -> None:
        keys = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc")]
        hashes = [block_hashes(sequence_of([1, 2, 3, 4], adapter=adapter, salt=salt), 2) for adapter, salt in keys]
        assert len({value for values in hashes for value in values}) == 2 * len(keys)

    def test_of_a_key_are_the_same_every_time(self) -> None:
        first, second = (sequence_of([1, 2, 3, 4], adapter="a", salt="b") for _ in range(2))
        assert block_hashes(first, 2) == block_hashes(second, 2)

    @pytest.mark.parametrize(("salted_from", "common"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
    def test_of_another_salt_are_others_from_the_first_block_that_it_counts_in(
        self, salted_from: int, common: int
    ) -> None:
        plain = block_hashes(sequence_of([1] * 6), 2)
        for salt, other in (("a", "b"), ("b", "a")):
            salted = block_hashes(sequence_of([1] * 6, salt=salt, salted_from=salted_from), 2)
            different = block_hashes(sequence_of([1] * 6, salt=other, salted_from=salted_from), 2)
            assert salted[:common] == different[:common] == plain[:common]
            assert len({*salted[common:], *different[common:], *plain[common:]}) == 3 * (3 - common)

    def test_of_a_salt_that_reads_as_tokens_are_not_those_of_the_tokens(self) -> None:
        salted = block_hashes(sequence_of([1, 2, 3], salt="abcd", salted_from=1), 1)
        tokens = block_hashes(sequence_of([1, int.from_bytes(b"abcd", "little"), 2, 3]), 1)
        assert set(salted) & set(tokens) == {salted[0]}

    def test_of_a_fork_go_on_from_its_parents_and_do_not_change_them(self) -> None:
        parent = sequence_of([1, 2, 3])
        before = list(block_hashes(parent, 2))
        child = parent.fork(index=1)
        child.append(4)
        assert block_hashes(child, 2) == [*before, block_hashes(sequence_of([1, 2, 3, 4]), 2)[1]]
        assert block_hashes(parent, 2) == before


class TestIndex:
    @pytest.fixture
    def cache(self) -> PrefixCache:
        return PrefixCache(num_kv_groups=2)

    def test_the_first_holder_of_a_content_stays_the_one_to_be_found(self, cache: PrefixCache) -> None:
        content = CachedBlock(b"a", kv_group=0, depth=0)
        assert cache.insert(content, 5, (1, 7))
        assert not cache.insert(content, 6, (1, 7))
        assert (cache.block(0, b"a"), cache.content(5), cache.content(6)) == (5, content, None)
        cache.remove(6)
        assert cache.block(0, b"a") == 5
        cache.remove(5)
        assert (cache.block(0, b"a"), len(cache)) == (None, 0)

    def test_kv_groups_hold_the_same_content_in_different_blocks(self, cache: PrefixCache) -> None:
        for group, block_id in ((0, 5), (1, 6)):
            assert cache.insert(CachedBlock(b"a", group, 0), block_id, (1, 7))
        assert [cache.block(group, b"a") for group in (0, 1)] == [5, 6]
        cache.check()

    def test_an_entry_is_confirmed_by_the_answer_to_the_step_that_filled_it(self, cache: PrefixCache) -> None:
        cache.insert(CachedBlock(b"a", 0, 0), 5, (1, 7))
        cache.insert(CachedBlock(b"b", 0, 1), 6, (2, 7))
        assert cache.confirmed_block(0, b"a") is None
        cache.step_answered(1, valid=True)
        assert [cache.confirmed_block(0, value) for value in (b"a", b"b", b"c")] == [5, None, None]
        assert cache.block(0, b"b") == 6

    def test_a_failed_steps_entries_go_and_no_others(self, cache: PrefixCache) -> None:
        for step_id, value in ((1, b"a"), (2, b"b"), (3, b"c")):
            cache.insert(CachedBlock(value, 0, 0), 4 + step_id, (step_id, 7))
        cache.step_answered(2, valid=False)
        assert [cache.block(0, value) for value in (b"a", b"b", b"c")] == [5, None, 7]

    def test_a_block_that_was_taken_for_something_else_keeps_its_new_content(self, cache: PrefixCache) -> None:
        cache.insert(CachedBlock(b"a", 0, 0), 5, (1, 7))
        cache.remove(5)
        cache.insert(CachedBlock(b"b", 0, 0), 5, (2, 7))
        cache.step_answered(1, valid=False)
        assert cache.block(0, b"b") == 5

    def test_a_replacement_is_found_in_place_of_the_former(self, cache: PrefixCache) -> None:
        content = CachedBlock(b"a", 1, 0)
        cache.insert(content, 5, (1, 7))
        cache.replace(content, 6)
        cache.step_answered(1, valid=False)
        assert (cache.confirmed_block(1, b"a"), cache.block(0, b"a"), cache.content(5)) == (6, None, None)
        cache.check()


class TestWhatIsAPrefix:
    """Two prompts with much in common; only what is equal from the first token on, in whole blocks, is shared."""

    SEQ0 = (A, B, C, D, E, F, G, H, I, J, K, L, M, N)

    @pytest.mark.parametrize(
        ("prompt", "found"),
        [
            ((A, B, C, D, E, F, G, H, I, J, K, L, M, X0), 3),
            ((X0, X1, A, B, C, D, E, F, G, H, I, J, K, L, M, N), 0),
            # Full blocks only, and never the last token: the fourth block of seq0 has no hash.
            (SEQ0, 3),
            ((*SEQ0, X0, X1), 3),
            ((A, B, C, D, E, F, G, H), 1),
            ((A, B, C, X0, E, F, G, H, I), 0),
            ((A, B, C, D, X0, F, G, H, I), 1),
        ],
    )
    def test_shares_whole_blocks_from_the_first_token_on(
        self, make_cluster: MakeCluster, prompt: tuple[int, ...], found: int
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(block_size=4)
        seq0, seq1 = prompted("seq0", list(self.SEQ0), 3), prompted("seq1", list(prompt), 3)
        cluster.submit(seq0)
        cluster.step()
        theirs = table(cluster, "seq0")
        cluster.submit(seq1)
        cluster.step()
        (ours,) = plans(replica)[1].work[-1].new_block_ids
        assert starts(replica)[1].num_computed == 4 * found
        assert ours[:found] == theirs[:found]
        assert not set(ours[found:]) & set(theirs)
        cluster.run()
        assert cached_tokens(cluster) == {"seq0": 0, "seq1": 4 * found}
        assert cluster.tokens == {"seq0": reference_tokens(seq0), "seq1": reference_tokens(seq1)}


class TestDecode:
    """What decoding fills is found too, under the hash of the whole history, once it is full."""

    def test_two_samples_of_one_prompt_copy_a_block_fill_both_and_are_found(self, make_cluster: MakeCluster) -> None:
        """Prompt A-G, blocks of five: H0 and H1 part in a copy of F-G; with J0 and J1 both blocks are full."""
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(block_size=5)
        request = prompted("r", [A, B, C, D, E, F, G], 5, num_sequences=2, temperature=1.0)
        cluster.submit(request)
        cached, copies, held = [], [], []
        for _ in range(4):
            cluster.step()
            cached.append(kv_of(cluster).num_cached)
            copies.append(len(plans(replica)[-1].moves.copy))
            held.append(num_held(cluster))
        # After the prompt, after H, after I, after J.
        assert cached == [1, 1, 1, 3]
        assert copies == [0, 1, 0, 0]
        assert held == [2, 3, 3, 3]
        cluster.run()
        answers = [reference_tokens(request, index) for index in (0, 1)]
        assert cluster.outputs("r") == answers
        for index, answer in enumerate(answers):
            cluster.submit(prompted(f"next{index}", [*request.prompt_token_ids, *answer[:3], X0], 1))
            cluster.run()
        assert cached_tokens(cluster) == {"r": 0, "next0": 10, "next1": 10}

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_an_answer_is_found_by_who_continues_it(self, make_cluster: MakeCluster, in_flight: int) -> None:
        cluster = make_cluster(max_steps_in_flight=in_flight)
        cluster.join(block_size=4)
        turn = make_request("turn", 6, 11)
        cluster.submit(turn)
        cluster.run()
        follow_up = prompted("next", [*turn.prompt_token_ids, *cluster.tokens["turn"], 1, 2, 3], 5)
        cluster.submit(follow_up)
        cluster.run()
        assert cached_tokens(cluster)["next"] == 16
        assert cluster.tokens["next"] == reference_tokens(follow_up)


class TestDuplicates:
    """Two sequences decode the same; the later one is pointed at the block that the earlier one has filled."""

    def test_a_block_filled_a_second_time_is_given_up_for_the_first(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(block_size=4)
        early, late = twins(cluster)
        for _ in range(2):
            cluster.step()
        own = table(cluster, "late")[1]
        cluster.schedule()
        # The step that fills its block: pointed at the other already, its own kept until the step is answered.
        shared = table(cluster, "early")[1]
        assert table(cluster, "late")[1] == shared
        assert [kv_of(cluster).ref_count(block_id) for block_id in (shared, own)] == [2, 1]
        assert plans(replica)[-1].remaps == []
        late_id = sequence(cluster, "late").placement.sequence_id
        cluster.handle(StepAnswered(1, replica.execute()))
        assert kv_of(cluster).ref_count(own) == 0
        cluster.schedule()
        assert plans(replica)[-1].remaps == [Remap(late_id, kv_group=0, logical_index=1, block_id=shared)]
        cluster.run()
        assert cluster.tokens == {"early": reference_tokens(early), "late": reference_tokens(late)}

    def test_no_table_is_pointed_at_a_block_whose_step_may_still_fail(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(block_size=4)
        requests = [make_request(name, 6, 8, shared=6) for name in ("one", "two")]
        cluster.submit(*requests)
        cluster.run()
        # Both fill their second block in the same step.
        assert all(plan.remaps == [] for plan in plans(replica))
        assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}

    def test_a_remap_is_told_though_the_step_after_it_was_sent_before_the_token_was_known(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=2)
        replica = cluster.join(block_size=4)
        early = make_request("early", 6, 16, shared=6)
        cluster.submit(early)
        for _ in range(4):
            cluster.step()
        late = msgspec.structs.replace(early, request_id="late")
        cluster.submit(late)
        cluster.run()
        assert sum(len(plan.remaps) for plan in plans(replica)) > 0
        assert cluster.tokens == {"early": reference_tokens(early), "late": reference_tokens(late)}

    def test_a_duplicate_that_nobody_holds_is_not_taken_from_those_who_need_a_free_block(
        self, make_cluster: MakeCluster
    ) -> None:
        """The earlier one has ended, so its block is free: it may be the very one that another is to be given."""
        for num_blocks in range(6, 16):
            cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
            cluster.join(block_size=2, num_blocks=num_blocks)
            early, late = make_request("early", 3, 4, shared=3), make_request("late", 3, 5, shared=3)
            others = [make_request(f"other{i}", 2, 4) for i in range(3)]
            cluster.submit(early)
            cluster.step()
            cluster.submit(late, *others)
            cluster.run()
            assert cluster.tokens["late"] == reference_tokens(late)

    def test_samples_that_fork_before_a_remap_is_told_have_it_too(self, make_cluster: MakeCluster) -> None:
        """A prompt whose logprobs are wanted is computed again beside one that holds it, in two chunks."""
        cluster = make_cluster(max_steps_in_flight=1, max_num_batched_tokens=9)
        replica = cluster.join(block_size=4)
        holder = make_request("holder", 12, 40, shared=12)
        again = make_request("again", 12, 6, shared=12, num_sequences=2, temperature=1.0, prompt_logprobs=0)
        cluster.submit(holder)
        for _ in range(3):
            cluster.step()
        cluster.submit(again)
        for _ in range(4):
            cluster.step()
            assert_worker_agrees(cluster.core.replicas[1], replica)
        fork = next(plan for plan in plans(replica) if plan.forks)
        assert len(fork.remaps) == 2 * 2
        assert [table(cluster, "again", index)[:2] for index in (0, 1)] == [table(cluster, "holder")[:2]] * 2
        cluster.run()
        assert cluster.outputs("again") == [reference_tokens(again, index) for index in (0, 1)]

    def test_samples_that_recompute_a_cached_prompt_leak_nothing(self, make_cluster: MakeCluster) -> None:
        """Prompt logprobs need every row, so what is cached is computed again, and given up again."""
        for block_size, prompt_length in ((4, 7), (4, 8), (1, 6), (2, 5)):
            cluster = make_cluster(max_steps_in_flight=1)
            cluster.join(block_size=block_size)
            cluster.submit(make_request("first", prompt_length, 4, shared=prompt_length))
            cluster.run()
            again = make_request(
                "again", prompt_length, 4, shared=prompt_length, num_sequences=2, temperature=1.0, prompt_logprobs=1
            )
            cluster.submit(again)
            cluster.run()
            assert cluster.outputs("again") == [reference_tokens(again, index) for index in (0, 1)]
            assert num_held(cluster) == 0


def twins(cluster: Cluster) -> tuple[Request, Request]:
    """Two equal requests, one a step ahead of the other."""
    early, late = (make_request(name, 6, 8, shared=6) for name in ("early", "late"))
    cluster.submit(early)
    cluster.step()
    cluster.submit(late)
    return early, late


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (CacheKey("adapter", "salt"), 12),
        (CacheKey("adapter", "other"), 0),
        (CacheKey("other", "salt"), 0),
        (CacheKey("", "salt"), 0),
        (CacheKey(), 0),
    ],
)
def test_requests_with_another_adapter_or_salt_share_nothing(
    make_cluster: MakeCluster, key: CacheKey, found: int
) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    first, second = (make_request(name, 14, 2, shared=14) for name in ("first", "second"))
    cluster.submit(msgspec.structs.replace(first, cache_key=CacheKey("adapter", "salt")))
    cluster.run()
    cluster.submit(msgspec.structs.replace(second, cache_key=key))
    cluster.run()
    assert cached_tokens(cluster) == {"first": 0, "second": found}


def starts(replica: FakeReplica) -> list[SequenceStart]:
    return [start for plan in plans(replica) for start in plan.starts]


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_end(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=4)
    first, again = make_request("first", 16, 3, shared=16), make_request("again", 16, 3, shared=16)
    cluster.submit(first)
    cluster.run()
    cluster.submit(again)
    cluster.run()
    # All 16 are in full blocks, but the last of them is needed for its logits.
    assert cached_tokens(cluster) == {"first": 0, "again": 12}
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
    assert kv_of(cluster).num_free == 400 - 512 // 16 - 32 * 2
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}
    assert sorted(cached_tokens(cluster).values()) == [0, *[512] * 31]


def test_a_preempted_group_finds_what_nobody_has_taken_since(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
    replica = cluster.join(num_blocks=12, block_size=2)
    cluster.submit(make_request("early", 8, 8), make_request("late", 8, 8))
    cluster.run()
    assert cluster.core.preemptions > 0
    assert starts(replica)[2].num_computed > 0
    # What is reported is what the request found when it came.
    assert cached_tokens(cluster)["late"] == 0


def test_cached_blocks_give_way_to_new_ones_oldest_and_tails_first(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
    cluster.join(num_blocks=10, block_size=2)
    # Three full blocks each, and one with a single token.
    old, new = make_request("old", 7, 1), make_request("new", 7, 1)
    for request in (old, new):
        cluster.submit(request)
        cluster.run()
    kv = kv_of(cluster)
    assert (kv.num_cached, kv.num_free) == (6, 10)
    # Four blocks hold nothing worth keeping; the fifth that it needs is the tail of the oldest chain.
    cluster.submit(make_request("taker", 9, 1))
    cluster.run()
    for request in (new, old):
        cluster.submit(msgspec.structs.replace(request, request_id=f"{request.request_id} again"))
        cluster.run()
    assert cached_tokens(cluster) == {"old": 0, "new": 0, "taker": 0, "new again": 6, "old again": 4}


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
    # Four blocks were filled by the first, and nobody could have found those of the second.
    assert kv_of(cluster).num_cached == (0 if failing == 0 else 4)
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}


def test_blocks_of_a_request_aborted_in_a_step_that_fails_are_not_found(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=2)
    cluster.submit(make_request("aborted", 8, 4, shared=8))
    cluster.schedule()
    cluster.abort("aborted")
    cluster.handle(StepAnswered(1, replica.execute(fail=True)))
    assert kv_of(cluster).num_cached == 0


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


def test_prompt_logprobs_need_every_row_and_bypass_what_is_cached(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=4)
    cluster.submit(make_request("first", 14, 1, shared=14))
    cluster.run()
    again = make_request("again", 14, 3, shared=14, prompt_logprobs=0)
    cluster.submit(again)
    cluster.run()
    assert computed(replica) == [14, 14, 1, 1]
    assert cached_tokens(cluster)["again"] == 0
    (first, *others) = cluster.deltas["again", 0]
    assert len(first.prompt_logprobs) == 13
    assert not any(delta.prompt_logprobs for delta in others)
    # Once they are delivered nothing is bypassed any more.
    cluster.submit(msgspec.structs.replace(again, request_id="third", sampling=make_request("r", 1, 1).sampling))
    cluster.run()
    assert cached_tokens(cluster)["third"] == 12


def test_a_request_preempted_after_its_prompt_logprobs_were_delivered_finds_its_prompt(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=4)
    cluster.submit(make_request("r", 14, 6, prompt_logprobs=0))
    for _ in range(2):
        cluster.step()
    cluster.step(fail=True)
    cluster.run()
    again = starts(replica)[1]
    assert (again.num_computed, again.sampling.prompt_logprobs) == (12, None)


class TestEviction:
    """Blocks are taken from the free list: those worth nothing, then the longest unused; a chain from its tail."""

    @staticmethod
    def filled(kv: KVCacheManager, prompt: list[int], step_id: int) -> Sequence:
        """A sequence whose full blocks are indexed."""
        one = sequence_of(prompt)
        kv.allocate(group_of(one), 1)
        one.placement.num_computed = len(prompt)
        kv.index(one, step_id)
        return one

    @staticmethod
    def taken(kv: KVCacheManager) -> Iterator[int]:
        """The blocks that are taken one after the other."""
        while kv.num_free:
            one = sequence_of([0])
            kv.allocate(group_of(one), 1)
            yield kv.block_table(one)[0][0]

    def test_of_blocks_given_up_together_the_longest_prefix_goes_first_then_the_lowest_block(self) -> None:
        kv = KVCacheManager(8, block_size=2)
        # Blocks 0-2 and 3-5, the third of each partly filled; 6 and 7 never used.
        sequences = [self.filled(kv, [10 * n + i for i in range(5)], step_id=1) for n in (2, 1)]
        for one in sequences:
            kv.free(one, outstanding_step_id=1)
        kv.step_answered(1, valid=True)
        order = list(self.taken(kv))
        assert set(order[:4]) == {2, 5, 6, 7}
        assert order[4:] == [1, 4, 0, 3]

    def test_the_longest_unused_goes_first_whatever_its_prefix(self) -> None:
        kv = KVCacheManager(4, block_size=2)
        old, new = (self.filled(kv, prompt, step_id=1) for prompt in ([1, 2], [3, 4, 5, 6]))
        kv.step_answered(1, valid=True)
        kv.free(old)
        kv.free(new)
        assert list(self.taken(kv)) == [3, 0, 2, 1]

    def test_a_hit_makes_a_block_the_last_to_go(self) -> None:
        kv = KVCacheManager(3, block_size=2)
        for prompt in ([1, 2], [3, 4]):
            kv.free(self.filled(kv, prompt, step_id=1))
        kv.step_answered(1, valid=True)
        hit = sequence_of([1, 2, 9])
        kv.allocate(group_of(hit), 1)
        assert kv.block_table(hit) == [[0, 2]]
        kv.free(hit)
        assert list(self.taken(kv)) == [2, 1, 0]

    def test_a_taken_block_is_no_longer_found(self) -> None:
        kv = KVCacheManager(2, block_size=2)
        kv.free(self.filled(kv, [1, 2, 3, 4], step_id=1))
        assert num_found(kv, [1, 2, 3, 4, 5]) == 4
        kv.allocate(group_of(sequence_of([7])), 1)
        assert num_found(kv, [1, 2, 3, 4, 5]) == 2
        assert kv.num_cached == 1


def test_without_prefix_caching_everything_is_computed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, prefix_caching=False)
    replica = cluster.join(block_size=4)
    for name in ("first", "again"):
        cluster.submit(make_request(name, 16, 1, shared=16))
        cluster.run()
    assert computed(replica) == [16, 16]
    assert cached_tokens(cluster) == {"first": 0, "again": 0}
    assert kv_of(cluster).num_cached == 0
