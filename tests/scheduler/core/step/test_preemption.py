"""Preemption: whom it takes, that it takes them whole, what becomes of their KV, and how they come back."""

from collections.abc import Iterable

import msgspec
import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.sequence import Sequence, SequenceStatus
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.scenarios import (
    admissions,
    answer,
    beams,
    drain,
    end_sequence,
    ids,
    outputs,
    plans,
    references,
    step_until,
    undisturbed,
)

from ...conftest import MakeCluster


def victims(cluster: Cluster, max_steps: int = 500) -> list[str]:
    """The requests that lost their blocks until all were done, in order."""
    found: list[str] = []
    for _ in range(max_steps):
        before = {name: group.preemptions for name, group in cluster.groups.items()}
        cluster.step()
        found += [name for name, group in cluster.groups.items() if group.preemptions > before[name]]
        if not cluster.groups:
            return found
    raise AssertionError(f"requests still held after {max_steps} steps")


class TestHowMany:
    """48 sequences of one full block each want another; 12 are free."""

    @staticmethod
    def full(make_cluster: MakeCluster, preemption: Preemption) -> Cluster:
        cluster = make_cluster(watermark=0.0, preemption=preemption, max_steps_in_flight=1, max_num_seqs=64)
        cluster.join(num_blocks=60, block_size=4, num_cpu_blocks=60)
        cluster.submit(*(make_request(f"r{i}", 3, 9) for i in range(48)))
        cluster.step()
        cluster.step()
        return cluster

    @pytest.mark.parametrize("preemption", list(Preemption))
    def test_go_as_must_and_no_more(self, make_cluster: MakeCluster, preemption: Preemption) -> None:
        """Each that goes gives one and takes none: 18 leave 30 blocks to 30."""
        cluster = self.full(make_cluster, preemption)
        cluster.step()
        assert cluster.core.preemptions == 18
        assert ids(cluster.core.replicas[1].running) == [f"r{i}" for i in range(30)]

    def test_are_counted_in_one_walk(self, make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many go: a walk for each would take seconds where thousands run."""
        cluster, seen = self.full(make_cluster, Preemption.AUTO), 0
        kv = cluster.core.replicas[1].kv
        count = kv.num_missing

        def counting(sequences: Iterable[Sequence]) -> int:
            nonlocal seen
            found = list(sequences)
            seen += len(found)
            return count(found)

        monkeypatch.setattr(kv, "num_missing", counting)
        cluster.schedule()
        assert cluster.core.preemptions == 18
        assert seen <= 48 + 48 + 18


class TestWhoGoes:
    """Three requests fit at first and not as they grow: 3 blocks each of 2 tokens, 8 at the end, in a pool of 16."""

    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("preemption", list(Preemption))
    def test_the_latest_arrival(self, make_cluster: MakeCluster, preemption: Preemption, in_flight: int) -> None:
        cluster = make_cluster(watermark=0.0, preemption=preemption, max_steps_in_flight=in_flight)
        cluster.join(num_blocks=16, block_size=2, num_cpu_blocks=16)
        for name in ("first", "second", "third"):
            cluster.submit(make_request(name, 5, max_tokens=11))
            cluster.now += 0.001
        assert victims(cluster) == ["third"]

    def test_by_arrival_not_by_submission(self, make_cluster: MakeCluster) -> None:
        """What was submitted again keeps its place: its frontend says for how long it has been there."""
        cluster = make_cluster(watermark=0.0)
        cluster.now = 100.0
        cluster.join(num_blocks=16, block_size=2)
        cluster.submit(make_request("first", 5, 11), make_request("second", 5, 11))
        cluster.submit(msgspec.structs.replace(make_request("oldest", 5, 11), age_ms=5000))
        assert victims(cluster) == ["second"]

    @pytest.mark.parametrize(
        ("priorities", "victim"),
        [((0, 1, 2), "first"), ((1, 0, 1), "second"), ((2, 1, 1), "third"), ((0, 0, 2), "second")],
    )
    def test_the_lowest_priority_and_among_equals_the_latest(
        self, make_cluster: MakeCluster, priorities: tuple[int, ...], victim: str
    ) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(num_blocks=16, block_size=2)
        for name, priority in zip(("first", "second", "third"), priorities, strict=True):
            cluster.submit(make_request(name, 5, max_tokens=11, priority=priority))
            cluster.now += 0.001
        assert victims(cluster) == [victim]

    def test_whatever_its_priority_where_priorities_are_off(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0, priority_ageing_s=0.0)
        cluster.join(num_blocks=16, block_size=2)
        for name, priority in (("first", -5), ("second", 0), ("third", 5)):
            cluster.submit(make_request(name, 5, max_tokens=11, priority=priority))
            cluster.now += 0.001
        assert victims(cluster) == ["third"]

    @pytest.mark.parametrize("preemption", list(Preemption))
    def test_never_the_first_in_order(self, make_cluster: MakeCluster, preemption: Preemption) -> None:
        """However tight it is, the oldest goes on: there is always progress."""
        cluster = make_cluster(watermark=0.0, preemption=preemption)
        cluster.join(num_blocks=12, block_size=2, num_cpu_blocks=12)
        for index in range(8):
            cluster.submit(make_request(f"r{index}", 5, max_tokens=15))
            cluster.now += 0.001
        lost = victims(cluster)
        assert len(set(lost)) > 2
        assert "r0" not in lost

    def test_nobody_for_a_request_that_waits(self, make_cluster: MakeCluster) -> None:
        """A higher priority goes to the front of the queue; what runs is not thrown out for it."""
        cluster = make_cluster(watermark=0.0)
        cluster.join(num_blocks=10, block_size=2)
        cluster.submit(make_request("running", 8, max_tokens=12))
        cluster.step()
        cluster.submit(make_request("urgent", 16, max_tokens=4, priority=100))
        assert victims(cluster) == []
        assert set(cluster.finished) == {"running", "urgent"}


class TestAllOrNothing:
    @pytest.mark.parametrize("preemption", list(Preemption))
    def test_all_sequences_of_a_group_go_together_and_no_others(
        self, make_cluster: MakeCluster, preemption: Preemption
    ) -> None:
        cluster = make_cluster(watermark=0.0, preemption=preemption)
        cluster.join(num_blocks=18, block_size=2, num_cpu_blocks=18)
        kv = cluster.core.replicas[1].kv
        requests = [make_request(name, 5, 7, num_sequences=3, temperature=1.0) for name in ("early", "late")]
        cluster.submit(*requests)
        early, late = (cluster.groups[name] for name in ("early", "late"))
        step_until(cluster, lambda: late.preemptions > 0)
        gone = SequenceStatus.WAITING if preemption is Preemption.RECOMPUTE else SequenceStatus.SWAPPED
        assert [sequence.status for sequence in late.sequences] == [gone] * 3
        assert not any(kv.holds(sequence) for sequence in late.sequences)
        assert all(kv.holds(sequence) for sequence in early.sequences)
        cluster.run()
        assert outputs(cluster, *requests) == references(*requests)

    @pytest.mark.parametrize("preemption", list(Preemption))
    def test_waits_for_all_answers_so_that_what_is_lost_is_known(
        self, make_cluster: MakeCluster, preemption: Preemption
    ) -> None:
        cluster = make_cluster(watermark=0.0, preemption=preemption, max_steps_in_flight=2)
        replica = cluster.join(num_blocks=16, block_size=2, num_cpu_blocks=16)
        cluster.submit(*(make_request(f"r{i}", 5, 11) for i in range(3)))
        while not cluster.core.preemptions:
            planned = len(plans(replica))
            outstanding = len(replica.plans)
            cluster.schedule()
            if cluster.core.preemptions:
                assert outstanding == 0
            elif len(plans(replica)) == planned:
                answer(cluster)
        assert plans(replica)[-1].answered_step_id == plans(replica)[-1].step_id - 1


class TestWhatBecomesOfTheBlocks:
    """The verdict for one group: moved to CPU memory, or dropped to be recomputed."""

    @staticmethod
    def preempt(cluster: Cluster, name: str) -> SequenceStatus:
        drain(cluster)
        group = cluster.groups[name]
        StepBuilder(cluster.core.replicas[1], 64).preempt(group)
        return group.status

    @pytest.mark.parametrize(
        ("preemption", "alone", "several"),
        [
            (Preemption.AUTO, SequenceStatus.WAITING, SequenceStatus.SWAPPED),
            (Preemption.SWAP, SequenceStatus.SWAPPED, SequenceStatus.SWAPPED),
            (Preemption.RECOMPUTE, SequenceStatus.WAITING, SequenceStatus.WAITING),
        ],
    )
    def test_is_the_modes_to_say(
        self, make_cluster: MakeCluster, preemption: Preemption, alone: SequenceStatus, several: SequenceStatus
    ) -> None:
        cluster = make_cluster(preemption=preemption)
        cluster.join(num_cpu_blocks=64)
        cluster.submit(make_request("one", 5, 9), make_request("four", 5, 9, num_sequences=4, temperature=1.0))
        cluster.step()
        cluster.step()
        assert self.preempt(cluster, "one") is alone
        assert self.preempt(cluster, "four") is several

    def test_four_that_are_still_one_prefill_count_as_four(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=4)
        cluster.join(num_cpu_blocks=64)
        cluster.submit(make_request("r", 15, 9, num_sequences=4, temperature=1.0))
        cluster.step()
        drain(cluster)
        assert 0 < cluster.groups["r"].sequences[0].placement.num_computed < 15
        assert self.preempt(cluster, "r") is SequenceStatus.SWAPPED

    @pytest.mark.parametrize(
        ("num_ended", "verdict"), [(2, SequenceStatus.SWAPPED), (3, SequenceStatus.WAITING)], ids=["two-left", "one"]
    )
    def test_only_sequences_that_have_not_ended_count(
        self, make_cluster: MakeCluster, num_ended: int, verdict: SequenceStatus
    ) -> None:
        cluster = make_cluster()
        cluster.join(num_cpu_blocks=64)
        cluster.submit(make_request("r", 5, 9, num_sequences=4, temperature=1.0))
        cluster.step()
        for index in range(num_ended):
            end_sequence(cluster, "r", index)
        drain(cluster)
        group = cluster.groups["r"]
        StepBuilder(cluster.core.replicas[1], 64).preempt(group)
        assert [sequence.status for sequence in group.live] == [verdict] * (4 - num_ended)

    def test_a_search_that_has_one_beam_so_far_counts_by_its_width(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=4, max_steps_in_flight=1)
        cluster.join(num_cpu_blocks=64)
        cluster.submit(make_request("wide", 7, 9, beam=beams(4)))
        cluster.step()
        drain(cluster)
        assert len(cluster.groups["wide"].live) == 1
        assert self.preempt(cluster, "wide") is SequenceStatus.SWAPPED

    def test_a_search_of_width_one_is_recomputed(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(num_cpu_blocks=64)
        cluster.submit(make_request("narrow", 7, 9, beam=beams(1)))
        cluster.step()
        assert self.preempt(cluster, "narrow") is SequenceStatus.WAITING

    @pytest.mark.parametrize("cpu_blocks", range(6))
    def test_is_recomputed_where_cpu_memory_has_no_room(self, make_cluster: MakeCluster, cpu_blocks: int) -> None:
        """After one step of decoding, 6 tokens computed: one block is shared and each of two has another."""
        cluster = make_cluster(preemption=Preemption.SWAP, max_steps_in_flight=1)
        cluster.join(num_cpu_blocks=cpu_blocks)
        request = make_request("r", 5, 9, num_sequences=2, temperature=1.0)
        cluster.submit(request)
        cluster.step()
        cluster.step()
        verdict = SequenceStatus.SWAPPED if cpu_blocks >= 3 else SequenceStatus.WAITING
        assert self.preempt(cluster, "r") is verdict


class TestComingBack:
    @pytest.mark.parametrize("policy", list(Policy))
    def test_before_new_ones_in_the_order_of_arrival(self, make_cluster: MakeCluster, policy: Policy) -> None:
        cluster = make_cluster(watermark=0.0, preemption=Preemption.RECOMPUTE, policy=policy)
        replica = cluster.join(num_blocks=16, block_size=2)
        requests = [make_request(f"r{i}", 6, max_tokens=20) for i in range(4)]
        for request in requests:
            cluster.submit(request)
            cluster.now += 0.001
        step_until(cluster, lambda: cluster.core.preemptions >= 2)
        new = make_request("new", 1, max_tokens=1)
        cluster.submit(new)
        waiting, before = ids(cluster.core.waiting), len(admissions(replica, *requests))
        cluster.run()
        assert waiting == ["r2", "r3", "new"]
        since = dict.fromkeys(admissions(replica, *requests, new)[before:])
        assert [name for name in since if name in waiting] == waiting
        assert outputs(cluster, *requests) == references(*requests)

    def test_says_how_often_it_lost_its_blocks_and_how_often_they_were_kept(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(num_blocks=24, block_size=2, num_cpu_blocks=12)
        cluster.submit(make_request("old", 8, max_tokens=30), make_request("one", 8, max_tokens=12))
        cluster.submit(make_request("two", 8, max_tokens=12, num_sequences=2, temperature=1.0))
        cluster.run()
        last = {name: cluster.deltas[name, 0][-1] for name in ("old", "one", "two")}
        assert (last["old"].preemptions, last["old"].swaps) == (0, 0)
        assert last["one"].swaps == 0
        assert last["two"].preemptions >= last["two"].swaps > 0
        assert sum(delta.preemptions for delta in last.values()) == cluster.core.preemptions
        assert sum(delta.swaps for delta in last.values()) == cluster.core.swaps

    @pytest.mark.parametrize("budget", [*range(3, 13), 17])
    @pytest.mark.parametrize("policy", list(Policy))
    def test_piece_by_piece_wherever_steps_cut_what_its_sequences_share(
        self, make_cluster: MakeCluster, policy: Policy, budget: int
    ) -> None:
        """One computes the common beginning, in the middle of whose blocks a step may end, and the others wait for it;
        beams come back in different steps and go on together."""
        cluster = make_cluster(max_num_batched_tokens=budget, policy=policy, prefix_caching=False)
        cluster.join(block_size=4)
        requests = [
            make_request("three", 10, 9, num_sequences=3, temperature=1.0),
            make_request("beams", 7, 9, beam=beams(3)),
        ]
        for request in requests:
            cluster.submit(request)
            (group,) = cluster.groups.values()
            while max(sequence.num_generated for sequence in group.sequences) < 4:
                cluster.step()
            cluster.step(fail=True)
            cluster.run(max_steps=300)
        assert outputs(cluster, *requests) == undisturbed(make_cluster, *requests)
