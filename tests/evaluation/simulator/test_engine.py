"""Small simulations, checked by hand. Times are sums of powers of two, so they are exact."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.config import Policy, Preemption, SchedulerConfig
from octavo.scheduler.core.step.policies import CHUNKED
from octavo.simulator.cell import SimulationError
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation, SimulationOutcome
from octavo.workload.job import Job

STEP_S = 0.25


@dataclass(frozen=True)
class Linear:
    """So many seconds for any step, and for each of its tokens."""

    step_s: float = STEP_S
    token_s: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        return self.step_s + shape.num_tokens * self.token_s


def run(
    jobs: list[Job], *, replicas: int = 1, latency: Linear | None = None, link_s: float = 0.0, **settings: Any
) -> SimulationOutcome:
    """`settings` are those of the replicas and of the configuration, by their names."""
    spec = ReplicaSpec(num_blocks=256, block_size=4, latency=latency or Linear(), max_model_len=1024)
    of_spec = {name: settings.pop(name) for name in list(settings) if hasattr(spec, name)}
    config = SchedulerConfig(**{"max_steps_in_flight": 1, "prefix_caching": False, "watermark": 0.0, **settings})
    return Simulation(Cluster(config, [replace(spec, **of_spec)] * replicas, link_s=link_s)).run(jobs)


def test_a_request_alone_has_its_first_token_after_one_step_and_each_next_after_another() -> None:
    outcome = run([Job(1.5, 10, 5)])
    (served,) = outcome.served
    assert (served.first_token_s, served.finished_s, served.num_tokens) == (1.75, 2.75, 5)
    assert (served.ttft, served.latency, served.normalised_latency) == (0.25, 1.25, 0.25)
    assert (outcome.gaps.count, outcome.gaps.mean) == (4, STEP_S)
    assert (outcome.steps, outcome.seconds, outcome.busy_share) == (5, 2.75, 1.25 / 2.75)


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    (served,) = run([Job(0.0, 10, 2)], max_num_batched_tokens=4).served
    assert (served.first_token_s, served.finished_s) == (0.75, 1.0)


def test_requests_of_one_replica_share_its_steps() -> None:
    outcome = run([Job(0.0, 64, 1), Job(0.0, 64, 1)], latency=Linear(0.0, 1 / 64))
    assert [served.first_token_s for served in outcome.served] == [2.0, 2.0]


def test_requests_of_two_replicas_do_not_wait_for_each_other() -> None:
    outcome = run([Job(0.0, 64, 1), Job(0.0, 64, 1)], latency=Linear(0.0, 1 / 64), replicas=2)
    assert [served.first_token_s for served in outcome.served] == [1.0, 1.0]
    assert outcome.busy_share == 1.0


def test_the_paper_s_policy_computes_a_prompt_in_a_step_without_decodes() -> None:
    jobs = [Job(0.0, 8, 8), Job(0.3, 8, 2)]
    one, other = run(jobs, policy=Policy.PAPER).served
    # It comes in the second step, and has the third to itself.
    assert (other.first_token_s, other.finished_s) == (0.75, 1.0)
    assert one.finished_s == 8 * STEP_S + STEP_S


def test_the_next_step_waits_for_the_link_unless_it_is_sent_ahead() -> None:
    link_s = 0.0625
    cycle_s = STEP_S + 2 * link_s
    (served,) = run([Job(0.0, 10, 5)], link_s=link_s).served
    assert (served.first_token_s, served.finished_s) == (cycle_s, 5 * cycle_s)
    (served,) = run([Job(0.0, 10, 5)], link_s=link_s, max_steps_in_flight=2).served
    assert (served.first_token_s, served.finished_s) == (cycle_s, cycle_s + 4 * STEP_S)


@pytest.mark.parametrize(("in_flight", "first_token_s"), [(1, 1.0), (2, 1.25)])
def test_a_newcomer_waits_for_all_steps_in_flight(in_flight: int, first_token_s: float) -> None:
    _, newcomer = run([Job(0.0, 10, 20), Job(0.55, 10, 2)], max_steps_in_flight=in_flight).served
    assert newcomer.first_token_s == first_token_s


def test_steps_ahead_compute_nothing_in_vain() -> None:
    assert run([Job(0.0, 10, 5)], max_steps_in_flight=2).steps == 5


def test_what_loses_its_blocks_is_computed_again() -> None:
    # Each comes to 5 blocks, and there are 6: the later gives way once, and its prompt has grown meanwhile.
    outcome = run([Job(0.0, 8, 12), Job(0.0, 8, 12)], num_blocks=6)
    one, other = outcome.served
    assert (one.finished_s, one.preemptions) == (3.0, 0)
    assert (other.num_tokens, other.preemptions) == (12, 1)
    # Both had 5 tokens after as many steps; it goes on where it was, after the other's end.
    assert other.finished_s == 3.0 + 7 * STEP_S
    assert (outcome.preemptions, outcome.swaps) == (1, 0)


def test_what_loses_its_blocks_may_be_swapped() -> None:
    outcome = run([Job(0.0, 8, 12), Job(0.0, 8, 12)], num_blocks=6, num_cpu_blocks=6, preemption=Preemption.SWAP)
    assert (outcome.preemptions, outcome.swaps) == (1, 1)
    assert [served.num_tokens for served in outcome.served] == [12, 12]


def test_samples_and_beams_of_a_request_run_side_by_side() -> None:
    outcome = run([Job(0.0, 8, 6, n=3), Job(0.0, 8, 6, n=2, beam_width=4)])
    samples, beams = outcome.served
    assert (samples.num_tokens, samples.finished_s) == (18, 6 * STEP_S)
    assert (beams.num_tokens, beams.finished_s) == (12, 6 * STEP_S)


def test_a_shared_prefix_is_computed_once() -> None:
    jobs = [Job(10.0 * place, 64, 1, prefix="p", prefix_tokens=60) for place in range(2)]
    first, second = run(jobs, latency=Linear(0.0, 1 / 64), prefix_caching=True).served
    assert (first.ttft, second.ttft) == (1.0, 4 / 64)


def test_a_request_that_cannot_run_is_refused_with_its_reason() -> None:
    too_long, fine = run([Job(0.0, 1020, 5), Job(0.0, 8, 1)]).served
    assert too_long.error == "prompt_too_long: 1025 tokens exceed the context of 1024"
    assert (too_long.finished_s, fine.finished_s) == (None, STEP_S)


def test_what_finds_the_queue_full_is_refused() -> None:
    outcome = run([Job(0.01 * place, 8, 4) for place in range(4)], max_num_seqs=1, max_waiting=1)
    assert [served.error.partition(":")[0] for served in outcome.served] == ["", "", "queue_full", "queue_full"]


def test_the_horizon_ends_a_simulation_with_requests_under_way() -> None:
    cluster = Cluster(SchedulerConfig(max_steps_in_flight=1), [ReplicaSpec(64, 4, Linear())])
    outcome = Simulation(cluster).run([Job(0.0, 8, 100), Job(50.0, 8, 1)], horizon_s=1.1)
    (served,) = outcome.served
    assert (outcome.seconds, served.num_tokens, served.finished_s) == (1.1, 4, None)


def test_samples_tell_what_waits_and_runs_at_equal_times() -> None:
    config = SchedulerConfig(max_steps_in_flight=1, max_num_seqs=1, prefix_caching=False)
    simulation = Simulation(Cluster(config, [ReplicaSpec(8, 4, Linear())]), sample_every_s=0.5)
    samples = simulation.run([Job(0.1, 8, 4), Job(0.1, 8, 4)]).samples
    assert [(each.time, each.waiting, each.running, each.blocks_used) for each in samples] == [
        (0.0, 0, 0, 0),
        (0.5, 1, 1, 3),
        (1.0, 1, 1, 3),
        (1.5, 0, 1, 3),
        (2.0, 0, 1, 3),
    ]


def test_long_pauses_between_requests_are_no_stall() -> None:
    first, last = run([Job(0.0, 8, 2), Job(50_000.0, 8, 2)]).served
    assert (first.latency, last.latency) == (0.5, 0.5)


def test_a_policy_that_admits_nothing_is_found_out() -> None:
    policy = replace(CHUNKED, admits=lambda builder: False)
    cluster = Cluster(SchedulerConfig(), [ReplicaSpec(64, 4, Linear())], policy=policy)
    with pytest.raises(SimulationError, match="nothing has been computed for 600 s"):
        Simulation(cluster).run([Job(0.0, 8, 2)])


def test_a_simulation_without_requests_is_over_at_once() -> None:
    outcome = run([])
    assert (outcome.seconds, outcome.steps, outcome.served) == (0.0, 0, [])
