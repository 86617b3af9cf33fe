"""Batches of whole requests: nobody joins one that runs, and all of it is answered at its end."""

from octavo.paper.systems import FASTER_TRANSFORMER, hand_out_by_batch, run
from octavo.runtime.models.step_times import StepShape
from octavo.simulator.device import ReplicaSpec
from octavo.workload.job import Job
from octavo.workload.measures import Served


class OneSecond:
    """For each step."""

    def seconds(self, shape: StepShape) -> float:
        return 1.0


# Room for two sequences of the longest kind.
SPEC = ReplicaSpec(8, 16, OneSecond(), max_model_len=64)


def ends(jobs: list[Job]) -> list[float | None]:
    return [served.finished_s for served in run(FASTER_TRANSFORMER, SPEC, jobs).served]


def test_a_batch_is_answered_when_its_longest_request_has_ended() -> None:
    assert ends([Job(0.0, 4, 2), Job(0.0, 4, 5)]) == [5.0, 5.0]


def test_no_request_joins_a_batch_that_runs_even_where_there_is_room() -> None:
    assert ends([Job(0.0, 4, 5), Job(0.5, 4, 1)]) == [5.0, 6.0]


def test_the_earliest_that_fit_are_the_next_batch() -> None:
    assert ends([Job(0.0, 4, 3), Job(0.1, 4, 2), Job(0.2, 4, 4), Job(0.3, 4, 1)]) == [3.0, 7.0, 7.0, 8.0]


def test_first_tokens_come_with_the_whole_answer() -> None:
    served = run(FASTER_TRANSFORMER, SPEC, [Job(0.0, 4, 2), Job(0.0, 4, 5)]).served
    assert [each.first_token_s for each in served] == [5.0, 5.0]


def test_the_prompts_of_a_batch_are_one_step_however_long_they_are() -> None:
    spec = ReplicaSpec(4 * 512, 16, OneSecond(), max_model_len=2048)
    served = run(FASTER_TRANSFORMER, spec, [Job(0.0, 2000, 3) for _ in range(16)]).served
    assert {each.finished_s for each in served} == {3.0}


def test_a_batch_that_has_not_ended_has_answered_nothing() -> None:
    job = Job(0.0, 4, 4)
    served = [Served(job, 1.0, 2.0, 4), Served(job, 3.0, 4.0, 4), Served(job, 3.0, None, 2), Served(job)]
    hand_out_by_batch(served)
    assert [(each.first_token_s, each.finished_s) for each in served] == [
        (2.0, 2.0),
        (None, None),
        (None, None),
        (None, None),
    ]
