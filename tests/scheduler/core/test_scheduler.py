"""The core through its front door: events in, effects out, with fake replicas that notice any wrong block."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import (
    FrontendJoined,
    LeaseRenewed,
    ReplicaHeard,
    ReplicaJoined,
    RequestsAborted,
    RequestSubmitted,
    StepAnswered,
)
from octavo.testing.cluster import FRONTEND, Cluster, FakeReplica, make_request, reference_tokens, resubmitted
from octavo.wire.requests import (
    FinishReason,
    FrontendWelcome,
    Lease,
    RejectReason,
    Renewed,
    Request,
    StatusChanged,
)
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import SequenceWork, StepPlan, WorkerRefused, WorkerWelcome
from octavo.worker.fake.runner import FakeRunner

from ..conftest import MakeCluster
from ..views import plans, step_until


def newcomer(cluster: Cluster, incarnation: int) -> FakeReplica:
    """A replica that has not said hello yet."""
    runner = FakeRunner(cluster._directory, block_size=4, num_blocks=64, num_cpu_blocks=0)
    return FakeReplica(runner, incarnation)


def shares(plan: StepPlan) -> list[int]:
    return [work.num_tokens for work in plan.work]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_generates_what_the_model_generates_alone(make_cluster: MakeCluster, in_flight: int) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight)
    cluster.join()
    requests = [make_request(f"r{i}", prompt_length=i + 1, max_tokens=5 + i) for i in range(6)]
    cluster.submit(*requests)
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}
    assert set(cluster.finished.values()) == {FinishReason.LENGTH}


def test_blocks_are_allocated_as_a_sequence_grows(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=4)
    cluster.submit(make_request("r", prompt_length=7, max_tokens=4))
    cluster.run()
    new_blocks = [work.new_block_ids for plan in plans(replica) for work in plan.work]
    assert [sum(map(len, groups)) for groups in new_blocks] == [2, 0, 1, 0]


def test_a_steady_decode_step_sends_no_block_table_and_no_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join(block_size=16, num_blocks=256)
    cluster.submit(*(make_request(f"r{i}", 3, max_tokens=10) for i in range(32)))
    cluster.step()
    cluster.step()
    plan = plans(replica)[-1]
    assert (plan.starts, plan.forget) == ([], [])
    assert all(work == SequenceWork(work.sequence_id, 1, []) for work in plan.work)


def test_sends_the_next_plan_before_the_result_is_back(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=2)
    replica = cluster.join()
    cluster.submit(make_request("r", 3, max_tokens=8))
    cluster.schedule()
    cluster.schedule()
    cluster.schedule()
    assert [shares(plan) for plan in replica.plans] == [[3], [1]]


def test_never_plans_beyond_max_tokens_however_many_steps_are_in_flight(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=2)
    replica = cluster.join()
    cluster.submit(make_request("r", 3, max_tokens=2))
    cluster.run()
    assert [shares(plan) for plan in plans(replica)] == [[3], [1]]


@pytest.mark.parametrize(("in_flight", "wasted"), [(1, 0), (2, 1)])
def test_a_stop_token_ends_the_sequence_and_wastes_at_most_one_slot(
    make_cluster: MakeCluster, in_flight: int, wasted: int
) -> None:
    free_run = make_request("r", 3, max_tokens=20)
    stop = reference_tokens(free_run)[4]
    cluster = make_cluster(max_steps_in_flight=in_flight)
    replica = cluster.join()
    request = make_request("r", 3, max_tokens=20, stop_token_ids=(stop,))
    cluster.submit(request)
    cluster.run()
    assert cluster.tokens["r"] == reference_tokens(free_run)[:5]
    assert cluster.finished["r"] is FinishReason.STOP
    assert len(plans(replica)) == 5 + wasted


def test_blocks_of_a_finished_sequence_wait_for_the_step_it_is_still_in(make_cluster: MakeCluster) -> None:
    stop = reference_tokens(make_request("r", 3, max_tokens=20))[0]
    cluster = make_cluster(max_steps_in_flight=2)
    replica = cluster.join(num_blocks=8)
    cluster.submit(make_request("r", 3, max_tokens=20, stop_token_ids=(stop,)))
    cluster.schedule()
    cluster.schedule()
    cluster.handle(StepAnswered(1, replica.execute()))
    assert "r" in cluster.finished
    assert cluster.core.replicas[1].kv.num_free < 8
    cluster.handle(StepAnswered(1, replica.execute()))
    assert cluster.core.replicas[1].kv.num_free == 8


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 15, 20])
def test_preempted_sequences_are_recomputed_to_the_same_tokens(
    make_cluster: MakeCluster, in_flight: int, num_blocks: int
) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight)
    cluster.join(num_blocks=num_blocks, block_size=2)
    requests = [make_request(f"r{i}", 5, max_tokens=15) for i in range(4)]
    cluster.submit(*requests)
    cluster.run()
    assert cluster.core.preemptions > 0
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}


def test_preempts_the_latest_arrival_and_takes_it_back_first(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
    replica = cluster.join(num_blocks=6, block_size=2)
    cluster.submit(make_request("early", 4, max_tokens=7))
    cluster.now += 1
    cluster.submit(make_request("late", 4, max_tokens=7))
    cluster.now += 1
    step_until(cluster, lambda: cluster.core.preemptions)
    assert [group.request.request_id for group in cluster.core.waiting] == ["late"]
    assert cluster.groups["late"].preemptions == 1
    assert cluster.groups["early"].preemptions == 0
    cluster.submit(make_request("new", 1, max_tokens=1))
    cluster.run()
    last = [start.prompt_token_ids for plan in plans(replica) for start in plan.starts][2:]
    assert last == [make_request("late", 4, 7).prompt_token_ids, make_request("new", 1, 1).prompt_token_ids]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_preempts_no_more_than_it_must(make_cluster: MakeCluster, in_flight: int) -> None:
    cluster = make_cluster(max_steps_in_flight=in_flight, watermark=0.0)
    cluster.join(num_blocks=13, block_size=2)
    cluster.submit(*(make_request(f"r{i}", 4, max_tokens=7) for i in range(3)))
    step_until(cluster, lambda: cluster.core.preemptions)
    assert cluster.core.preemptions == 1


def test_no_step_exceeds_a_budget_smaller_than_the_number_of_requests(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=2)
    cluster.join()
    requests = [make_request(f"r{i}", 1, max_tokens=6) for i in range(5)]
    cluster.submit(*requests)
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}


def test_admission_keeps_a_watermark_of_blocks_free_unless_nothing_runs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.25)
    cluster.join(num_blocks=8, block_size=4)
    cluster.submit(make_request("whole-pool", 28, max_tokens=4))
    cluster.schedule()
    assert not len(cluster.core.waiting)
    cluster.run()
    cluster.submit(make_request("a", 12, max_tokens=4), make_request("b", 16, max_tokens=4))
    cluster.schedule()
    assert [group.request.request_id for group in cluster.core.waiting] == ["b"]


def test_runs_no_more_sequences_than_allowed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=3)
    replica = cluster.join()
    cluster.submit(*(make_request(f"r{i}", 3, max_tokens=4) for i in range(8)))
    cluster.run()
    assert max(len(plan.work) for plan in plans(replica)) == 3
    assert len(cluster.finished) == 8


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_aborted_request_holds_nothing_once_its_steps_are_answered(
    make_cluster: MakeCluster, steps: int, in_flight: int
) -> None:
    cluster = make_cluster(max_num_batched_tokens=4, max_steps_in_flight=in_flight)
    cluster.join(num_blocks=16)
    other = make_request("other", 4, max_tokens=12)
    cluster.submit(make_request("r", 14, max_tokens=20), other)
    for _ in range(steps):
        cluster.step()
    cluster.schedule()
    cluster.abort("r")
    cluster.run()
    assert cluster.core.replicas[1].kv.num_free == 16
    assert cluster.tokens["other"] == reference_tokens(other)
    assert "r" not in cluster.finished


def test_the_worker_is_told_to_forget_what_is_over(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    replica = cluster.join()
    cluster.submit(make_request("short", 3, max_tokens=2), make_request("long", 3, max_tokens=6))
    cluster.run()
    cluster.submit(make_request("next", 3, max_tokens=1))
    cluster.run()
    assert [sequence.prompt_length for sequence in replica.table] == [3]


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "reason"),
        [
            (make_request("r", 0, 5), RejectReason.EMPTY_PROMPT),
            (make_request("r", 4000, 200), RejectReason.PROMPT_TOO_LONG),
            (make_request("r", 200, 100), RejectReason.NEVER_FITS_KV),
            (
                msgspec.structs.replace(make_request("r", 5, 5), prompt_token_ids=[1000]),
                RejectReason.BAD_TOKEN_ID,
            ),
            (resubmitted(make_request("r", 5, 2), [1, 2]), RejectReason.ALREADY_COMPLETE),
            # What no frontend says of a request: it goes on with less or more sequences than it asked for.
            (resubmitted(make_request("r", 5, 5), [1], [2]), RejectReason.TOO_MANY_SEQUENCES),
            (resubmitted(make_request("r", 5, 5, num_sequences=2), [1]), RejectReason.TOO_MANY_SEQUENCES),
            (
                resubmitted(make_request("r", 5, 5, beam=BeamSearch(2, 1.0, EarlyStopping.OFF)), [1]),
                RejectReason.TOO_MANY_SEQUENCES,
            ),
            (resubmitted(make_request("r", 5, 5), [1000]), RejectReason.BAD_TOKEN_ID),
            (make_request("r", 5, 5, num_sequences=9), RejectReason.TOO_MANY_SEQUENCES),
            (
                make_request("r", 5, 5, beam=BeamSearch(9, 1.0, EarlyStopping.OFF)),
                RejectReason.TOO_MANY_SEQUENCES,
            ),
            # The whole prompt and the longest answer of each, as if nothing were shared.
            (make_request("r", 31, 2, num_sequences=8), RejectReason.NEVER_FITS_KV),
        ],
        ids=lambda value: value.value if isinstance(value, RejectReason) else "",
    )
    @pytest.mark.parametrize("worker_first", [True, False])
    def test_what_can_never_run_is_refused_and_holds_nothing(
        self, make_cluster: MakeCluster, request_: Request, reason: RejectReason, worker_first: bool
    ) -> None:
        cluster = make_cluster(max_num_seqs=8)
        if worker_first:
            cluster.join(num_blocks=64, block_size=4)
        cluster.submit(request_)
        if not worker_first:
            cluster.join(num_blocks=64, block_size=4)
        assert cluster.rejected["r"].reason is reason
        assert not cluster.groups

    def test_a_repeated_submission_is_ignored_and_the_first_goes_on(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        request = make_request("r", 3, max_tokens=5)
        cluster.submit(request)
        cluster.step()
        cluster.submit(request)
        cluster.run()
        assert not cluster.rejected
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_two_frontends_may_use_one_id_for_different_requests(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.handle(FrontendJoined(FRONTEND + 1))
        request = make_request("r", 3, max_tokens=5)
        cluster.submit(request)
        cluster.handle(RequestSubmitted(FRONTEND + 1, request))
        assert len(cluster.core.groups) == 2
        cluster.handle(RequestsAborted(FRONTEND + 1, ["r"]))
        cluster.join()
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_more_than_may_wait_is_refused_unless_it_was_accepted_before(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_waiting=2)
        cluster.submit(*(make_request(f"r{i}", 3, max_tokens=5) for i in range(3)))
        assert cluster.rejected["r2"].reason is RejectReason.QUEUE_FULL
        cluster.submit(msgspec.structs.replace(make_request("again", 3, 5), resubmitted=True))
        assert set(cluster.groups) == {"r0", "r1", "again"}

    @pytest.mark.parametrize("worker_first", [True, False])
    def test_a_request_meant_for_another_model_is_refused_even_when_it_has_run(
        self, make_cluster: MakeCluster, worker_first: bool
    ) -> None:
        cluster = make_cluster()
        request = make_request("r", 3, max_tokens=5)
        foreign = resubmitted(request, reference_tokens(request)[:2], model_fingerprint="other")
        if worker_first:
            cluster.join()
        cluster.submit(foreign)
        if not worker_first:
            cluster.join()
        assert cluster.rejected["r"].reason is RejectReason.MODEL_MISMATCH
        assert not cluster.groups


class TestUnequalReplicas:
    """What only the larger of two replicas can hold is never refused once it was accepted."""

    BIG, SMALL = 100, 8

    def test_a_resubmitted_request_waits_for_the_larger_one(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        request = make_request("r", 100, max_tokens=20)
        tokens = reference_tokens(request)
        cluster.join(1, num_blocks=self.SMALL)
        cluster.submit(resubmitted(request, tokens[:5]))
        cluster.step()
        cluster.join(2, num_blocks=self.BIG)
        cluster.run()
        assert cluster.tokens["r"] == tokens

    def test_a_queued_request_waits_for_the_larger_one(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        request = make_request("r", 100, max_tokens=20)
        cluster.join(1, num_blocks=self.BIG)
        cluster.submit(request)
        cluster.leave(1)
        cluster.join(2, num_blocks=self.SMALL)
        cluster.step()
        cluster.join(3, num_blocks=self.BIG)
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)


class TestReplicas:
    def test_requests_wait_for_the_first_worker(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        request = make_request("r", 3, max_tokens=5)
        cluster.submit(request)
        cluster.schedule()
        cluster.join()
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_frontends_are_told_when_a_replica_comes_or_goes(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(num_blocks=10, block_size=4)
        cluster.leave(1)
        seen = [
            message.status for message in cluster.to_frontend if isinstance(message, FrontendWelcome | StatusChanged)
        ]
        assert [(status.replicas, status.capacity_tokens, status.max_parallel) for status in seen] == [
            (0, 0, 256),
            (1, 40, 256),
            (0, 0, 256),
        ]

    def test_work_is_spread_over_replicas(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        first, second = cluster.join(1), cluster.join(2)
        cluster.submit(*(make_request(f"r{i}", 8, max_tokens=4) for i in range(8)))
        cluster.schedule()
        assert [len(plans(replica)[0].work) for replica in (first, second)] == [4, 4]

    @pytest.mark.parametrize("steps", range(6))
    def test_a_lost_replicas_sequences_are_recomputed_elsewhere(self, make_cluster: MakeCluster, steps: int) -> None:
        cluster = make_cluster(max_num_batched_tokens=8)
        cluster.join(1)
        cluster.join(2)
        requests = [make_request(f"r{i}", 6, max_tokens=9) for i in range(5)]
        cluster.submit(*requests)
        for _ in range(steps):
            cluster.step()
        cluster.schedule()
        cluster.leave(1)
        cluster.run()
        assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}

    def test_a_worker_that_registers_anew_replaces_its_former_self(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        first = cluster.join(1)
        request = make_request("r", 6, max_tokens=9)
        cluster.submit(request)
        cluster.step()
        second = cluster.replicas[2] = newcomer(cluster, 2)
        cluster.handle(ReplicaJoined(msgspec.structs.replace(second.hello, worker_id=first.hello.worker_id)))
        assert list(cluster.core.replicas) == [2]
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_saying_hello_twice_changes_nothing(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        replica = cluster.join()
        cluster.submit(make_request("r", 6, max_tokens=9))
        cluster.step()
        cluster.handle(ReplicaJoined(replica.hello))
        assert replica.received[-1] == WorkerWelcome(cluster.core.epoch)
        assert len(cluster.core.replicas[1].running) == 1

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("fingerprint", "other"),
            ("dtype", "other"),
            ("max_model_len", 7),
            ("vocab_size", 7),
            ("quantization", "q4_0"),
        ],
    )
    def test_a_worker_with_another_model_is_refused_by_name(
        self, make_cluster: MakeCluster, field: str, value: str | int
    ) -> None:
        cluster = make_cluster()
        first = cluster.join(1)
        stranger = cluster.replicas[2] = newcomer(cluster, 2)
        model = msgspec.structs.replace(first.hello.model, **{field: value})
        cluster.handle(ReplicaJoined(msgspec.structs.replace(stranger.hello, model=model)))
        assert isinstance(stranger.received[-1], WorkerRefused)
        assert "start it with the same model directory" in stranger.received[-1].detail
        assert list(cluster.core.replicas) == [1]

    @pytest.mark.parametrize("fields", [{"num_blocks": 0}, {"kv_groups": []}, {"num_blocks": 0, "kv_groups": []}])
    def test_a_worker_that_generates_without_kv_blocks_is_refused(
        self, make_cluster: MakeCluster, fields: dict[str, Any]
    ) -> None:
        cluster = make_cluster()
        stranger = cluster.replicas[1] = newcomer(cluster, 1)
        cluster.handle(ReplicaJoined(msgspec.structs.replace(stranger.hello, **fields)))
        assert isinstance(stranger.received[-1], WorkerRefused)
        assert "only an encoder, which" in stranger.received[-1].detail
        assert not cluster.core.replicas

    def test_an_answer_to_another_question_costs_the_replica_its_place(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        replica = cluster.join()
        cluster.submit(make_request("r", 3, max_tokens=5))
        cluster.schedule()
        result = msgspec.structs.replace(replica.execute(), sampled=[])
        cluster.handle(StepAnswered(1, result))
        assert not cluster.core.replicas
        assert [group.request.request_id for group in cluster.core.waiting] == ["r"]

    def test_what_fitted_only_a_lost_replica_waits_without_blocking_others(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(1, num_blocks=100)
        cluster.join(2, num_blocks=8)
        big, small = make_request("big", 100, max_tokens=20), make_request("small", 4, max_tokens=4)
        cluster.submit(big)
        cluster.step()
        cluster.leave(1)
        cluster.submit(small)
        for _ in range(10):
            cluster.step()
        assert cluster.tokens["small"] == reference_tokens(small)
        cluster.join(3, num_blocks=100)
        cluster.run()
        assert cluster.tokens["big"] == reference_tokens(big)


class TestFailedSteps:
    @pytest.mark.parametrize("failing_step", range(5))
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_all_that_was_in_a_failed_step_starts_over_and_loses_no_token(
        self, make_cluster: MakeCluster, failing_step: int, in_flight: int
    ) -> None:
        cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=in_flight)
        cluster.join()
        requests = [make_request(f"r{i}", 5, max_tokens=6) for i in range(4)]
        cluster.submit(*requests)
        for step in range(failing_step + 1):
            cluster.schedule()
            cluster.step(fail=step == failing_step)
        cluster.run()
        assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}

    def test_a_request_whose_steps_keep_failing_is_given_up(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_failed_steps=3)
        cluster.join()
        cluster.submit(make_request("r", 5, max_tokens=6))
        for _ in range(8):
            cluster.step(fail=True)
        assert cluster.rejected["r"].reason is RejectReason.STEP_FAILED
        assert not cluster.groups
        assert cluster.core.replicas[1].kv.num_free == 64

    def test_a_request_that_is_given_up_is_told_why_its_step_failed_not_why_the_next_was_skipped(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(max_failed_steps=1, max_steps_in_flight=2)
        replica = cluster.join()
        cluster.submit(make_request("r", 5, max_tokens=6))
        cluster.schedule()
        cluster.schedule()
        for fail, detail in ((True, "no memory"), (False, "step 1 had failed")):
            cluster.handle(StepAnswered(1, msgspec.structs.replace(replica.execute(fail=fail), detail=detail)))
        assert cluster.rejected["r"].detail == "no memory"

    def test_only_the_failed_step_is_held_against_a_request_not_the_skipped_ones(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=2)
        replica = cluster.join()
        cluster.submit(make_request("failed", 5, max_tokens=6))
        cluster.schedule()
        cluster.submit(make_request("skipped", 5, max_tokens=6))
        cluster.schedule()
        cluster.handle(StepAnswered(1, replica.execute(fail=True)))
        cluster.handle(StepAnswered(1, replica.execute()))
        failed_steps = {name: group.faults.failed_steps for name, group in cluster.groups.items()}
        assert failed_steps == {"failed": 1, "skipped": 0}


class TestLeases:
    def test_requests_of_a_silent_frontend_are_dropped(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(lease_s=5.0, idle_timeout_s=1e9, first_step_timeout_s=1e9)
        cluster.join()
        cluster.submit(make_request("running", 5, max_tokens=50))
        cluster.step()
        cluster.tick(4.9)
        assert cluster.groups
        cluster.tick(0.2)
        assert not cluster.groups
        assert cluster.core.num_frontends == 0

    def test_what_a_renewal_does_not_name_is_dropped_and_what_is_unknown_is_asked_for(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster()
        cluster.join()
        cluster.submit(make_request("kept", 5, max_tokens=50), make_request("dropped", 5, max_tokens=50))
        cluster.step()
        cluster.handle(LeaseRenewed(FRONTEND, [Lease("kept", 1), Lease("lost", 1)]))
        assert list(cluster.groups) == ["kept"]
        answer = cluster.to_frontend[-1]
        assert isinstance(answer, Renewed)
        assert answer.unknown == [Lease("lost", 1)]

    def test_a_copy_with_an_older_attempt_is_asked_for_again(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.submit(make_request("r", 5, max_tokens=50))
        cluster.handle(LeaseRenewed(FRONTEND, [Lease("r", 2)]))
        answer = cluster.to_frontend[-1]
        assert isinstance(answer, Renewed)
        assert answer.unknown == [Lease("r", 2)]
        assert not cluster.groups

    @pytest.mark.parametrize("delivered", [0, 1, 4])
    def test_a_request_submitted_again_goes_on_after_its_delivered_tokens(
        self, make_cluster: MakeCluster, delivered: int
    ) -> None:
        cluster = make_cluster()
        cluster.join()
        request = make_request("r", 5, max_tokens=8)
        tokens = reference_tokens(request)
        cluster.submit(resubmitted(request, tokens[:delivered], age_ms=1500))
        cluster.run()
        assert cluster.tokens["r"] == tokens

    def test_a_higher_attempt_replaces_the_running_copy(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        request = make_request("r", 5, max_tokens=8)
        cluster.submit(request)
        for _ in range(3):
            cluster.step()
        so_far = list(cluster.tokens["r"])
        cluster.submit(resubmitted(request, so_far))
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)


class TestLiveness:
    def test_an_idle_worker_lives_by_its_heartbeats(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(idle_timeout_s=1.5, lease_s=1e9)
        cluster.join()
        for _ in range(10):
            cluster.tick(1.0)
            cluster.handle(ReplicaHeard(1))
        assert cluster.core.replicas
        cluster.tick(1.6)
        assert not cluster.core.replicas

    def test_a_computing_worker_has_until_its_steps_deadline(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(first_step_timeout_s=60.0, lease_s=1e9)
        cluster.join()
        cluster.submit(make_request("r", 5, max_tokens=8))
        cluster.schedule()
        cluster.tick(59.0)
        assert cluster.core.replicas
        cluster.tick(2.0)
        assert not cluster.core.replicas
        assert [group.request.request_id for group in cluster.core.waiting] == ["r"]

    def test_quick_steps_get_the_floor(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, step_timeout_s=2.0, lease_s=1e9)
        cluster.join()
        cluster.submit(make_request("r", 1, max_tokens=50))
        cluster.step()
        cluster.schedule()
        cluster.tick(1.9)
        assert cluster.core.replicas
        cluster.tick(0.2)
        assert not cluster.core.replicas

    def test_a_step_of_a_new_shape_is_measured_by_the_one_next_to_it(self, make_cluster: MakeCluster) -> None:
        """What is recomputed after a loss comes in steps that a worker has not had before: if it hangs there, not as
        long as the very first step may take."""
        cluster = make_cluster(max_steps_in_flight=1, step_timeout_s=2.0, first_step_timeout_s=60.0, lease_s=1e9)
        replica = cluster.join()
        cluster.submit(make_request("short", 4, max_tokens=50))
        cluster.schedule()
        cluster.now += 1.0
        cluster.handle(StepAnswered(1, replica.execute()))
        cluster.submit(make_request("long", 40, max_tokens=50))
        cluster.schedule()
        # 41 tokens are three powers of two above 4, and a step may take five times as long as expected.
        cluster.tick(39.0)
        assert cluster.core.replicas
        cluster.tick(2.0)
        assert not cluster.core.replicas

    def test_a_steps_clock_starts_when_the_one_before_it_is_answered(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=2, first_step_timeout_s=60.0, step_timeout_s=2.0, lease_s=1e9)
        replica = cluster.join()
        cluster.submit(make_request("r", 1, max_tokens=50))
        cluster.schedule()
        cluster.schedule()
        cluster.now += 1.5
        cluster.handle(StepAnswered(1, replica.execute()))
        cluster.tick(7.0)
        assert cluster.core.replicas
        cluster.tick(1.0)
        assert not cluster.core.replicas

    def test_known_shapes_get_five_times_their_slowest_but_no_less_than_the_floor(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=1, step_timeout_s=2.0, lease_s=1e9)
        replica = cluster.join()
        cluster.submit(make_request("r", 1, max_tokens=50))
        cluster.schedule()
        cluster.now += 1.0
        cluster.handle(StepAnswered(1, replica.execute()))
        cluster.schedule()
        cluster.tick(4.9)
        assert cluster.core.replicas
        cluster.tick(0.2)
        assert not cluster.core.replicas


def test_a_late_hello_of_any_incarnation_before_registers_nobody_anew(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    hellos = []
    for incarnation in (1, 2, 3):
        hellos.append(cluster.join(incarnation, worker_id="worker").hello)
    for late in hellos[:2]:
        cluster.replicas[late.incarnation] = cluster.replicas[3]
        cluster.handle(ReplicaJoined(late))
    assert list(cluster.core.replicas) == [3]
