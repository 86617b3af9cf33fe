"""Faults that swapping had in vLLM's first scheduler, by their numbers in vllm-project/vllm, and has not here."""

from typing import Any

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.scenarios import beams, outputs, plans, references, step_until, undisturbed
from octavo.wire.requests import Request

from ..conftest import MakeCluster

POLICIES = pytest.mark.parametrize("policy", list(Policy))
SWAPPING = pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.AUTO])


def crowd(count: int, max_tokens: int, **sampling: Any) -> list[Request]:
    """As many requests as do not fit, of slightly different lengths."""
    return [make_request(f"r{i}", 5 + i % 4, max_tokens, temperature=1.0, **sampling) for i in range(count)]


class TestStandstill:
    """#546: as soon as CPU blocks were used, all processing stopped, for good and without an error. One request with a
    large n was enough: its group did not come back, and nothing new is let in while a group is swapped out."""

    @POLICIES
    @SWAPPING
    @pytest.mark.parametrize("watermark", [0.0, 0.01, 0.3])
    def test_every_step_computes_something_as_long_as_anything_is_held(
        self, make_cluster: MakeCluster, preemption: Preemption, policy: Policy, watermark: float
    ) -> None:
        cluster = make_cluster(preemption=preemption, policy=policy, watermark=watermark, max_steps_in_flight=1)
        replica = cluster.join(num_blocks=24, block_size=2, num_cpu_blocks=24)
        requests = crowd(8, max_tokens=12, num_sequences=2)
        cluster.submit(*requests)
        while cluster.groups:
            cluster.step()
            assert plans(replica)[-1].work
            assert len(plans(replica)) < 400
        assert cluster.core.swaps > 0
        assert outputs(cluster, *requests) == references(*requests)

    @POLICIES
    @SWAPPING
    def test_one_request_as_large_as_the_pool_ends_and_so_does_the_next(
        self, make_cluster: MakeCluster, preemption: Preemption, policy: Policy
    ) -> None:
        cluster = make_cluster(preemption=preemption, policy=policy)
        cluster.join(num_blocks=16 * 10, block_size=2, num_cpu_blocks=16 * 10)
        small = make_request("small", 130, max_tokens=15)
        large = make_request("large", 8, max_tokens=12, num_sequences=16, temperature=1.0)
        cluster.submit(small, large)
        cluster.run(max_steps=200)
        assert cluster.core.swaps == 1
        following = make_request("following", 8, max_tokens=12)
        cluster.submit(following)
        cluster.run(max_steps=50)
        assert outputs(cluster, small, large, following) == references(small, large, following)

    @POLICIES
    def test_whoever_comes_while_cpu_blocks_are_in_use_is_served(
        self, make_cluster: MakeCluster, policy: Policy
    ) -> None:
        cluster = make_cluster(preemption=Preemption.SWAP, policy=policy)
        cluster.join(num_blocks=24, block_size=2, num_cpu_blocks=24)
        cluster.submit(*crowd(4, max_tokens=12, num_sequences=2))
        step_until(cluster, lambda: bool(cluster.core.replicas[1].swapped))
        late = [make_request(f"late{i}", 4, max_tokens=6) for i in range(10)]
        cluster.submit(*late)
        cluster.run(max_steps=400)
        assert outputs(cluster, *late) == references(*late)


class TestNoRoomInCpuMemory:
    """#588 and #787: a request with several sequences (n, best_of, beams) that had to go while CPU blocks were lacking
    ended the whole engine: "Aborted due to the lack of CPU swap space"."""

    @POLICIES
    @SWAPPING
    @pytest.mark.parametrize("num_cpu_blocks", [0, 1, 5])
    def test_costs_a_recomputation(
        self, make_cluster: MakeCluster, preemption: Preemption, policy: Policy, num_cpu_blocks: int
    ) -> None:
        cluster = make_cluster(preemption=preemption, policy=policy)
        cluster.join(num_blocks=40, block_size=2, num_cpu_blocks=num_cpu_blocks)
        requests = [*crowd(4, max_tokens=12, num_sequences=4), make_request("beams", 6, 10, beam=beams(4))]
        cluster.submit(*requests)
        cluster.run()
        assert not cluster.rejected
        assert cluster.core.preemptions > cluster.core.swaps
        assert outputs(cluster, *requests) == undisturbed(make_cluster, *requests)

    def test_is_met_by_one_group_and_not_by_the_next(self, make_cluster: MakeCluster) -> None:
        """A pool that is full of others' blocks is as good as none, and serves again when they have left."""
        cluster = make_cluster(preemption=Preemption.SWAP)
        cluster.join(num_blocks=40, block_size=2, num_cpu_blocks=12)
        requests = crowd(6, max_tokens=12, num_sequences=3)
        cluster.submit(*requests)
        cluster.run()
        assert 1 < cluster.core.swaps < cluster.core.preemptions
        assert outputs(cluster, *requests) == references(*requests)


class TestThrash:
    """#5578: of many requests with n of 2 and more, ever more were let in as single prompts and swapped out once they
    had forked; groups went out and in with next to no token between, until CPU memory was full."""

    @POLICIES
    @SWAPPING
    def test_nothing_begins_while_anything_is_swapped_out_and_no_group_goes_often(
        self, make_cluster: MakeCluster, preemption: Preemption, policy: Policy
    ) -> None:
        """27 of 30 groups are let in by their prompts; as they grow, 9 of them have room."""
        cluster = make_cluster(preemption=preemption, policy=policy)
        cluster.join(num_blocks=96, block_size=2, num_cpu_blocks=96)
        requests = crowd(30, max_tokens=11, num_sequences=2)
        cluster.submit(*requests)
        replica, groups, num_begun = cluster.core.replicas[1], list(cluster.groups.values()), 30
        while cluster.groups:
            cluster.step()
            # What had begun and is computed again comes back in its turn, whatever is swapped out.
            begun = sum(group.comes_back for group in groups)
            assert not replica.swapped or begun <= num_begun
            num_begun = begun
        # The last in order go for all others.
        assert max(group.swaps for group in groups) <= 3
        assert cluster.core.swaps <= cluster.core.preemptions <= len(requests)
        assert outputs(cluster, *requests) == references(*requests)

    @staticmethod
    def stays(cluster: Cluster, *requests: Request) -> tuple[list[int], int]:
        """Of each stay of a group on the device that ended with a swap: the tokens that its sequences got on average;
        and all tokens generated."""
        yields: list[int] = []
        groups = {request.request_id: cluster.groups[request.request_id] for request in requests}
        swaps, known = dict.fromkeys(groups, 0), dict.fromkeys(groups, 0)
        while cluster.groups:
            cluster.step()
            for name, group in groups.items():
                if group.swaps > swaps[name]:
                    num_generated = sum(sequence.num_generated for sequence in group.sequences)
                    yields.append((num_generated - known[name]) // len(group.sequences))
                    swaps[name], known[name] = group.swaps, num_generated
        return yields, sum(len(tokens) for tokens in cluster.streams.values())

    @POLICIES
    @SWAPPING
    @pytest.mark.parametrize("num_sequences", [2, 3])
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_every_stay_brings_tokens_and_swaps_are_few_beside_them(
        self, make_cluster: MakeCluster, num_sequences: int, preemption: Preemption, policy: Policy, in_flight: int
    ) -> None:
        cluster = make_cluster(preemption=preemption, policy=policy, max_steps_in_flight=in_flight)
        cluster.join(num_blocks=45 * num_sequences // 2, block_size=2, num_cpu_blocks=45 * num_sequences // 2)
        requests = crowd(5, max_tokens=24, num_sequences=num_sequences)
        cluster.submit(*requests)
        yields, num_tokens = self.stays(cluster, *requests)
        assert len(yields) == cluster.core.swaps
        assert cluster.core.swaps > 1
        assert min(yields) >= 1
        assert cluster.core.swaps <= 0.05 * num_tokens
        assert outputs(cluster, *requests) == references(*requests)
