"""KV groups: a block table each, sliding windows that give blocks back, and hits that all of them agree on."""

import itertools
import random
from typing import Any

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.scheduler.kv.prefix_cache import CachedBlock, PrefixCache, PrefixLookup, block_hashes
from octavo.testing.cluster import VOCABULARY, make_request
from octavo.wire.base import NULL_BLOCK
from octavo.wire.requests import RejectReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.worker.fake.runner import expected_tokens

from ..conftest import MakeCluster
from ..views import cached_tokens, group_of, kv_of, num_found, num_held, plans, sequence, sequence_of, table

WINDOWS = [(6,), (0, 6), (4, 9), (1,), (5, 5), (0, 0), (3, 0, 8)]
# Sequences must grow to run out of blocks.
WIDE_WINDOWS = [(12,), (0, 6), (8, 13), (0, 0), (3, 0, 8)]


def references(request: Request, windows: tuple[int, ...]) -> list[list[int]]:
    """What the fake model generates when its widest group sees so far."""
    widest = 0 if 0 in windows else max(windows)
    sampling = request.sampling
    return [
        expected_tokens(request.prompt_token_ids, sampling, index, sampling.max_tokens, VOCABULARY, widest)
        for index in range(sampling.num_sequences)
    ]


def sampled(name: str, prompt_length: int, max_tokens: int, count: int, **sampling: Any) -> Request:
    return make_request(name, prompt_length, max_tokens, num_sequences=count, temperature=1.0, seed=5, **sampling)


def first_visible(window: int, position: int, block_size: int) -> int:
    """The first logical block with a token that the one at `position` sees."""
    return 0 if not window else max(0, position - window + 1) // block_size


class TestTokens:
    @pytest.mark.parametrize("windows", WINDOWS, ids=str)
    @pytest.mark.parametrize("block_size", [1, 2, 4])
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_are_what_the_model_generates_alone(
        self, make_cluster: MakeCluster, windows: tuple[int, ...], block_size: int, in_flight: int
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=in_flight, max_num_batched_tokens=12)
        cluster.join(num_blocks=600, block_size=block_size, windows=windows)
        requests = [sampled(f"r{n}", 4 * n + 1, 9, count=n) for n in (1, 2, 4)]
        cluster.submit(*requests)
        cluster.run()
        for request in requests:
            assert cluster.outputs(request.request_id) == references(request, windows)
        assert num_held(cluster) == 0

    @pytest.mark.parametrize("windows", WIDE_WINDOWS, ids=str)
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_survive_preemption(
        self,
        make_cluster: MakeCluster,
        windows: tuple[int, ...],
        preemption: Preemption,
        in_flight: int,
        prefix_caching: bool,
    ) -> None:
        cluster = make_cluster(
            max_steps_in_flight=in_flight,
            max_num_batched_tokens=12,
            preemption=preemption,
            prefix_caching=prefix_caching,
            watermark=0.0,
        )
        num_blocks = 27 * len(windows)
        cluster.join(num_blocks=num_blocks, block_size=2, windows=windows, num_cpu_blocks=num_blocks)
        requests = [sampled(f"r{n}", 3, 15, count=1 + n % 3) for n in range(9)]
        cluster.submit(*requests)
        cluster.run()
        assert cluster.core.preemptions > 0
        assert (cluster.core.swaps > 0) is (preemption is Preemption.SWAP)
        for request in requests:
            assert cluster.outputs(request.request_id) == references(request, windows)

    @pytest.mark.parametrize("windows", [(6,), (0, 6), (4, 9)], ids=str)
    @pytest.mark.parametrize("step", range(6))
    def test_survive_a_failed_step(self, make_cluster: MakeCluster, windows: tuple[int, ...], step: int) -> None:
        cluster = make_cluster(max_num_batched_tokens=12)
        cluster.join(num_blocks=200, block_size=2, windows=windows)
        requests = [sampled(f"r{n}", 7 + n, 7, count=2, shared=6) for n in range(3)]
        cluster.submit(*requests)
        for number in range(step + 1):
            cluster.step(fail=number == step)
        cluster.run()
        for request in requests:
            assert cluster.outputs(request.request_id) == references(request, windows)

    @pytest.mark.parametrize("windows", WIDE_WINDOWS, ids=str)
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    def test_of_beams_are_what_an_undisturbed_search_finds(
        self, make_cluster: MakeCluster, windows: tuple[int, ...], preemption: Preemption
    ) -> None:
        request = make_request("r", 3, 12, num_sequences=3, beam=BeamSearch(3, 1.0, EarlyStopping.NEVER))
        outputs = []
        for num_blocks, others in ((200, 0), (25, 4)):
            cluster = make_cluster(max_num_batched_tokens=12, preemption=preemption, watermark=0.0)
            count = num_blocks * len(windows)
            cluster.join(num_blocks=count, block_size=2, windows=windows, num_cpu_blocks=count)
            cluster.submit(*(make_request(f"o{i}", 3, 20) for i in range(others)), request)
            cluster.run()
            outputs.append(cluster.outputs("r"))
        assert cluster.core.preemptions > 0
        assert outputs[0] == outputs[1]


class TestBlocksBehindTheWindow:
    def test_are_given_back_and_stand_as_null_in_the_table(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join(num_blocks=64, block_size=4, windows=(0, 6))
        cluster.submit(make_request("r", 5, 40))
        for num_computed in range(5, 41):
            cluster.step()
            assert sequence(cluster, "r").placement.num_computed == num_computed
            everything, window = (table(cluster, "r", kv_group=group) for group in (0, 1))
            passed = first_visible(6, num_computed, 4)
            assert len(everything) == len(window) == -(-num_computed // 4)
            assert [block_id == NULL_BLOCK for block_id in window] == [i < passed for i in range(len(window))]
            assert NULL_BLOCK not in everything
            assert num_held(cluster) == len(everything) + len(window) - passed

    @pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
    def test_a_long_answer_holds_no_more_than_its_window(self, make_cluster: MakeCluster, window: int) -> None:
        cluster = make_cluster(max_steps_in_flight=2)
        cluster.join(num_blocks=64, block_size=4, windows=(window,))
        cluster.submit(make_request("r", 3, 100))
        most = 0
        while cluster.groups:
            cluster.step()
            most = max(most, num_held(cluster))
        # Those the window touches, and one whose step is not answered.
        assert most <= (window + 2) // 4 + 1 + 1

    def test_stay_until_the_step_that_still_reads_them_is_answered(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join(num_blocks=64, block_size=4, windows=(4,))
        cluster.submit(make_request("r", 6, 20))
        cluster.step()
        (first, second) = table(cluster, "r")
        # The token at position 6 is the last that sees the first block.
        cluster.schedule()
        assert table(cluster, "r") == [NULL_BLOCK, second]
        assert kv_of(cluster).ref_count(first) == 1
        cluster.step()
        assert kv_of(cluster).ref_count(first) == 0

    def test_a_prompt_longer_than_the_window_is_computed_in_chunks(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, max_num_batched_tokens=5)
        cluster.join(num_blocks=16, block_size=2, windows=(4,))
        request = make_request("r", 23, 3)
        cluster.submit(request)
        held = []
        while cluster.groups:
            cluster.step()
            held.append(num_held(cluster))
        # Twelve blocks at first, then fewer and fewer.
        assert held == sorted(held, reverse=True)
        assert (held[0], held[4]) == (11, 2)
        assert cluster.outputs("r") == references(request, (4,))


class TestManyGroups:
    def test_a_fork_and_a_copy_concern_all_of_them(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(num_blocks=64, block_size=4, windows=(0, 6, 0))
        cluster.submit(sampled("r", 7, 4, count=2))
        for _ in range(2):
            cluster.step()
        prompt, first = plans(replica)
        (work,) = prompt.work
        assert [len(blocks) for blocks in work.new_block_ids] == [2, 2, 2]
        assert len(first.moves.copy) == 3
        assert [(remap.kv_group, remap.logical_index) for remap in first.remaps] == [(0, 1), (1, 1), (2, 1)]
        assert [move.target for move in first.moves.copy] == [remap.block_id for remap in first.remaps]

    def test_a_new_block_is_one_for_each(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(num_blocks=64, block_size=4, windows=(0, 6))
        cluster.submit(make_request("r", 8, 2))
        cluster.run()
        assert [len(blocks) for blocks in plans(replica)[1].work[0].new_block_ids] == [1, 1]

    def test_share_the_capacity(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(num_blocks=11, block_size=4, windows=(0, 6))
        assert cluster.core.status().capacity_tokens == 5 * 4
        cluster.submit(make_request("fits", 16, 4), make_request("too long", 17, 4))
        assert cluster.rejected.keys() == {"too long"}
        assert cluster.rejected["too long"].reason is RejectReason.NEVER_FITS_KV
        cluster.run()

    def test_of_one_sequence_hold_different_blocks(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join(num_blocks=64, block_size=4, windows=(0, 0))
        cluster.submit(make_request("r", 16, 2, shared=16))
        cluster.step()
        assert not set(table(cluster, "r", kv_group=0)) & set(table(cluster, "r", kv_group=1))


class TestHits:
    @pytest.mark.parametrize("windows", WINDOWS, ids=str)
    def test_reach_as_far_as_every_group_holds_what_it_would_see(self, windows: tuple[int, ...]) -> None:
        """Caches with holes, against the plainest search for the longest beginning."""
        rng, block_size, limit = random.Random(4), 2, 8
        lengths = set()
        for _ in range(400):
            cache, wanted = PrefixCache(len(windows)), sequence_of(list(range(limit * block_size + 1)))
            hashes = block_hashes(wanted, block_size)
            chance = rng.choice((0.6, 0.9))
            held = {
                (group, depth): len(windows) * depth + group
                for group, depth in itertools.product(range(len(windows)), range(limit))
                if rng.random() < chance
            }
            # Some of it in CPU blocks.
            cpu_cache, in_cpu = PrefixCache(len(windows)), {place for place in held if rng.random() < 0.3}
            for (group, depth), block_id in held.items():
                tier = cpu_cache if (group, depth) in in_cpu else cache
                tier.insert(CachedBlock(hashes[depth], group, depth), block_id, (1, 7))
            (begin,) = PrefixLookup(cache, cpu_cache, block_size, windows).begins([wanted])
            needed = {
                count: [
                    (group, depth)
                    for group, window in enumerate(windows)
                    for depth in range(first_visible(window, count * block_size, block_size), count)
                ]
                for count in range(limit + 1)
            }
            assert begin.num_blocks == max(count for count in needed if held.keys() >= set(needed[count]))
            lengths.add(begin.num_blocks)
            for group, blocks in enumerate(begin.found):
                first = first_visible(windows[group], begin.num_blocks * block_size, block_size)
                loads = {depth: block_id for (kv_group, depth), block_id in begin.loads.items() if kv_group == group}
                assert loads.keys() == {d for d in range(first, begin.num_blocks) if (group, d) in in_cpu}
                assert [loads.get(depth, block_id) for depth, block_id in enumerate(blocks)] == [
                    held[group, depth] if depth >= first else NULL_BLOCK for depth in range(begin.num_blocks)
                ]
        # With a window of one token nothing of the past is needed.
        assert len(lengths) > 3 or windows == (1,)

    def test_need_only_what_the_window_sees_from_there(self) -> None:
        """Windowed blocks go one by one as they are passed, so they are the first to be taken for something else."""
        kv = KVCacheManager(8, block_size=2, windows=(0, 4))
        first = sequence_of(list(range(8)))
        kv.allocate(group_of(first), 1)
        for step_id in range(1, 5):
            first.placement.num_computed += 2
            kv.index(first, step_id)
            kv.slide(first, step_id)
            kv.step_answered(step_id, valid=True)
        kv.free(first)
        assert num_found(kv, [*range(8), 99]) == 8
        kv.allocate(group_of(sequence_of([77])), 1)
        # The two that were taken are those that the window had passed: the end is still found, the middle is not.
        assert num_found(kv, [*range(8), 99]) == 8
        assert num_found(kv, [*range(4), 99]) == 0

    def test_of_one_sequence_do_not_serve_another_that_looks_back_further(self) -> None:
        """The first finds its end in the cache, so nothing before its window; the second branches off before that."""
        cache, tokens = PrefixCache(1), list(range(28))
        first, second = sequence_of([*tokens, 98, 99]), sequence_of([*tokens[:20], 98, 99])
        hashes = block_hashes(first, 4)
        for depth in (5, 6):
            cache.insert(CachedBlock(hashes[depth], 0, depth), depth, (1, 7))
        begins = PrefixLookup(cache, PrefixCache(1), 4, (6,)).begins([first, second])
        assert [(begin.num_blocks, begin.leader) for begin in begins] == [(7, None), (0, None)]

    def test_bring_null_blocks_to_the_worker(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(num_blocks=64, block_size=4, windows=(0, 6))
        first, again = make_request("first", 24, 2, shared=24), make_request("again", 27, 2, shared=24)
        cluster.submit(first)
        cluster.run()
        cluster.submit(again)
        cluster.run()
        assert cached_tokens(cluster) == {"first": 0, "again": 24}
        (work,) = plans(replica)[2].work
        everything, window = work.new_block_ids
        assert NULL_BLOCK not in everything
        # Position 24 sees from position 19 on, which is in block 4.
        assert [block_id == NULL_BLOCK for block_id in window] == [True] * 4 + [False] * 3
        assert cluster.outputs("again") == references(again, (0, 6))


def test_swapped_tables_keep_their_null_blocks_and_what_they_share() -> None:
    kv = KVCacheManager(16, block_size=4, windows=(5, 0), num_cpu_blocks=16)
    parent = sequence_of(list(range(14)))
    kv.allocate(group_of(parent), 1)
    parent.placement.num_computed = 14
    kv.slide(parent, step_id=1)
    kv.step_answered(1, valid=True)
    child = parent.fork(index=1)
    kv.fork(parent, child)
    group = group_of(parent, child)
    out = kv.swap_out(group, 1)
    # Position 14 sees from position 10 on: two blocks of the window and all four of the other group, once.
    assert len(out) == len({move.source for move in out}) == 2 + 4
    assert (kv.num_free, kv.num_cpu_free) == (16, 10)
    back = kv.swap_in(group)
    assert [move.source for move in back] == [move.target for move in out]
    assert kv.block_table(parent) == kv.block_table(child)
    window, everything = kv.block_table(parent)
    assert window[:2] == [NULL_BLOCK] * 2
    assert NULL_BLOCK not in [*window[2:], *everything]
    assert (kv.num_free, kv.num_cpu_free) == (10, 16)
    kv.check()
