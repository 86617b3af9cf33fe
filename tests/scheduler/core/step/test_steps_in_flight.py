"""One plan more than results: the same tokens as with one step at a time, and no block used by two."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.testing.cluster import Cluster, make_request, reference_tokens
from octavo.testing.scenarios import answer, beams, outputs, plan_until, plans, references, undisturbed
from octavo.wire.base import NULL_BLOCK
from octavo.wire.requests import Request
from octavo.wire.steps import StepPlan

from ...conftest import MakeCluster


def stopping(name: str, prompt: int, *, after: int, num_sequences: int = 1) -> Request:
    """Every sequence ends at its own time with a stop token, the first after `after` tokens."""
    sampling: dict[str, Any] = {"num_sequences": num_sequences, "temperature": 1.0}
    free_run = make_request(name, prompt, 14, **sampling)
    stops = tuple(reference_tokens(free_run, index)[after + 2 * index - 1] for index in range(num_sequences))
    return make_request(name, prompt, 14, stop_token_ids=stops, **sampling)


REQUESTS = (
    stopping("a", 5, after=3),
    stopping("b", 4, after=5, num_sequences=3),
    make_request("c", 9, 9, beam=beams(3)),
    stopping("d", 9, after=1, num_sequences=2),
    make_request("e", 3, 24),
    stopping("f", 8, after=7),
)


class TestTokens:
    @pytest.mark.parametrize("num_blocks", [300, 54])
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    def test_are_the_same(self, make_cluster: MakeCluster, preemption: Preemption, num_blocks: int) -> None:
        found = []
        for in_flight in (1, 2):
            cluster = make_cluster(max_steps_in_flight=in_flight, preemption=preemption, watermark=0.0)
            cluster.join(num_blocks=num_blocks, block_size=1, num_cpu_blocks=num_blocks // 2)
            cluster.submit(*REQUESTS)
            cluster.run()
            assert not cluster.rejected
            assert (cluster.core.preemptions > 0) == (num_blocks == 54)
            found.append(outputs(cluster, *REQUESTS))
        assert found[0] == found[1]

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_of_a_stop_that_is_found_late_are_not_delivered(self, make_cluster: MakeCluster, in_flight: int) -> None:
        """It costs a slot of the step that was planned without knowing, at most one for each sequence."""
        cluster = make_cluster(max_steps_in_flight=in_flight)
        replica = cluster.join()
        request = stopping("r", 5, after=4, num_sequences=3)
        cluster.submit(request)
        cluster.run()
        expected = references(request)
        assert outputs(cluster, request) == expected
        needed = 5 + sum(len(tokens) - 1 for tokens in expected["r"])
        computed = sum(work.num_tokens for plan in plans(replica) for work in plan.work)
        assert computed == needed + (3 if in_flight == 2 else 0)

    def test_of_beams_are_chosen_before_they_are_planned_while_others_run_ahead(
        self, make_cluster: MakeCluster
    ) -> None:
        """A beam goes into a plan only once its last result is back, and with its token."""
        cluster = make_cluster(max_steps_in_flight=2)
        replica = cluster.join()
        cluster.submit(make_request("beams", 4, 8, beam=beams(2)), make_request("plain", 4, 16))
        cluster.run()
        told = [plan for plan in plans(replica) if any(work.input_token_id is not None for work in plan.work)]
        ahead = [plan for plan in plans(replica) if plan.answered_step_id < plan.step_id - 1]
        assert len(told) == 7
        assert ahead
        for previous, plan in pairwise(told):
            assert plan.answered_step_id >= previous.step_id


def blocks_of(cluster: Cluster, plan: StepPlan) -> set[int]:
    """All that the plan's step may touch: the tables of its sequences as they are now."""
    replica = cluster.core.replicas[1]
    ids = {sequence_id for work in plan.work for sequence_id in (work.sequence_id, *work.follower_ids)}
    sequences = [s for group in replica.running for s in group.holders if s.placement.sequence_id in ids]
    return {block for s in sequences for blocks in replica.kv.block_table(s) for block in blocks}


def taken_by(plan: StepPlan, block_size: int) -> set[int]:
    """Blocks that the plan gives to sequences anew, so not those that were found filled."""
    found = {start.sequence_id: start.num_computed // block_size for start in plan.starts}
    new = {
        block
        for work in plan.work
        for blocks in work.new_block_ids
        for block in blocks[found.get(work.sequence_id, 0) :]
    }
    return new | {move.target for move in (*plan.moves.copy, *plan.moves.swap_in)}


class TestBlocks:
    """Those given up while a step with them is outstanding are parked until it is answered."""

    @staticmethod
    def disturb(cluster: Cluster) -> Iterator[None]:
        """Aborts one request after another, in the middle of what they do."""
        for name in ("d", "b", "c", "e"):
            for _ in range(5):
                yield
            if name in cluster.groups:
                cluster.abort(name)
        while True:
            yield

    @pytest.mark.parametrize("aborting", [False, True])
    @pytest.mark.parametrize("num_blocks", [18, 24, 60])
    def test_are_never_given_to_one_while_a_step_may_use_them_for_another(
        self, make_cluster: MakeCluster, num_blocks: int, aborting: bool
    ) -> None:
        cluster = make_cluster(
            max_steps_in_flight=2, watermark=0.0, preemption=Preemption.RECOMPUTE, prefix_caching=False
        )
        replica = cluster.join(num_blocks=num_blocks, block_size=4)
        cluster.submit(*REQUESTS)
        assert not cluster.rejected
        used: dict[int, set[int]] = {}
        disturbance, num_beside = self.disturb(cluster), 0
        while cluster.groups:
            num_plans = len(plans(replica))
            cluster.schedule()
            if len(plans(replica)) == num_plans:
                used.pop(replica.plans[0].step_id)
                answer(cluster)
                if aborting:
                    next(disturbance)
                continue
            plan = plans(replica)[-1]
            own = blocks_of(cluster, plan)
            taken = taken_by(plan, 4)
            for step_id in used:
                num_beside += 1
                assert not taken & used[step_id], f"step {plan.step_id} takes blocks of step {step_id}"
            used[plan.step_id] = own
        assert num_beside > 0


class TestRemaps:
    """Whoever wants prompt logprobs computes what another has computed; afterwards it uses the other's blocks."""

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_give_back_the_blocks_of_all_sequences_of_a_group(self, make_cluster: MakeCluster, in_flight: int) -> None:
        """Those that were forked along have the first one's blocks, and change over when they next fill one."""
        cluster = make_cluster(max_steps_in_flight=in_flight)
        replica = cluster.join()
        other = make_request("other", 9, 20, shared=8)
        several = make_request("three", 11, 9, shared=8, num_sequences=3, temperature=1.0, prompt_logprobs=1)
        cluster.submit(other)
        cluster.step()
        cluster.submit(several)
        cluster.run()
        remapped = [(remap.logical_index, remap.block_id) for plan in plans(replica) for remap in plan.remaps]
        assert len([entry for entry in remapped if entry[0] < 2]) == 2 * 3
        assert len({entry for entry in remapped if entry[0] < 2}) == 2
        assert outputs(cluster, other, several) == references(other, several)
        assert cluster.core.replicas[1].kv.num_free == 64

    def test_tell_nothing_of_blocks_that_have_left_the_window(self, make_cluster: MakeCluster) -> None:
        """Two blocks are the other's too, but where the window is 4 tokens wide, both have left it in the same step."""
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(block_size=2, windows=(0, 4))
        requests = [make_request("other", 5, 12, shared=4), make_request("r", 13, 12, shared=4, prompt_logprobs=1)]
        cluster.submit(requests[0])
        cluster.step()
        cluster.submit(requests[1])
        cluster.step()
        assert cluster.core.replicas[1].kv.block_table(cluster.groups["other"].sequences[0])[1][1] != NULL_BLOCK
        cluster.step()
        assert [(remap.kv_group, remap.logical_index) for remap in plans(replica)[-1].remaps] == [(0, 0), (0, 1)]
        cluster.run()


class TestFailures:
    def test_reach_a_group_that_a_step_only_tells_of_other_blocks(self, make_cluster: MakeCluster) -> None:
        """Whoever wants prompt logprobs computes what another has computed, and is told to use that one's blocks in
        the next step; a beam does not compute in that. If it fails, the worker no longer knows the beam."""
        cluster = make_cluster(max_steps_in_flight=2)
        replica = cluster.join()
        other = make_request("other", 9, 12, shared=8)
        searching = make_request("beams", 10, 6, shared=8, beam=beams(2), prompt_logprobs=1)
        cluster.submit(other)
        cluster.step()
        cluster.submit(searching)
        remapping = plan_until(cluster, lambda plan: bool(plan.remaps))
        (beam,) = cluster.groups["beams"].live
        assert beam.placement.sequence_id in {remap.sequence_id for remap in remapping.remaps}
        assert beam.placement.sequence_id not in {work.sequence_id for work in remapping.work}
        while replica.plans[0] is not remapping:
            answer(cluster)
        answer(cluster, fail=True)
        cluster.run()
        assert outputs(cluster, other, searching) == undisturbed(make_cluster, other, searching)
