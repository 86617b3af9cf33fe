"""Several sequences of one request: one prefill, shared blocks, ends of their own, and what is left after a loss."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import SequenceEnded
from octavo.testing.cluster import FRONTEND, Cluster, make_request, reference_tokens, resubmitted
from octavo.wire.requests import FinishReason, GeneratedSequence, Request
from octavo.wire.steps import SequenceFork

from .conftest import MakeCluster
from .views import blocks, computed, kv_of, num_held, plans, sequence, step_until, table


def sampled(name: str, prompt_length: int, max_tokens: int, count: int, **sampling: Any) -> Request:
    """`count` sequences that differ from their first token on."""
    return make_request(name, prompt_length, max_tokens, num_sequences=count, temperature=1.0, seed=3, **sampling)


def references(request: Request) -> list[list[int]]:
    return [reference_tokens(request, index) for index in range(request.sampling.num_sequences)]


def end(cluster: Cluster, request: Request, index: int, attempt: int | None = None) -> None:
    """The frontend has found a stop string in one sequence."""
    attempt = request.attempt if attempt is None else attempt
    cluster.handle(SequenceEnded(FRONTEND, request.request_id, attempt, index))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_every_sequence_is_what_it_would_be_alone(
    make_cluster: MakeCluster, in_flight: int, block_size: int, prefix_caching: bool
) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight, max_num_batched_tokens=32, prefix_caching=prefix_caching)
    cluster.join(num_blocks=1024, block_size=block_size)
    requests = [sampled(f"r{n}", 3 + n, 2 + n, count=n) for n in range(1, 9)]
    cluster.submit(*requests)
    cluster.run()
    assert [cluster.outputs(request.request_id) for request in requests] == [references(r) for r in requests]
    assert set(cluster.ended.values()) == {FinishReason.LENGTH}


def test_the_prompt_is_computed_once_for_all(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, prefix_caching=False)
    replica = cluster.join()
    cluster.submit(sampled("r", 10, 4, count=5))
    cluster.run()
    assert computed(replica) == [10, 5, 5, 5]


def test_the_others_fork_in_the_plan_that_computes_the_last_prompt_token(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, max_num_batched_tokens=4)
    replica = cluster.join()
    cluster.submit(sampled("r", 10, 3, count=3))
    for _ in range(3):
        cluster.step()
    first, second, last = plans(replica)
    leader, *others = (each.placement.sequence_id for each in cluster.groups["r"].sequences)
    assert (first.forks, second.forks) == ([], [])
    assert last.forks == [SequenceFork(leader, other, index) for index, other in enumerate(others, 1)]
    assert [(work.sequence_id, work.num_tokens, work.follower_ids) for work in last.work] == [(leader, 2, others)]
    assert [len(cluster.streams["r", index]) for index in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("prompt_length", "copies", "held"),
    [
        # A partly filled last block is copied for all but one, who writes it in place.
        (5, 3, 1 + 4),
        (7, 3, 1 + 4),
        # A full one stays shared, and each takes a new block.
        (8, 0, 2 + 4),
        (9, 3, 2 + 4),
    ],
)
def test_only_a_partly_filled_block_is_copied(
    make_cluster: MakeCluster, prompt_length: int, copies: int, held: int
) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=4)
    cluster.submit(sampled("r", prompt_length, 8, count=4))
    cluster.step()
    assert num_held(cluster) == -(-prompt_length // 4)
    cluster.step()
    assert num_held(cluster) == held
    assert [len(plan.moves.copy) for plan in plans(replica)] == [0, copies]
    cluster.run()
    assert sum(len(plan.moves.copy) for plan in plans(replica)) == copies
    assert num_held(cluster) == 0


def test_sharing_leaves_room_for_more_requests_than_their_worst_cases_would(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
    # One may grow to 4 * (32 + 4) tokens if nothing is shared, which is all there is; but it holds 8 + 4 blocks.
    cluster.join(num_blocks=36, block_size=4)
    requests = [sampled(f"r{i}", 32, 4, count=4) for i in range(3)]
    cluster.submit(*requests)
    for _ in range(2):
        cluster.step()
    assert num_held(cluster) == 3 * (8 + 4)
    cluster.run()
    assert cluster.core.preemptions == 0
    assert [cluster.outputs(request.request_id) for request in requests] == [references(r) for r in requests]


class TestEnds:
    def test_a_sequence_that_ends_early_gives_its_own_blocks_back_and_the_others_go_on(
        self, make_cluster: MakeCluster
    ) -> None:
        free_run = sampled("r", 8, 12, count=3)
        stop = reference_tokens(free_run, 1)[1]
        request = sampled("r", 8, 12, count=3, stop_token_ids=(stop,))
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join(block_size=4)
        cluster.submit(request)
        for _ in range(2):
            cluster.step()
        assert cluster.ended == {("r", 1): FinishReason.STOP}
        assert num_held(cluster) == 2 + 2
        assert kv_of(cluster).ref_count(table(cluster, "r")[0]) == 2
        cluster.run()
        assert cluster.outputs("r") == references(request)
        assert len(cluster.streams["r", 1]) == 2

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_no_stop_token_comes_before_min_tokens(self, make_cluster: MakeCluster, in_flight: int) -> None:
        free_run = sampled("r", 5, 12, count=3)
        stops = {token for tokens in references(free_run) for token in tokens[:4]}
        request = sampled("r", 5, 12, count=3, min_tokens=3, stop_token_ids=tuple(sorted(stops)))
        cluster = make_cluster(max_steps_in_flight=in_flight)
        cluster.join()
        cluster.submit(request)
        cluster.run()
        assert cluster.outputs("r") == references(request)
        assert all(len(tokens) > 3 for tokens in cluster.outputs("r"))

    def test_a_stop_token_right_after_min_tokens_ends_a_sequence(self, make_cluster: MakeCluster) -> None:
        stop = reference_tokens(make_request("r", 5, 12))[3]
        cluster = make_cluster()
        cluster.join()
        cluster.submit(make_request("r", 5, 12, min_tokens=3, stop_token_ids=(stop,)))
        cluster.run()
        assert (len(cluster.tokens["r"]), cluster.finished["r"]) == (4, FinishReason.STOP)

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_one_token_each_takes_one_step(self, make_cluster: MakeCluster, in_flight: int) -> None:
        cluster = make_cluster(max_steps_in_flight=in_flight)
        replica = cluster.join()
        request = sampled("r", 6, 1, count=4)
        cluster.submit(request)
        cluster.run()
        assert cluster.outputs("r") == references(request)
        assert computed(replica) == [6]

    def test_greedy_sequences_are_all_the_same(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        request = make_request("r", 6, 9, num_sequences=3)
        cluster.submit(request)
        cluster.run()
        assert cluster.outputs("r") == [reference_tokens(request)] * 3


class TestEndedByTheFrontend:
    """A stop string is found where there is text; the scheduler is told which sequence it ended."""

    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("steps", range(1, 5))
    def test_the_others_go_on(self, make_cluster: MakeCluster, in_flight: int, steps: int) -> None:
        cluster = make_cluster(max_steps_in_flight=in_flight)
        replica = cluster.join(block_size=4)
        request = sampled("r", 6, 8, count=3)
        cluster.submit(request)
        for _ in range(steps):
            cluster.step()
        end(cluster, request, 1)
        heard = len(cluster.streams["r", 1])
        cluster.run()
        assert [cluster.streams["r", index] for index in (0, 2)] == [references(request)[index] for index in (0, 2)]
        assert cluster.streams["r", 1] == references(request)[1][:heard]
        assert num_held(cluster) == 0
        assert len(plans(replica)[-1].work) == 2

    def test_its_blocks_are_free_as_soon_as_no_step_uses_them(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=2)
        cluster.join(block_size=4)
        request = sampled("r", 8, 20, count=2)
        cluster.submit(request)
        for _ in range(3):
            cluster.step()
        assert num_held(cluster) == 2 + 2
        end(cluster, request, 0)
        assert num_held(cluster) == 2 + 2
        cluster.step()
        assert num_held(cluster) == 2 + 1

    def test_the_last_one_ends_the_request(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        request = sampled("r", 6, 8, count=2)
        cluster.submit(request)
        cluster.step()
        end(cluster, request, 0)
        assert list(cluster.groups) == ["r"]
        end(cluster, request, 1)
        assert not cluster.groups
        assert num_held(cluster) == 0

    def test_unknown_ids_other_attempts_and_what_has_ended_are_ignored(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        request = sampled("r", 6, 8, count=2)
        cluster.submit(request)
        for _ in range(3):
            cluster.step()
        end(cluster, make_request("stranger", 1, 1), 0)
        end(cluster, request, 0, attempt=2)
        end(cluster, request, 7)
        end(cluster, request, 1)
        end(cluster, request, 1)
        assert [each.index for each in cluster.groups["r"].live] == [0]
        cluster.run()
        assert cluster.streams["r", 0] == reference_tokens(request)
        end(cluster, request, 0)

    def test_one_that_waits_never_starts(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        request = sampled("r", 6, 8, count=3)
        cluster.submit(request)
        for index in (0, 1):
            end(cluster, request, index)
        cluster.join()
        cluster.run()
        assert cluster.streams["r", 2] == references(request)[2]
        assert cluster.streams["r", 0] == []

    def test_the_last_one_that_waits_ends_the_request(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        request = make_request("r", 6, 8)
        cluster.submit(request)
        end(cluster, request, 0)
        assert not cluster.groups
        assert len(cluster.core.waiting) == 0

    @pytest.mark.parametrize("index", [0, 1])
    def test_one_that_is_swapped_out_gives_its_cpu_blocks_back(self, make_cluster: MakeCluster, index: int) -> None:
        cluster, request = swapped_out(make_cluster)
        kv = kv_of(cluster)
        before = kv.num_cpu_free
        end(cluster, request, index)
        # Its own partly filled block; the prompt's full one is the other's too.
        assert kv.num_cpu_free > before
        cluster.run()
        assert cluster.streams["r", 1 - index] == references(request)[1 - index]

    def test_the_last_one_that_is_swapped_out_ends_the_request(self, make_cluster: MakeCluster) -> None:
        cluster, request = swapped_out(make_cluster)
        for index in (0, 1):
            end(cluster, request, index)
        assert "r" not in cluster.groups
        assert kv_of(cluster).num_cpu_free == kv_of(cluster).num_cpu_blocks

    @pytest.mark.parametrize("steps", range(1, 6))
    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("windows", [(0,), (6,), (0, 6)])
    @pytest.mark.parametrize("same", [True, False], ids=["followed", "waited for"])
    def test_what_the_others_need_of_it_is_still_computed(
        self, make_cluster: MakeCluster, steps: int, count: int, windows: tuple[int, ...], same: bool
    ) -> None:
        """It ends while its prompt is recomputed, in a pool that has no block to spare for another's copy."""
        cluster = make_cluster(max_num_batched_tokens=6, max_steps_in_flight=2, watermark=0.0)
        cluster.join(num_blocks=5 * count * len(windows), block_size=4, windows=windows)
        request = sampled("r", 14, 6, count) if not same else make_request("r", 14, 6, num_sequences=count)
        undisturbed = make_cluster()
        undisturbed.join(windows=windows, num_blocks=500)
        undisturbed.submit(request)
        undisturbed.run()
        expected = undisturbed.outputs("r")
        again = resubmitted(request, *(tokens[:2] for tokens in expected))
        cluster.submit(make_request("filler", (21 if same else 17) + 10 * (count - 2), 3), again)
        for _ in range(steps):
            cluster.step()
        end(cluster, again, 0)
        heard = list(cluster.streams["r", 0])
        for _ in range(60):
            cluster.step()
        assert not cluster.groups
        assert not cluster.rejected
        assert cluster.outputs("r") == [heard, *expected[1:]]

    @pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["followed", "waited for"])
    def test_that_the_others_need_it_brings_nothing_back(self, make_cluster: MakeCluster, temperature: float) -> None:
        cluster = make_cluster(max_num_batched_tokens=6, max_steps_in_flight=1)
        replica = cluster.join(block_size=4)
        request = make_request("r", 20, 6, num_sequences=3, temperature=temperature)
        again = resubmitted(request, *(tokens[:2] for tokens in references(request)))
        cluster.submit(again)
        cluster.step()
        for _ in range(2):
            end(cluster, again, 0)
        cluster.step(fail=True)
        cluster.step()
        assert [each.index for each in cluster.groups["r"].live] == [1, 2]
        assert plans(replica)[2].starts[0].sequence_index == 1
        for index in (1, 2):
            end(cluster, again, index)
        assert not cluster.groups
        assert num_held(cluster) == 0

    def test_the_last_one_ends_the_request_though_others_were_needed(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=6, max_steps_in_flight=1)
        cluster.join()
        request = make_request("r", 20, 6, num_sequences=2)
        again = resubmitted(request, *(tokens[:2] for tokens in references(request)))
        cluster.submit(again)
        cluster.step()
        for index in (0, 1):
            assert cluster.groups
            end(cluster, again, index)
        assert not cluster.groups
        assert num_held(cluster) == 0


def swapped_out(make_cluster: MakeCluster) -> tuple[Cluster, Request]:
    """Two sequences that have lost the device to an older request."""
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0, preemption=Preemption.SWAP)
    cluster.join(num_blocks=12, block_size=4, num_cpu_blocks=12)
    request = sampled("r", 6, 12, count=2)
    cluster.submit(make_request("older", 17, 27), request)
    step_until(cluster, lambda: cluster.core.replicas[1].swapped)
    return cluster, request


class TestAfterALoss:
    """What a group shared before it lost its blocks it shares afterwards, so what fitted before fits again."""

    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_equal_beginnings_share_blocks_and_are_computed_once(
        self, make_cluster: MakeCluster, prefix_caching: bool
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=1, prefix_caching=prefix_caching)
        replica = cluster.join(num_blocks=64, block_size=4)
        cluster.submit(sampled("r", 30, 9, count=4))
        for _ in range(4):
            cluster.step()
        held = len(blocks(cluster, "r"))
        assert held == 7 + 4 * 2
        cluster.step(fail=True)
        cluster.schedule()
        assert len(blocks(cluster, "r")) == held
        # 34 tokens each, of which 28 are common and in full blocks; the last of them needs its logits anew.
        resumed = plans(replica)[-1]
        assert sum(work.num_tokens for work in resumed.work) <= 34 + 3 * 6

    @pytest.mark.parametrize("prefix_caching", [True, False])
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("count", [2, 3, 4])
    def test_recomputed_groups_go_on_with_the_same_tokens(
        self, make_cluster: MakeCluster, prefix_caching: bool, in_flight: int, count: int
    ) -> None:
        cluster = make_cluster(
            max_steps_in_flight=in_flight,
            max_num_batched_tokens=16,
            prefix_caching=prefix_caching,
            preemption=Preemption.RECOMPUTE,
        )
        cluster.join(num_blocks=count * 9, block_size=2)
        requests = [sampled(f"r{i}", 7, 10, count) for i in range(3)]
        cluster.submit(*requests)
        cluster.run()
        assert cluster.core.preemptions > 0
        assert cluster.core.swaps == 0
        assert [cluster.outputs(request.request_id) for request in requests] == [references(r) for r in requests]

    def test_a_group_fits_where_it_fitted_before(self, make_cluster: MakeCluster) -> None:
        """Two groups share so much that both fit; unshared, a recomputed one would have to wait for the other's end."""
        cluster = make_cluster(max_steps_in_flight=1, watermark=0.0, prefix_caching=False)
        cluster.join(num_blocks=40, block_size=4)
        requests = [sampled(name, 32, 8, count=4) for name in ("a", "b")]
        cluster.submit(*requests)
        for _ in range(3):
            cluster.step()
        cluster.step(fail=True)
        cluster.step()
        assert len(cluster.core.replicas[1].running) == 2
        cluster.run()
        assert [cluster.outputs(request.request_id) for request in requests] == [references(r) for r in requests]

    @pytest.mark.parametrize("steps", range(6))
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_a_lost_replicas_groups_are_recomputed_elsewhere(
        self, make_cluster: MakeCluster, steps: int, in_flight: int
    ) -> None:
        cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=in_flight)
        cluster.join(1, num_blocks=128)
        cluster.join(2, num_blocks=128)
        requests = [sampled(f"r{i}", 6, 7, count=3) for i in range(4)]
        cluster.submit(*requests)
        for _ in range(steps):
            cluster.step()
        cluster.schedule()
        cluster.leave(1)
        cluster.run()
        assert [cluster.outputs(request.request_id) for request in requests] == [references(r) for r in requests]


class TestSubmittedAgain:
    @pytest.mark.parametrize("lengths", [(0, 0, 0), (2, 2, 2), (1, 4, 0), (5, 1, 3), (7, 7, 0)])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_sequences_of_different_lengths_go_on_where_each_was(
        self, make_cluster: MakeCluster, lengths: tuple[int, ...], temperature: float
    ) -> None:
        cluster = make_cluster(max_num_batched_tokens=8)
        cluster.join()
        request = make_request("r", 6, 8, num_sequences=3, temperature=temperature)
        known = [tokens[:length] for tokens, length in zip(references(request), lengths, strict=True)]
        cluster.submit(resubmitted(request, *known))
        cluster.run()
        assert cluster.outputs("r") == references(request)

    def test_finished_ones_are_neither_computed_nor_sent_again(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join()
        request = sampled("r", 6, 8, count=3)
        expected = references(request)
        generated = [
            GeneratedSequence(expected[0][:4], finished=True),
            GeneratedSequence(expected[1][:2], finished=False),
            GeneratedSequence(expected[2], finished=True),
        ]
        cluster.submit(msgspec.structs.replace(request, generated=generated, attempt=2, resubmitted=True))
        cluster.step()
        assert sequence(cluster, "r", 1).num_generated == 3
        assert [start.sequence_index for start in plans(replica)[0].starts] == [1]
        cluster.run()
        assert cluster.outputs("r") == [expected[0][:4], expected[1], expected[2]]
        assert {stream for stream, deltas in cluster.deltas.items() if deltas} == {("r", 1)}

    def test_those_that_were_alike_are_computed_together_until_they_differ(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, prefix_caching=False)
        replica = cluster.join()
        request = make_request("r", 6, 8, num_sequences=3)
        cluster.submit(resubmitted(request, *(tokens[:3] for tokens in references(request))))
        cluster.step()
        assert computed(replica) == [9]
        assert len(plans(replica)[0].work[0].follower_ids) == 2
        cluster.run()
        assert cluster.outputs("r") == references(request)
