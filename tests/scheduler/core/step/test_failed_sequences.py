"""A sequence that fails ends its own request; others lose nothing, whatever they shared with it."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import PrefixPinned, StepAnswered
from octavo.testing.cluster import Cluster, FakeReplica, make_request, reference_tokens
from octavo.testing.oracles.paged import paged
from octavo.wire.requests import FinishReason, Prefix, RejectReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import FailureReason, SampledToken, SequenceFailure, StepResult

from ...conftest import MakeCluster

IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 2])
BEAMS: dict[str, Any] = {"beam": BeamSearch(3, 1.0, EarlyStopping.OFF)}
# All ids but those that no prompt here has.
EVERYTHING: dict[str, Any] = {"allowed_token_ids": [3, 4], "banned_token_ids": [4, 3]}


def assert_served(cluster: Cluster, *requests: Request) -> None:
    """These, to their ends, and nothing is held for anybody."""
    cluster.run()
    for request in requests:
        for index in range(request.sampling.num_sequences):
            assert cluster.streams[request.request_id, index] == reference_tokens(request, index)
            assert cluster.ended[request.request_id, index] is FinishReason.LENGTH
    for replica in cluster.core.replicas.values():
        assert replica.kv.num_free + replica.kv.num_pinned == replica.kv.num_blocks
        assert not paged(replica).blocks._distrusted


@IN_FLIGHT
@pytest.mark.parametrize("spoiled_step", range(6))
@pytest.mark.parametrize(
    "decoding", [{}, {"num_sequences": 3, "temperature": 1.0}, BEAMS], ids=["one", "three", "beams"]
)
def test_a_sequence_that_is_not_finite_ends_its_whole_request_and_no_other(
    make_cluster: MakeCluster, in_flight: int, spoiled_step: int, decoding: dict[str, Any]
) -> None:
    cluster = make_cluster(max_num_batched_tokens=12, max_steps_in_flight=in_flight)
    cluster.join()
    spoiled = make_request("spoiled", 9, 12, **decoding)
    others = [make_request("before", 5, 9), make_request("after", 6, 9, num_sequences=2, temperature=1.0)]
    cluster.submit(others[0], spoiled, others[1])
    for _ in range(spoiled_step):
        cluster.step()
    while "spoiled" not in cluster.rejected:
        cluster.step(spoil="spoiled")
    assert cluster.rejected["spoiled"].reason is RejectReason.NOT_FINITE
    assert "--dtype float32" in cluster.rejected["spoiled"].detail
    assert cluster.rejected.keys() == {"spoiled"}
    assert_served(cluster, *others)
    assert all(not replica.table._failed for replica in cluster.replicas.values())


def test_a_request_that_fails_with_all_its_sequences_holds_up_no_plan(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=2)
    cluster.join()
    cluster.submit(make_request("spoiled", 9, 12, num_sequences=3, temperature=1.0), other := make_request("o", 5, 9))
    cluster.step(spoil="spoiled")
    assert cluster.rejected.keys() == {"spoiled"}
    assert len(cluster.core.replicas[1].outstanding) == 1
    cluster.schedule()
    assert len(cluster.core.replicas[1].outstanding) == 2
    assert_served(cluster, other)


@IN_FLIGHT
def test_a_prompt_that_turns_out_not_finite_before_its_end_fails_at_once(
    make_cluster: MakeCluster, in_flight: int
) -> None:
    cluster = make_cluster(max_num_batched_tokens=4, max_steps_in_flight=in_flight)
    cluster.join()
    cluster.submit(make_request("long", 30, 4))
    cluster.step(spoil="long")
    assert cluster.rejected["long"].reason is RejectReason.NOT_FINITE
    assert cluster.core.replicas[1].kv.num_cached == 0
    assert_served(cluster)


@IN_FLIGHT
@pytest.mark.parametrize("budget", [4, 100])
def test_those_that_shared_what_was_not_finite_start_over_and_are_served(
    make_cluster: MakeCluster, in_flight: int, budget: int
) -> None:
    cluster = make_cluster(max_num_batched_tokens=budget, max_steps_in_flight=in_flight)
    cluster.join()
    first, *others = requests = [make_request(name, 11, 7, shared=9) for name in ("first", "second", "third")]
    # As long as somebody is well, it is not the replica.
    cluster.submit(well := make_request("well", 1, 20))
    cluster.step()
    cluster.submit(*requests)
    for _ in range(in_flight):
        cluster.step(spoil="first")
    cluster.step()
    assert cluster.rejected.keys() == {"first"}
    assert_served(cluster, well, *others)
    # What is cached of the shared beginning was computed anew.
    again = msgspec.structs.replace(first, request_id="again")
    cluster.submit(again)
    assert_served(cluster)
    assert cluster.tokens["again"] == reference_tokens(first)
    assert cluster.deltas["again", 0][0].cached_prompt_tokens == 8
    assert cluster.rejected.keys() == {"first"}


@pytest.mark.parametrize(
    "decoding", [{}, {"num_sequences": 3, "temperature": 1.0}, BEAMS], ids=["one", "three", "beams"]
)
@pytest.mark.parametrize("prompt_length", [5, 9], ids=["in the same step", "in the next step too"])
def test_those_whose_windows_have_left_it_behind_start_over_too(
    make_cluster: MakeCluster, prompt_length: int, decoding: dict[str, Any]
) -> None:
    cluster = make_cluster(max_num_batched_tokens=10, max_steps_in_flight=2)
    cluster.join(block_size=2, windows=(4,))
    # As long as somebody is well, it is not the replica.
    cluster.submit(make_request("well", 1, 4))
    # What the second shares of the first is behind its window before it is known to be not finite.
    first, second = (
        make_request("first", 4, 7, shared=4),
        make_request("second", prompt_length, 7, shared=3, **decoding),
    )
    cluster.submit(first, second)
    cluster.step(spoil="first")
    while cluster.core.replicas[1].outstanding:
        cluster.answer(1)
    assert cluster.rejected.keys() == {"first"}
    cluster.run()
    assert cluster.ended.keys() == {("well", 0), *(("second", i) for i in range(second.sampling.num_sequences))}


def test_those_that_start_over_need_not_wait_for_a_replica_to_be_idle(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=2)
    cluster.join()
    busy = make_request("busy", 5, 60)
    first, second = (make_request(name, 11, 7, shared=9) for name in ("first", "second"))
    cluster.submit(busy)
    cluster.step()
    cluster.submit(first, second)
    cluster.step()
    cluster.step(spoil="first")
    for _ in range(15):
        cluster.step()
    assert cluster.rejected.keys() == {"first"}
    assert cluster.finished.keys() == {"second"}
    assert_served(cluster, busy, second)


@IN_FLIGHT
def test_what_an_aborted_sequence_computed_is_not_shared_if_it_was_not_finite(
    make_cluster: MakeCluster, in_flight: int
) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight)
    replica = cluster.join()
    gone, other = (make_request(name, 11, 5, shared=9) for name in ("gone", "other"))
    cluster.submit(gone, other)
    cluster.schedule()
    spoiled = {each.placement.sequence_id for each in cluster.groups["gone"].live}
    cluster.abort("gone")
    cluster.handle(StepAnswered(1, replica.execute(spoil=spoiled)))
    assert_served(cluster, other)
    assert not cluster.rejected
    assert cluster.groups == {}


def test_two_that_share_nothing_fail_in_one_step(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    replica = cluster.join()
    cluster.submit(*(make_request(name, 9, 5) for name in ("a", "b")), good := make_request("c", 9, 5))
    cluster.schedule()
    spoiled = {each.placement.sequence_id for name in ("a", "b") for each in cluster.groups[name].live}
    cluster.handle(StepAnswered(1, replica.execute(spoil=spoiled)))
    assert cluster.rejected.keys() == {"a", "b"}
    assert cluster.core.replicas[1].stats.tokens_sampled == 1
    assert_served(cluster, good)


def test_one_that_keeps_failing_with_others_is_given_up(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_failed_steps=2)
    replica = cluster.join()
    cluster.submit(well := make_request("well", 1, 20))
    cluster.step()
    cluster.submit(*(make_request(name, 9, 5, shared=8) for name in "abcd"))
    while len(cluster.groups) > 1:
        cluster.schedule()
        spoiled = {
            each.placement.sequence_id
            for name in cluster.groups.keys() - {"well"}
            for each in cluster.groups[name].live
        }
        cluster.handle(StepAnswered(1, replica.execute(spoil=spoiled)))
    assert cluster.rejected.keys() == set("abcd")
    assert {each.reason for each in cluster.rejected.values()} == {RejectReason.NOT_FINITE}
    assert_served(cluster, well)


@IN_FLIGHT
@pytest.mark.parametrize("decoding", [{"num_sequences": 2, "temperature": 1.0}, BEAMS], ids=["two", "beams"])
def test_a_request_that_excludes_every_token_fails_and_its_prompt_stays_cached(
    make_cluster: MakeCluster, in_flight: int, decoding: dict[str, Any]
) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight)
    cluster.join()
    other = make_request("other", 9, 5, shared=8)
    cluster.submit(make_request("stuck", 9, 5, shared=8, **EVERYTHING, **decoding), other)
    assert_served(cluster, other)
    assert cluster.rejected["stuck"].reason is RejectReason.NO_TOKEN_LEFT
    assert cluster.deltas["other", 0][0].cached_prompt_tokens == 8
    assert cluster.deltas["other", 0][0].preemptions == 0


def test_a_sequence_may_run_out_of_tokens_half_way(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=2)
    cluster.join()
    # Before the third token the only one that is allowed must not come, for it would stop.
    stuck = make_request("stuck", 5, 9, allowed_token_ids=[7, 8], stop_token_ids=(7, 8), min_tokens=0)
    waiting = make_request("waiting", 5, 9, allowed_token_ids=[7], stop_token_ids=(7,), min_tokens=3)
    cluster.submit(stuck, waiting)
    cluster.run()
    assert cluster.finished["stuck"] is FinishReason.STOP
    assert cluster.rejected["waiting"].reason is RejectReason.NO_TOKEN_LEFT


@IN_FLIGHT
def test_a_request_whose_grammar_cannot_be_followed_fails_alone(make_cluster: MakeCluster, in_flight: int) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight)
    replica = cluster.join()
    lost = make_request("lost", 9, 5, num_sequences=3, temperature=1.0)
    cluster.submit(lost, other := make_request("other", 9, 5, shared=4))
    cluster.schedule()
    result = replica.execute()
    first, *others = result.sampled
    failure = SequenceFailure(first.sequence_id, FailureReason.BAD_GRAMMAR, "no rule is left")
    cluster.handle(StepAnswered(1, msgspec.structs.replace(result, sampled=others, failed=[failure])))
    rejection = cluster.rejected["lost"]
    assert (rejection.reason, rejection.detail) == (RejectReason.BAD_GRAMMAR, "no rule is left")
    assert cluster.rejected.keys() == {"lost"}
    assert_served(cluster, other)
    assert cluster.deltas["other", 0][0].preemptions == 0


def test_a_prefix_that_is_not_finite_is_not_pinned(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    replica = cluster.join()
    cluster.handle(PrefixPinned(Prefix("p", list(range(9)))))
    cluster.schedule()
    spoiled = {each.placement.sequence_id for group in cluster.core.replicas[1].running for each in group.live}
    cluster.handle(StepAnswered(1, replica.execute(spoil=spoiled)))
    kv = cluster.core.replicas[1].kv
    assert "p" not in kv.pinned
    assert kv.num_usable == kv.num_blocks
    assert [(each.replica_id, each.name) for each in cluster.given_up] == [(1, "p")]
    assert "not finite" in cluster.given_up[0].reason
    other = make_request("r", 12, 5, shared=9)
    cluster.submit(other)
    assert_served(cluster, other)


def test_what_is_pinned_stays_when_one_that_uses_it_fails(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    cluster.handle(PrefixPinned(Prefix("p", list(range(8)))))
    cluster.step()
    first, second = (make_request(name, 14, 5, shared=8) for name in ("first", "second"))
    cluster.submit(first)
    cluster.step(spoil="first")
    assert cluster.rejected.keys() == {"first"}
    cluster.submit(second)
    assert_served(cluster, second)
    assert cluster.deltas["second", 0][0].cached_prompt_tokens == 8


class TestAnswers:
    """What a result must say of the sequences that choose: of each exactly one thing."""

    def answered(self, cluster: Cluster, replica: FakeReplica, **changes: Any) -> bool:
        cluster.submit(make_request("a", 5, 4), make_request("b", 5, 4, **BEAMS))
        cluster.schedule()
        result = msgspec.structs.replace(replica.execute(), **changes)
        cluster.handle(StepAnswered(1, result))
        return 1 in cluster.replicas

    def failure(self, sequence_id: int) -> SequenceFailure:
        return SequenceFailure(sequence_id, FailureReason.NO_TOKEN_LEFT, "none")

    def test_a_failure_answers_for_one_that_samples(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        assert self.answered(cluster, cluster.join(), sampled=[], failed=[self.failure(1)])
        assert cluster.rejected.keys() == {"a"}

    def test_a_failure_answers_for_a_beam(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        assert self.answered(cluster, cluster.join(), candidates=[], failed=[self.failure(2)])
        assert cluster.rejected.keys() == {"b"}

    @pytest.mark.parametrize(
        "changes",
        [
            {"sampled": []},
            {"candidates": []},
            {"failed": [SequenceFailure(1, FailureReason.NO_TOKEN_LEFT, "none")]},
            {"failed": [SequenceFailure(2, FailureReason.NO_TOKEN_LEFT, "none")]},
            {"failed": [SequenceFailure(77, FailureReason.NO_TOKEN_LEFT, "none")]},
            {"sampled": [], "failed": [SequenceFailure(1, FailureReason.NOT_FINITE, "")] * 2},
            {"sampled": [SampledToken(2, 5)], "failed": [SequenceFailure(1, FailureReason.NOT_FINITE, "")]},
        ],
    )
    def test_anything_else_was_not_asked(self, make_cluster: MakeCluster, changes: dict[str, Any]) -> None:
        cluster = make_cluster()
        assert not self.answered(cluster, cluster.join(), **changes)
        assert not cluster.rejected


def test_a_failure_in_a_failed_step_means_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    replica = cluster.join()
    cluster.submit(request := make_request("a", 5, 4))
    cluster.schedule()
    result: StepResult = replica.execute(fail=True)
    cluster.handle(StepAnswered(1, result))
    assert_served(cluster, request)
