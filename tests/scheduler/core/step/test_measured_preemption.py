"""Preemption by what a worker has measured: what swapping and recomputing a group are taken to cost, the verdict, and
that over whole runs it is about as good as the better of both."""

from collections.abc import Callable

import pytest

from octavo.bench.parts.preemption_costs import GOAL, WORKLOADS, WaitingRequests, cells
from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup, SequenceStatus
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.core.step.preemption import blocks_taken_meanwhile, recompute_seconds, swap_seconds
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.depth import every
from octavo.testing.scenarios import beams, drain, outputs, step_until, undisturbed
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts
from octavo.worker.fake.runner import FAKE_COSTS

from ...conftest import MakeCluster

TOKEN_S = PrefillCosts(0.0, 1.0, 0.0)
BLOCK_S = SwapCosts(0.0, 10.0, 1.0)


def replica_of(cluster: Cluster) -> Replica:
    return cluster.core.replicas[1]


def group_of(cluster: Cluster, name: str, num_generated: int) -> SequenceGroup:
    """A running group, all of whose sequences have generated so many tokens; no step is outstanding."""
    group = cluster.groups[name]
    step_until(cluster, lambda: min(sequence.num_generated for sequence in group.live) >= num_generated)
    drain(cluster)
    assert [sequence.num_generated for sequence in group.live] == [num_generated] * len(group.live)
    return group


class TestSwapCost:
    """Blocks of 4 tokens; 10 s for each that goes, 1 s for each that comes back."""

    def test_is_that_of_each_block_with_a_computed_token_both_ways(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("r", 9, max_tokens=20))
        group = group_of(cluster, "r", num_generated=4)
        assert swap_seconds(replica_of(cluster), group, BLOCK_S) == 3 * 11

    def test_has_a_fixed_part_each_way(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("r", 9, max_tokens=20))
        group = group_of(cluster, "r", num_generated=1)
        assert swap_seconds(replica_of(cluster), group, SwapCosts(5.0, 0.0, 0.0)) == 10

    def test_takes_what_sequences_share_once(self, make_cluster: MakeCluster) -> None:
        """Two full blocks of the prompt, and one of each of three sequences."""
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("r", 9, max_tokens=20, num_sequences=3, temperature=1.0))
        group = group_of(cluster, "r", num_generated=2)
        assert swap_seconds(replica_of(cluster), group, BLOCK_S) == (2 + 3) * 11

    def test_brings_nothing_back_that_others_hold(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(*(make_request(name, 10, max_tokens=20, shared=8) for name in ("one", "two")))
        group = group_of(cluster, "two", num_generated=2)
        assert swap_seconds(replica_of(cluster), group, BLOCK_S) == 3 * 10 + 1


class TestRecomputeCost:
    """Blocks of 4 tokens, a second for each token."""

    @pytest.fixture
    def alone(self, make_cluster: MakeCluster) -> Callable[..., Cluster]:
        """Nothing is found again of what a group gives up."""

        def make(**config: object) -> Cluster:
            cluster = make_cluster(max_steps_in_flight=1, prefix_caching=False, **config)
            cluster.join()
            return cluster

        return make

    def test_is_that_of_all_known_tokens(self, alone: Callable[..., Cluster]) -> None:
        cluster = alone()
        cluster.submit(make_request("r", 9, max_tokens=20))
        group = group_of(cluster, "r", num_generated=4)
        assert recompute_seconds(replica_of(cluster), group, TOKEN_S) == 9 + 4

    def test_counts_what_each_token_attends_to(self, alone: Callable[..., Cluster]) -> None:
        cluster = alone()
        cluster.submit(make_request("r", 9, max_tokens=20))
        group = group_of(cluster, "r", num_generated=4)
        assert recompute_seconds(replica_of(cluster), group, PrefillCosts(0.0, 0.0, 1.0)) == 13 * 14 / 2

    def test_counts_steps_only_where_the_group_fills_them(self, alone: Callable[..., Cluster]) -> None:
        cluster = alone(max_num_batched_tokens=6)
        cluster.submit(make_request("r", 9, max_tokens=20))
        steps = [
            recompute_seconds(replica_of(cluster), group_of(cluster, "r", count), PrefillCosts(1.0, 0.0, 0.0))
            for count in (2, 3, 8, 9)
        ]
        assert steps == [1, 2, 2, 3]

    def test_counts_the_full_blocks_that_sequences_share_once(self, alone: Callable[..., Cluster]) -> None:
        """As they come back: one computes the two blocks, the others start after them."""
        cluster = alone()
        cluster.submit(make_request("r", 9, max_tokens=20, num_sequences=3, temperature=1.0))
        group = group_of(cluster, "r", num_generated=4)
        assert recompute_seconds(replica_of(cluster), group, TOKEN_S) == 8 + 3 * (1 + 4)

    def test_is_low_for_who_shares_most_with_others_that_stay(self, make_cluster: MakeCluster) -> None:
        """Even where all else that it gives up is taken: the other grows by more than the pool before it must end."""
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("stays", 18, max_tokens=200, shared=16))
        cluster.submit(make_request("goes", 18, max_tokens=20, shared=16))
        group = group_of(cluster, "goes", num_generated=6)
        assert recompute_seconds(replica_of(cluster), group, TOKEN_S) == 18 - 16 + 6

    @pytest.mark.parametrize(("more_tokens", "num_lost"), [(1, 3), (4, 3), (5, 7), (200, 27)])
    def test_is_only_that_of_what_others_take_until_the_first_of_them_must_have_ended(
        self, make_cluster: MakeCluster, more_tokens: int, num_lost: int
    ) -> None:
        """Of 6 cached blocks and one that is not full, that goes first, then the last of the others."""
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("first", 5, max_tokens=3 + more_tokens), make_request("goes", 24, max_tokens=20))
        group = group_of(cluster, "goes", num_generated=3)
        assert blocks_taken_meanwhile(replica_of(cluster), group) == -(-more_tokens // 4)
        assert recompute_seconds(replica_of(cluster), group, TOKEN_S) == num_lost

    def test_is_that_of_everything_where_swapped_groups_come_back_first(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, preemption=Preemption.SWAP)
        # Moves that cost more than they save.
        cluster.join(num_cpu_blocks=64, costs=StepCosts(TOKEN_S, SwapCosts(0.0, 9.0, 9.0)))
        cluster.submit(make_request("first", 5, max_tokens=30), make_request("goes", 24, max_tokens=20))
        cluster.submit(make_request("swapped", 5, max_tokens=30))
        group = group_of(cluster, "goes", num_generated=1)
        StepBuilder(replica_of(cluster), 64).preempt(cluster.groups["swapped"])
        assert recompute_seconds(replica_of(cluster), group, TOKEN_S) == 25

    def test_is_that_of_moves_where_cpu_memory_keeps_what_is_taken(self, make_cluster: MakeCluster) -> None:
        """6 cached blocks of 4, of which the first 3 of the free ones in CPU memory have room."""
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join(num_cpu_blocks=3)
        cluster.submit(make_request("first", 5, max_tokens=205), make_request("goes", 24, max_tokens=20))
        group = group_of(cluster, "goes", num_generated=3)
        kv = replica_of(cluster).kv
        assert [run.num_tokens for run in kv.lost_by(group, 7)] == [27 - 3 * 4]
        assert kv.num_kept(group, 7) == 3
        # What is taken after that is what CPU memory keeps.
        assert kv.num_kept(group, 20) == 0

    def test_is_that_of_everything_where_a_window_has_given_blocks_back(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join(windows=(6,))
        cluster.submit(make_request("first", 5, max_tokens=2), make_request("goes", 24, max_tokens=20))
        group = group_of(cluster, "goes", num_generated=1)
        assert recompute_seconds(replica_of(cluster), group, TOKEN_S) == 25


class TestVerdict:
    @staticmethod
    def preempt(cluster: Cluster, name: str) -> SequenceStatus:
        group = group_of(cluster, name, num_generated=3)
        StepBuilder(replica_of(cluster), 64).preempt(group)
        return group.status

    @pytest.mark.parametrize("num_sequences", [1, 4])
    @pytest.mark.parametrize(
        ("block_s", "verdict"),
        [(1.9, SequenceStatus.SWAPPED), (2.1, SequenceStatus.WAITING)],
        ids=["swap", "recompute"],
    )
    def test_is_whatever_takes_less_time_however_many_the_sequences(
        self, make_cluster: MakeCluster, num_sequences: int, block_s: float, verdict: SequenceStatus
    ) -> None:
        """8 blocks of 4 for 32 tokens of prompt, and one of each sequence for the 2 computed of its 3."""
        token_s = 2 * (8 + num_sequences) * 2.0 / (32 + num_sequences * 3)
        costs = StepCosts(PrefillCosts(0.0, token_s, 0.0), SwapCosts(0.0, block_s, block_s))
        cluster = make_cluster(preemption=Preemption.MEASURED, max_steps_in_flight=1, prefix_caching=False)
        cluster.join(num_cpu_blocks=64, costs=costs)
        cluster.submit(make_request("r", 32, 9, num_sequences=num_sequences, temperature=1.0))
        assert self.preempt(cluster, "r") is verdict

    @pytest.mark.parametrize(("num_sequences", "verdict"), [(1, SequenceStatus.WAITING), (4, SequenceStatus.SWAPPED)])
    def test_is_as_with_auto_where_nothing_was_measured(
        self, make_cluster: MakeCluster, num_sequences: int, verdict: SequenceStatus
    ) -> None:
        cluster = make_cluster(preemption=Preemption.MEASURED, max_steps_in_flight=1)
        cluster.join(num_cpu_blocks=64)
        cluster.submit(make_request("r", 5, 9, num_sequences=num_sequences, temperature=1.0))
        assert self.preempt(cluster, "r") is verdict

    def test_is_to_recompute_where_cpu_memory_has_no_room(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(preemption=Preemption.MEASURED, max_steps_in_flight=1)
        cluster.join(num_cpu_blocks=1, costs=StepCosts(TOKEN_S, SwapCosts(0.0, 0.0, 0.0)))
        cluster.submit(make_request("r", 9, 9))
        assert self.preempt(cluster, "r") is SequenceStatus.WAITING

    @pytest.mark.parametrize("policy", list(Policy))
    def test_may_be_another_for_each_group_and_no_token_is_lost(
        self, make_cluster: MakeCluster, policy: Policy
    ) -> None:
        requests = [
            make_request("one", 9, max_tokens=16),
            make_request("three", 7, max_tokens=12, num_sequences=3, temperature=1.0),
            make_request("beams", 6, max_tokens=10, beam=beams(3)),
            make_request("pair", 5, max_tokens=14, num_sequences=2, temperature=1.0, seed=4),
            make_request("last", 11, max_tokens=9),
        ]
        costs = StepCosts(FAKE_COSTS.prefill, SwapCosts(0.0, 8e-7, 8e-7))
        cluster = make_cluster(preemption=Preemption.MEASURED, policy=policy, max_num_batched_tokens=12)
        cluster.join(num_blocks=34, block_size=2, num_cpu_blocks=34, costs=costs)
        for request in requests:
            cluster.submit(request)
            cluster.now += 0.001
        cluster.run()
        assert 0 < cluster.core.swaps < cluster.core.preemptions
        assert outputs(cluster, *requests) == undisturbed(make_cluster, *requests)


class TestCapacity:
    """Simulated runs on machines with slow and fast prefill and transfers (`octavo.bench.parts.preemption_costs`)."""

    @pytest.mark.parametrize("workload", every(4, WORKLOADS), ids=lambda workload: workload.name)
    def test_measured_is_nowhere_worse_than_the_better_fixed_way_by_more_than_a_tenth(
        self, workload: WaitingRequests
    ) -> None:
        found = list(cells(workload))
        assert {cell.machine.name: cell.over_best for cell in found if cell.over_best > GOAL} == {}
        assert all(cell.measured.preemptions for cell in found)
        # Neither fixed way would have done.
        for fixed in (Preemption.RECOMPUTE, Preemption.SWAP):
            assert any(cell.seconds[fixed] > 1.02 * cell.seconds[Preemption.MEASURED] for cell in found)

    def test_auto_is_far_worse_somewhere(self) -> None:
        (samples,) = (workload for workload in WORKLOADS if workload.parallel > 1)
        assert any(cell.seconds[Preemption.AUTO] > 1.5 * cell.seconds[Preemption.MEASURED] for cell in cells(samples))
