"""The paper's policy: a step is all prompts or all decodes; prompts go first, whole, in order, and not too often."""

from typing import Any

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.testing.cluster import Cluster, FakeReplica, make_request
from octavo.testing.scenarios import answer, beams, ids, outputs, plans, references, step_until
from octavo.wire.steps import StepPlan

from ...conftest import MakeCluster


def shares(replica: FakeReplica) -> list[list[int]]:
    return [[work.num_tokens for work in plan.work] for plan in plans(replica)]


def paper(make_cluster: MakeCluster, **config: Any) -> Cluster:
    return make_cluster(policy=Policy.PAPER, **{"max_steps_in_flight": 1, "prefix_caching": False, **config})


class Kinds:
    """What a plan does, as `prefill` and `decode`; plans are to be shown in order.

    A sequence prefills what it has left of the tokens that it started with; if that is just the one after its prompt,
    as where it comes back from CPU memory, it decodes.
    """

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def __call__(self, plan: StepPlan) -> set[str]:
        left = self._left
        for start in plan.starts:
            num_known = len(start.prompt_token_ids) + len(start.generated_token_ids)
            decodes = start.num_computed >= len(start.prompt_token_ids) and start.num_computed + 1 == num_known
            left[start.sequence_id] = 0 if decodes else num_known - start.num_computed
        for fork in plan.forks:
            left[fork.sequence_id] = 0
        kinds = {"prefill" if left[work.sequence_id] > 0 else "decode" for work in plan.work}
        for work in plan.work:
            left[work.sequence_id] -= work.num_tokens
        return kinds


class TestSteps:
    def test_are_all_prompts_or_all_decodes(self, make_cluster: MakeCluster) -> None:
        """Whatever comes and goes. What a sequence has left of the tokens it started with is its prefill."""
        cluster = paper(make_cluster, max_num_batched_tokens=12, max_steps_in_flight=2, preemption=Preemption.RECOMPUTE)
        replica = cluster.join(num_blocks=24, block_size=2)
        for index in range(8):
            cluster.submit(make_request(f"r{index}", 3 + 5 * (index % 4), 8, num_sequences=1 + index % 2))
            cluster.step()
        cluster.run()
        assert cluster.core.preemptions > 0
        kinds = [kind for kind in map(Kinds(), plans(replica)) if kind]
        assert all(len(kind) == 1 for kind in kinds)
        assert set.union(*kinds) == {"prefill", "decode"}

    def test_prompts_come_before_decodes(self, make_cluster: MakeCluster) -> None:
        cluster = paper(make_cluster)
        replica = cluster.join()
        for prompt in (4, 5, 6):
            cluster.submit(make_request(f"r{prompt}", prompt, 3))
            cluster.step()
        cluster.run()
        assert shares(replica) == [[4], [5], [6], [1, 1, 1], [1, 1, 1]]

    def test_take_prompts_whole(self, make_cluster: MakeCluster) -> None:
        """Of 10 tokens the first prompt leaves 4, of which the second, of 6, makes no use."""
        cluster = paper(make_cluster, max_num_batched_tokens=10)
        replica = cluster.join()
        cluster.submit(*(make_request(f"r{i}", 6, 2) for i in range(2)), make_request("small", 3, 2))
        cluster.run()
        assert shares(replica) == [[6], [6, 3], [1, 1, 1]]

    def test_cut_a_prompt_that_is_longer_than_any_step(self, make_cluster: MakeCluster) -> None:
        """Nothing decodes and nothing new begins until it is through."""
        cluster = paper(make_cluster, max_num_batched_tokens=10)
        replica = cluster.join()
        cluster.submit(make_request("decodes", 4, 6), make_request("long", 25, 2), make_request("next", 5, 2))
        cluster.run()
        assert shares(replica) == [[4], [10], [10], [5, 5], [1, 1, 1], [1], [1], [1], [1]]

    def test_of_a_group_that_is_recomputed_go_on_until_all_its_sequences_are_through(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = paper(make_cluster, max_num_batched_tokens=8, preemption=Preemption.RECOMPUTE, watermark=0.0)
        cluster.join(num_blocks=18, block_size=2)
        requests = [
            make_request("old", 6, 14),
            make_request("n", 5, 9, num_sequences=2, temperature=1.0),
            make_request("beams", 5, 9, beam=beams(2)),
        ]
        cluster.submit(*requests)
        cluster.run(max_steps=200)
        assert cluster.core.preemptions > 1
        assert outputs(cluster, *requests[:2]) == references(*requests[:2])


class TestOrder:
    def test_stops_at_the_first_that_does_not_fit(self, make_cluster: MakeCluster) -> None:
        """However long it waits, nobody overtakes it; the other policy lets the small one by."""
        for policy, started in ((Policy.PAPER, {"runs"}), (Policy.CHUNKED, {"runs", "small"})):
            cluster = make_cluster(policy=policy, max_steps_in_flight=1)
            cluster.join(num_blocks=16)
            cluster.submit(make_request("runs", 28, 12), make_request("large", 40, 4), make_request("small", 3, 4))
            for _ in range(6):
                cluster.step()
            assert {name for name, tokens in cluster.tokens.items() if tokens} == started
            cluster.run()
            assert len(cluster.finished) == 3

    @pytest.mark.parametrize("num_seqs", [2, 3])
    def test_stops_at_the_first_that_finds_no_slots(self, make_cluster: MakeCluster, num_seqs: int) -> None:
        cluster = paper(make_cluster, max_num_seqs=num_seqs)
        cluster.join()
        cluster.submit(
            make_request("one", 4, 9), make_request("pair", 4, 9, num_sequences=2), make_request("last", 4, 9)
        )
        cluster.step()
        assert ids(cluster.core.waiting) == (["pair", "last"] if num_seqs == 2 else ["last"])
        cluster.run()


class TestSwapped:
    def test_nothing_is_prefilled_while_anything_is_swapped_out(self, make_cluster: MakeCluster) -> None:
        """Not even what came back to be recomputed."""
        cluster = paper(make_cluster, preemption=Preemption.AUTO, watermark=0.0)
        replica = cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=14)
        cluster.submit(make_request("old", 8, 14), make_request("pair", 5, 9, num_sequences=2, temperature=1.0))
        pair = cluster.groups["pair"]
        step_until(cluster, lambda: pair.status is SequenceStatus.SWAPPED)
        cluster.submit(make_request("new", 2, 2))
        kinds, since = Kinds(), len(plans(replica))
        step_until(cluster, lambda: not cluster.core.replicas[1].swapped)
        found = [kinds(plan) for plan in plans(replica)]
        assert set.union(*found[since:]) == {"decode"}
        assert len(found) > since + 1
        cluster.run()

    def test_comes_back_only_in_a_step_that_preempts_nobody(self, make_cluster: MakeCluster) -> None:
        cluster = paper(make_cluster, preemption=Preemption.SWAP, watermark=0.0)
        replica = cluster.join(num_blocks=16, block_size=2, num_cpu_blocks=16)
        cluster.submit(*(make_request(f"r{i}", 5, 14) for i in range(4)))
        cluster.run()
        moves = [plan.moves for plan in plans(replica)]
        assert sum(bool(move.swap_in) for move in moves) > 1
        assert not any(move.swap_out and move.swap_in for move in moves)


class TestDelay:
    """After a prefill of half a second and with a factor of 2, the next is due when its head has waited a second."""

    @staticmethod
    def running(make_cluster: MakeCluster, **config: Any) -> Cluster:
        cluster = paper(make_cluster, **{"delay_factor": 2.0, **config})
        cluster.join(num_blocks=128)
        cluster.submit(make_request("runs", 4, 400))
        cluster.schedule()
        cluster.now += 0.5
        answer(cluster)
        return cluster

    @staticmethod
    def decode_until(cluster: Cluster, now: float) -> None:
        """Steps of 0.01 s."""
        while cluster.now < now - 0.001:
            cluster.step()

    def test_holds_new_prompts_back_while_others_run(self, make_cluster: MakeCluster) -> None:
        cluster = self.running(make_cluster)
        arrival = cluster.now
        cluster.submit(make_request("new", 4, 4))
        self.decode_until(cluster, arrival + 1.0)
        assert ids(cluster.core.waiting) == ["new"]
        self.decode_until(cluster, arrival + 1.03)
        assert ids(cluster.core.waiting) == []

    def test_brings_prompts_in_batches(self, make_cluster: MakeCluster) -> None:
        """When the first is due, all that have come since go with it."""
        cluster = self.running(make_cluster)
        for index in range(4):
            cluster.submit(make_request(f"new{index}", 4, 4))
            self.decode_until(cluster, cluster.now + 0.2)
        step_until(cluster, lambda: not len(cluster.core.waiting))
        prefills = [plan for plan in plans(cluster.replicas[1]) if plan.starts]
        assert [len(plan.starts) for plan in prefills] == [1, 4]

    def test_does_not_hold_anything_back_where_nothing_runs(self, make_cluster: MakeCluster) -> None:
        cluster = self.running(make_cluster)
        cluster.abort("runs")
        cluster.submit(make_request("new", 4, 4))
        cluster.schedule()
        assert ids(cluster.core.waiting) == []

    def test_of_zero_holds_nothing_back(self, make_cluster: MakeCluster) -> None:
        cluster = self.running(make_cluster, delay_factor=0.0)
        cluster.submit(make_request("new", 4, 4))
        cluster.schedule()
        assert ids(cluster.core.waiting) == []

    def test_is_measured_by_the_last_prefill_not_by_decodes(self, make_cluster: MakeCluster) -> None:
        cluster = self.running(make_cluster)
        self.decode_until(cluster, cluster.now + 0.1)
        assert cluster.core.replicas[1].steps.prefill_latency == pytest.approx(0.5)
        cluster.submit(make_request("new", 4, 4))
        step_until(cluster, lambda: not len(cluster.core.waiting))
        assert cluster.core.replicas[1].steps.prefill_latency == pytest.approx(0.01)
