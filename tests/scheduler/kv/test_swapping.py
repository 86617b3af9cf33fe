"""Swapping: what moves, in which order, what waits for it, and that no token is lost or computed twice."""

from collections.abc import Callable
from typing import Any

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.sequence import Sequence, SequenceStatus, new_sequences
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.scenarios import (
    answer,
    beams,
    drain,
    end_sequence,
    outputs,
    plan_until,
    plans,
    references,
    step_until,
    undisturbed,
)
from octavo.wire.base import NULL_BLOCK
from octavo.wire.requests import Request
from octavo.wire.steps import StepPlan

from ..conftest import MakeCluster
from ..views import group_of

Moving = Callable[[StepPlan], bool]

MIXTURE = (
    make_request("one", 9, max_tokens=16),
    make_request("three", 7, max_tokens=12, num_sequences=3, temperature=1.0),
    make_request("beams", 6, max_tokens=10, beam=beams(3)),
    make_request("pair", 5, max_tokens=14, num_sequences=2, temperature=1.0, seed=4),
    make_request("last", 11, max_tokens=9),
)


def swaps_out(plan: StepPlan) -> bool:
    return bool(plan.moves.swap_out)


def swaps_in(plan: StepPlan) -> bool:
    return bool(plan.moves.swap_in)


def arrive(cluster: Cluster, *requests: Request) -> None:
    """One after another, so that the order is theirs."""
    for request in requests:
        cluster.submit(request)
        cluster.now += 0.001


def crowded(make_cluster: MakeCluster, **config: Any) -> Cluster:
    """A pool in which `EARLY` grows until `LATE` must go to CPU memory."""
    cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0, **config)
    cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=14)
    arrive(cluster, EARLY, LATE)
    return cluster


EARLY = make_request("early", 8, max_tokens=14)
LATE = make_request("late", 5, max_tokens=9, num_sequences=2, temperature=1.0)


class TestTokens:
    @pytest.mark.parametrize("num_cpu_blocks", [4, 12, 34])
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("policy", list(Policy))
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.AUTO])
    def test_are_those_that_each_request_generates_alone(
        self, make_cluster: MakeCluster, preemption: Preemption, policy: Policy, in_flight: int, num_cpu_blocks: int
    ) -> None:
        cluster = make_cluster(
            preemption=preemption, policy=policy, max_steps_in_flight=in_flight, max_num_batched_tokens=12
        )
        cluster.join(num_blocks=34, block_size=2, num_cpu_blocks=num_cpu_blocks)
        arrive(cluster, *MIXTURE)
        cluster.run()
        assert outputs(cluster, *MIXTURE) == undisturbed(make_cluster, *MIXTURE)
        assert cluster.core.preemptions > 0
        assert cluster.core.swaps > 0 or num_cpu_blocks == 4

    @pytest.mark.parametrize("windows", [(6,), (0, 4), (4, 9)])
    def test_are_right_where_windows_have_given_blocks_back(
        self, make_cluster: MakeCluster, windows: tuple[int, ...]
    ) -> None:
        cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0)
        pool = 22 * len(windows)
        cluster.join(num_blocks=pool, block_size=2, num_cpu_blocks=pool, windows=windows)
        requests = [make_request(f"r{i}", 9, max_tokens=12, num_sequences=2, temperature=1.0) for i in range(5)]
        arrive(cluster, *requests)
        cluster.run()
        undone = make_cluster()
        undone.join(num_blocks=1000, windows=windows)
        arrive(undone, *requests)
        undone.run()
        assert cluster.core.swaps > 0
        assert outputs(cluster, *requests) == outputs(undone, *requests)

    def test_come_without_computing_anything_twice(self, make_cluster: MakeCluster) -> None:
        cluster = crowded(make_cluster, prefix_caching=False, max_steps_in_flight=1)
        cluster.run()
        computed = sum(work.num_tokens for plan in plans(cluster.replicas[1]) for work in plan.work)
        assert cluster.core.swaps > 0
        assert computed == (8 + 13) + (5 + 2 * 8)


class TestMoves:
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_take_each_block_once_however_many_share_it(self, make_cluster: MakeCluster, in_flight: int) -> None:
        """After 7 tokens each, of 5 prompt tokens, two sequences share 2 of 4 + 4 blocks."""
        cluster = crowded(make_cluster, max_steps_in_flight=in_flight)
        kv, late = cluster.core.replicas[1].kv, cluster.groups["late"]
        step_until(cluster, lambda: late.swaps > 0)
        (out,) = [plan for plan in plans(cluster.replicas[1]) if swaps_out(plan)]
        num_full, num_own = 5 // 2, -(-late.live[0].placement.num_computed // 2) - 5 // 2
        assert len(out.moves.swap_out) == num_full + 2 * num_own == kv.num_cpu_blocks - kv.num_cpu_free
        assert len({move.source for move in out.moves.swap_out}) == len(out.moves.swap_out)
        assert len({move.target for move in out.moves.swap_out}) == len(out.moves.swap_out)
        back = plan_until(cluster, swaps_in)
        assert {move.source for move in back.moves.swap_in} == {move.target for move in out.moves.swap_out}
        cluster.run()

    @pytest.mark.parametrize("windows", [(0,), (0, 40)])
    def test_back_leave_out_what_others_hold_by_then(self, make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
        """8 full blocks of 2 tokens, which are shared again; `short` ends and makes room before `early` does."""
        cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0)
        num_blocks = 20 * len(windows)
        cluster.join(num_blocks=num_blocks, block_size=2, num_cpu_blocks=num_blocks, windows=windows)
        early, late = (make_request(name, 18, max_tokens=20, shared=16) for name in ("early", "late"))
        short = make_request("short", 6, max_tokens=8)
        arrive(cluster, early, short, late)
        kv, group = cluster.core.replicas[1].kv, cluster.groups["late"]
        num_out = len(plan_until(cluster, swaps_out).moves.swap_out)
        num_own = num_out - 8 * len(windows)
        assert num_own > 0
        drain(cluster)
        assert kv.num_to_return(group) <= num_own + len(windows)
        assert len(plan_until(cluster, swaps_in).moves.swap_in) == num_own
        tables = [kv.block_table(cluster.groups[name].live[0]) for name in ("early", "late")]
        assert [blocks[:8] for blocks in tables[0]] == [blocks[:8] for blocks in tables[1]]
        cluster.run()
        assert outputs(cluster, early, short, late) == references(early, short, late)

    def test_out_come_before_the_step_writes_to_the_blocks_they_leave(self, make_cluster: MakeCluster) -> None:
        """The very step that swaps a group out gives its blocks to others: the worker must copy before it computes."""
        cluster = crowded(make_cluster)
        plan = plan_until(cluster, swaps_out)
        left = {move.source for move in plan.moves.swap_out}
        taken = {block for work in plan.work for blocks in work.new_block_ids for block in blocks}
        assert taken
        assert taken <= left
        cluster.run()
        assert outputs(cluster, EARLY, LATE) == references(EARLY, LATE)

    @pytest.mark.parametrize("seed", range(6))
    def test_bring_no_group_back_in_a_step_in_which_one_had_to_go(self, make_cluster: MakeCluster, seed: int) -> None:
        cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0, max_num_batched_tokens=9)
        replica = cluster.join(num_blocks=20, block_size=2, num_cpu_blocks=4 + seed)
        arrive(
            cluster,
            *(make_request(f"{seed}.{i}", 3 + i, 10, num_sequences=1 + i % 2, temperature=1.0) for i in range(6)),
        )
        preemptions = 0
        while cluster.groups:
            cluster.schedule()
            latest = plans(replica)[-1]
            if cluster.core.preemptions > preemptions:
                preemptions = cluster.core.preemptions
                assert not swaps_in(latest)
            cluster.step()
        assert any(map(swaps_in, plans(replica)))
        assert cluster.core.preemptions > cluster.core.swaps


def shape(kv: KVCacheManager, sequences: list[Sequence], num_blocks: int) -> list[list[list[int]]]:
    """Which of the first `num_blocks` entries of all tables are equal: each block by when it is first met."""
    names: dict[int, int] = {NULL_BLOCK: NULL_BLOCK}
    return [
        [[names.setdefault(block, len(names)) for block in blocks[:num_blocks]] for blocks in kv.block_table(each)]
        for each in sequences
    ]


class TestBlocks:
    @staticmethod
    def family(kv: KVCacheManager) -> list[Sequence]:
        """Four sequences of 10 tokens and the next: two that have not computed it yet and so share all blocks, and two
        that have, each with a copy of the partly filled one."""
        first = new_sequences(make_request("r", 10, max_tokens=9))[0]
        kv.allocate(group_of(first), 1)
        first.placement.num_computed = 10
        others = [first.fork(index) for index in (1, 2, 3)]
        sequences = [first, *others]
        for other in others:
            kv.fork(first, other)
        for index, each in enumerate(sequences):
            each.append(index)
            if index > 1:
                kv.extend(each)
                each.placement.num_computed += 1
            kv.slide(each, step_id=1)
        kv.step_answered(1, valid=True)
        return sequences

    @pytest.mark.parametrize("windows", [(0,), (5,), (0, 5)])
    def test_come_back_shared_as_they_went(self, windows: tuple[int, ...]) -> None:
        kv = KVCacheManager(40, 4, windows=windows, num_cpu_blocks=40)
        sequences = self.family(kv)
        group = group_of(*sequences)
        before, free = shape(kv, sequences, 3), kv.num_free
        out = kv.swap_out(group, 1)
        assert kv.num_free == 40
        assert kv.num_cpu_free == 40 - len(out)
        needed = kv.num_to_return(group)
        back = kv.swap_in(group)
        assert shape(kv, sequences, 3) == before
        assert len(back) == len(out) == 40 - free
        assert kv.num_cpu_free == 40
        assert needed >= 40 - kv.num_free
        kv.check()

    def test_need_room_for_what_comes_back_and_for_one_more_token_each(self) -> None:
        kv = KVCacheManager(40, 4, num_cpu_blocks=40)
        sequences = self.family(kv)
        group = group_of(*sequences)
        kv.swap_out(group, 1)
        needed = kv.num_to_return(group)
        kv.swap_in(group)
        assert needed == 40 - kv.num_free + kv.num_missing(sequences)

    def test_do_not_go_where_there_is_no_room(self) -> None:
        """2 blocks of all, one of two, and one each of the others."""
        for num_cpu_blocks, fits in ((4, False), (5, True)):
            kv = KVCacheManager(40, 4, num_cpu_blocks=num_cpu_blocks)
            assert kv.can_swap_out(group_of(*self.family(kv))) is fits

    def test_of_a_sequence_that_ends_meanwhile_are_free_but_for_what_others_share(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = crowded(make_cluster)
        kv, late = cluster.core.replicas[1].kv, cluster.groups["late"]
        step_until(cluster, lambda: late.status is SequenceStatus.SWAPPED)
        used = kv.num_cpu_blocks - kv.num_cpu_free
        num_shared = 5 // 2
        end_sequence(cluster, "late", 0)
        assert kv.num_cpu_blocks - kv.num_cpu_free == (used - num_shared) // 2 + num_shared
        cluster.run()
        assert cluster.outputs("late")[1] == references(LATE)["late"][1]


class TestWaiting:
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("policy", list(Policy))
    def test_nothing_is_admitted_on_a_replica_with_swapped_groups(
        self, make_cluster: MakeCluster, policy: Policy, in_flight: int
    ) -> None:
        cluster = crowded(make_cluster, policy=policy, max_steps_in_flight=in_flight)
        replica = cluster.core.replicas[1]
        step_until(cluster, lambda: bool(replica.swapped))
        new = make_request("new", 1, max_tokens=1)
        cluster.submit(new)
        held_back = 0
        while replica.swapped:
            cluster.step()
            if replica.swapped:
                assert cluster.groups["new"].status is SequenceStatus.WAITING
                held_back += 1
        cluster.run()
        assert held_back > 1
        assert outputs(cluster, new) == references(new)

    def test_elsewhere_it_is(self, make_cluster: MakeCluster) -> None:
        cluster = crowded(make_cluster)
        step_until(cluster, lambda: bool(cluster.core.replicas[1].swapped))
        second = cluster.join(2)
        cluster.submit(make_request("new", 1, max_tokens=1))
        cluster.schedule()
        assert len(plans(second)) == 1
        cluster.run()

    @pytest.mark.parametrize(
        ("watermark", "block_size", "short", "whole"), [(0.2, 2, (3, 20), (24, 16)), (0.0, 4, (1, 4), (75, 5))]
    )
    def test_a_group_that_needs_the_whole_pool_comes_back_once_it_is_alone(
        self,
        make_cluster: MakeCluster,
        watermark: float,
        block_size: int,
        short: tuple[int, int],
        whole: tuple[int, int],
    ) -> None:
        """A watermark, or a block to spare, would keep it out for ever. In the second case it needs all 20 blocks as
        soon as it is back."""
        cluster = make_cluster(preemption=Preemption.SWAP, watermark=watermark)
        cluster.join(num_blocks=20, block_size=block_size, num_cpu_blocks=20)
        requests = make_request("short", *short), make_request("whole", *whole)
        arrive(cluster, *requests)
        cluster.run()
        assert cluster.core.swaps > 0
        assert outputs(cluster, *requests) == references(*requests)


class TestPrefill:
    @pytest.mark.parametrize(("preemption", "num_sequences"), [(Preemption.SWAP, 1), (Preemption.AUTO, 3)])
    def test_swapped_after_the_second_of_five_chunks_goes_on_with_the_third(
        self, make_cluster: MakeCluster, preemption: Preemption, num_sequences: int
    ) -> None:
        """`grower` decodes a token in each step of 4, and `cut` computes 3 of 15, until `grower` needs a 17th block."""
        cluster = make_cluster(
            preemption=preemption, watermark=0.0, prefix_caching=False, max_num_batched_tokens=4, max_steps_in_flight=1
        )
        replica = cluster.join(num_blocks=20, block_size=4, num_cpu_blocks=20)
        grower = make_request("grower", 62, max_tokens=9)
        cut = make_request("cut", 15, max_tokens=3, num_sequences=num_sequences, temperature=1.0)
        cluster.submit(grower)
        step_until(cluster, lambda: len(cluster.tokens["grower"]) == 1)
        cluster.submit(cut)
        group = cluster.groups["cut"]
        step_until(cluster, lambda: group.swaps == 1)
        assert (group.status, group.sequences[0].placement.num_computed) == (SequenceStatus.SWAPPED, 6)
        cluster.run()
        (resumed,) = [plan for plan in plans(replica) if swaps_in(plan)]
        assert [start.num_computed for start in resumed.starts] == [6]
        assert outputs(cluster, grower, cut) == references(grower, cut)
        computed = sum(work.num_tokens for plan in plans(replica) for work in plan.work)
        assert computed == (62 + 8) + (15 + 2 * num_sequences)


class TestFaults:
    """A swapped group, or one on its way, is part of a step that fails, or of a replica that is lost."""

    @pytest.mark.parametrize("moving", [swaps_out, swaps_in])
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_a_failed_move_costs_a_recomputation_and_no_token(
        self, make_cluster: MakeCluster, moving: Moving, in_flight: int
    ) -> None:
        cluster = crowded(make_cluster, max_steps_in_flight=in_flight)
        kv, late = cluster.core.replicas[1].kv, cluster.groups["late"]
        plan = plan_until(cluster, moving)
        while cluster.replicas[1].plans[0] is not plan:
            answer(cluster)
        answer(cluster, fail=True)
        drain(cluster)
        assert late.status is SequenceStatus.WAITING
        assert kv.num_cpu_free == kv.num_cpu_blocks
        cluster.run()
        assert outputs(cluster, EARLY, LATE) == references(EARLY, LATE)

    def test_a_skipped_one_too(self, make_cluster: MakeCluster) -> None:
        """The step before it fails. Only a swap-in can be skipped: what goes out waits for all answers."""
        cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0, max_steps_in_flight=2)
        cluster.join(num_blocks=18, block_size=2, num_cpu_blocks=18)
        requests = make_request("oldest", 1, max_tokens=26), make_request("early", 8, max_tokens=8), LATE
        arrive(cluster, *requests)
        resumed = plan_until(cluster, swaps_in)
        assert list(cluster.replicas[1].plans)[1:] == [resumed]
        answer(cluster, fail=True)
        drain(cluster)
        assert cluster.groups["late"].status is SequenceStatus.WAITING
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)

    def test_a_failure_of_others_leaves_it_where_it_is(self, make_cluster: MakeCluster) -> None:
        cluster = crowded(make_cluster)
        late = cluster.groups["late"]
        step_until(cluster, lambda: late.status is SequenceStatus.SWAPPED)
        drain(cluster)
        cluster.step()
        cluster.step(fail=True)
        drain(cluster)
        assert late.status is SequenceStatus.SWAPPED
        assert late.preemptions == 1
        cluster.run()
        assert outputs(cluster, EARLY, LATE) == references(EARLY, LATE)

    @pytest.mark.parametrize("moving", [swaps_out, swaps_in])
    @pytest.mark.parametrize("answered", [True, False])
    def test_when_the_replica_is_lost_it_goes_on_elsewhere(
        self, make_cluster: MakeCluster, moving: Moving, answered: bool
    ) -> None:
        cluster = crowded(make_cluster)
        plan_until(cluster, moving)
        if answered:
            drain(cluster)
        cluster.leave(1)
        assert {group.status for group in cluster.groups.values()} == {SequenceStatus.WAITING}
        cluster.join(2, num_blocks=14, block_size=2)
        cluster.run()
        assert outputs(cluster, EARLY, LATE) == references(EARLY, LATE)
