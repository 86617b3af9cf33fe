"""Orca's batching: who joins, when, and with how much of its prompt."""

from octavo.paper.systems import run
from octavo.runtime.models.step_times import StepShape
from octavo.simulator.device import ReplicaSpec
from octavo.workload.job import Job


class OneSecond:
    """For each step, whose tokens it keeps."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def seconds(self, shape: StepShape) -> float:
        self.num_tokens.append(shape.num_tokens)
        return 1.0


def first_tokens(jobs: list[Job], latency: OneSecond, num_slots: int = 128) -> list[float | None]:
    spec = ReplicaSpec(num_slots // 16, 16, latency, max_model_len=2048)
    return [served.first_token_s for served in run("Orca (Oracle)", spec, jobs).served]


def test_a_request_joins_the_next_iteration_beside_those_that_run() -> None:
    latency = OneSecond()
    assert first_tokens([Job(0.0, 10, 5), Job(1.5, 20, 2)], latency) == [1.0, 3.0]
    assert latency.num_tokens == [10, 1, 1 + 20, 1 + 1, 1]


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    """The second needs all memory, so the third has to wait with it though it would fit."""
    jobs = [Job(0.0, 10, 5), Job(0.1, 100, 3), Job(0.2, 4, 2)]
    assert first_tokens(jobs, OneSecond()) == [1.0, 6.0, 9.0]


def test_prompts_are_computed_whole() -> None:
    """Of three with 1,000 tokens the last would have to be cut, for no step computes more than 2,560."""
    latency = OneSecond()
    assert first_tokens([Job(0.0, 1000, 2)] * 3, latency, num_slots=4096) == [1.0, 1.0, 2.0]
    assert latency.num_tokens == [2000, 2 + 1000, 1]
