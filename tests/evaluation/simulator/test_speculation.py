"""Speculation in simulation: guesses come true as often as is given, or as an event log shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.server.event_log import log_file, recorder
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation, SimulationOutcome
from octavo.simulator.hardware import GPUS, MODELS
from octavo.simulator.hardware import replica as roofline
from octavo.simulator.recorded import jobs_of_log
from octavo.simulator.report import make_report, report_text
from octavo.simulator.speculation import Acceptance, Outputs
from octavo.testing import cluster as fakes
from octavo.testing.cluster import make_request, reference_tokens, write_fake_model
from octavo.wire.costs import PrefillCosts, RowCost, StepCosts, SwapCosts
from octavo.workload.job import Job, prompt_token_ids

STEP_S, ROW_S = 0.25, 1 / 64
ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Linear:
    """So many seconds for any step, and for each of its rows."""

    row_s: float = ROW_S

    def seconds(self, shape: StepShape) -> float:
        return STEP_S + shape.num_tokens * self.row_s

    @property
    def costs(self) -> StepCosts:
        rows = [RowCost(count, self.seconds(StepShape(count))) for count in ROWS]
        return StepCosts(PrefillCosts(STEP_S, self.row_s, 0.0), SwapCosts(0.0, 0.0, 0.0), rows)


def run(
    jobs: list[Job],
    speculation: Any,
    acceptance: Acceptance | None,
    *,
    latency: Linear | None = None,
    seed: int = 0,
    **settings: Any,
) -> SimulationOutcome:
    latency = latency or Linear()
    spec = ReplicaSpec(4096, 16, latency, max_model_len=8192, costs=latency.costs)
    config = SchedulerConfig(speculation=speculation, **settings)
    return Simulation(Cluster(config, [spec], acceptance=acceptance), seed=seed).run(jobs)


def tokens_per_turn(outcome: SimulationOutcome) -> float:
    return sum(each.num_tokens for each in outcome.served) / outcome.turns


@pytest.mark.parametrize(
    ("acceptance", "most"),
    [
        (Acceptance((0.8, 0.9, 0.95)), 4),
        (Acceptance((0.5,)), 8),
        (Acceptance((0.7, 0.9), 0.4), 3),
        (Acceptance((1.0,)), 2),
    ],
)
def test_a_step_gives_as_many_tokens_as_the_chances_say(acceptance: Acceptance, most: int) -> None:
    """Within 2 % over some 4,000 steps of sequences, whose standard error is below 1 %."""
    outcome = run([Job(0.0, 20, 3000) for _ in range(4)], most, acceptance)
    assert tokens_per_turn(outcome) == pytest.approx(acceptance.tokens_per_step(most), rel=0.02)
    assert outcome.guesses.steps / outcome.turns == pytest.approx(acceptance.proposals, rel=0.04)
    first = outcome.guesses.right_by_depth[:3]
    assert first == pytest.approx(acceptance.chances(len(first)), abs=0.04)


def test_the_chances_of_all_further_guesses_are_those_of_the_last_that_is_given() -> None:
    acceptance = Acceptance.parse("0.5, 0.25", 0.5)
    assert acceptance.chances(4) == [0.5, 0.25, 0.25, 0.25]
    assert acceptance.chances(1) == [0.5]
    assert acceptance.tokens_per_step(3) == 1 + 0.5 * (0.5 + 0.5 * 0.25 + 0.5 * 0.25 * 0.25)


@pytest.mark.parametrize("acceptance", [None, Acceptance((0.0,)), Acceptance((0.9,), 0.0)])
def test_random_text_costs_nothing(acceptance: Acceptance | None) -> None:
    """Where no guess comes true, or there is none, every token comes when it would without speculation."""
    jobs = [Job(number * 3.0, 50, 400, n=1 + number % 2) for number in range(6)]
    plain, found = run(jobs, "off", None), run(jobs, "auto", acceptance)
    assert found.guesses.steps == 0
    assert (found.served, found.steps, found.seconds) == (plain.served, plain.steps, plain.seconds)


def test_guesses_save_as_much_time_as_steps() -> None:
    """One sequence alone whose guesses all come true, in steps that take as long for any number of rows."""
    latency = Linear(0.0)
    plain = run([Job(0.0, 16, 1 + 64)], "off", None, latency=latency)
    found = run([Job(0.0, 16, 1 + 64)], 7, Acceptance((1.0,)), latency=latency)
    assert (plain.steps, plain.seconds) == (65, 65 * STEP_S)
    assert (found.steps, found.seconds) == (9, 9 * STEP_S)
    assert found.served[0].num_tokens == 65
    assert (found.guesses.drafted, found.guesses.accepted) == (56, 56)


def test_few_sequences_are_given_guesses_and_many_none() -> None:
    """As rows cost here, 64 sequences gain nothing by more of them."""
    acceptance = Acceptance((0.6, 0.8))
    dear = Linear(STEP_S)
    few = run([Job(0.0, 16, 200)], "auto", acceptance)
    many = run([Job(0.0, 16, 60) for _ in range(64)], "auto", acceptance, latency=dear)
    assert few.guesses.steps > 0
    assert few.seconds < 0.6 * run([Job(0.0, 16, 200)], "off", None).seconds
    assert many.guesses.steps == 0


def test_one_seed_draws_the_same_guesses_and_another_one_others() -> None:
    jobs, acceptance = [Job(0.0, 16, 300) for _ in range(3)], Acceptance((0.7,), 0.8)
    one, again, other = (run(jobs, "auto", acceptance, seed=seed) for seed in (1, 1, 2))
    assert (one.served, one.guesses) == (again.served, again.guesses)
    assert one.guesses != other.guesses


def test_preempted_sequences_go_on_with_guesses() -> None:
    """In so small a pool that groups lose their blocks."""
    latency = Linear()
    spec = ReplicaSpec(24, 16, latency, num_cpu_blocks=24, max_model_len=8192, costs=latency.costs)
    jobs = [Job(0.0, 40, 150) for _ in range(4)]
    for preemption in ("swap", "recompute"):
        config = SchedulerConfig(speculation=4, preemption=preemption)  # type: ignore[arg-type]
        outcome = Simulation(Cluster(config, [spec], acceptance=Acceptance((0.9,)))).run(jobs)
        assert outcome.preemptions > 0
        assert outcome.guesses.accepted > 0
        assert [each.num_tokens for each in outcome.served] == [150] * 4


@pytest.mark.parametrize(
    ("text", "fault"), [("0.8,often", "are no chances"), ("1.5", "from 0 to 1"), ("", "no chances"), ("nan", "from 0")]
)
def test_what_is_no_chance_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Acceptance.parse(text)


def test_a_gpu_s_rows_cost_what_its_steps_take() -> None:
    spec = roofline(MODELS["llama-3-8b"], GPUS["h200"])
    assert spec.costs is not None
    first, *others = spec.costs.rows
    assert first.seconds == spec.latency.seconds(StepShape(1, 1, 1))
    assert [each.rows for each in others] == [*ROWS[1:]]
    # Weights are read once for all rows.
    assert first.seconds < others[-1].seconds < 1.5 * first.seconds


# -- event logs -------------------------------------------------------------------------------------------------------


def log_of(tmp_path: Path, *requests: Any) -> tuple[Path, fakes.Cluster]:
    log = tmp_path / "events"
    with log.open("wb", buffering=0) as file:
        cluster = fakes.Cluster(write_fake_model(tmp_path / "model"), record=recorder(log_file(file)))
        cluster.join(1, num_blocks=64, block_size=4)
        cluster.submit(*requests)
        cluster.run()
    return log, cluster


def test_what_an_event_log_says_again_is_guessed_as_it_was_told(tmp_path: Path) -> None:
    """A client predicted all of its answer, and another one nothing."""
    request = make_request("told", 7, 60)
    predicted = structs.replace(request, predicted_token_ids=reference_tokens(request))
    log, cluster = log_of(tmp_path, predicted, make_request("silent", 9, 60))
    jobs = jobs_of_log(log)
    told, silent = jobs
    assert told.transcript is not None
    assert told.transcript.outputs == [cluster.tokens["told"]]
    found = run([told], 8, None)
    assert found.served[0].num_tokens == 60
    assert found.guesses.accepted > 40
    assert found.steps < 60 - found.guesses.accepted + 2
    assert run([silent], 8, None).guesses.accepted < 10


def test_a_request_of_a_log_says_what_it_said_and_then_what_nothing_repeats(tmp_path: Path) -> None:
    pair = make_request("pair", 7, 12, num_sequences=2, temperature=1.0, salt="pepper")
    log, cluster = log_of(tmp_path, pair)
    (job,) = jobs_of_log(log)
    assert job.transcript is not None
    assert job.transcript.prompt_token_ids == prompt_token_ids(job, 0, 1000, 0) == pair.prompt_token_ids
    assert job.transcript.salt == "pepper"
    outputs = Outputs(vocab_size=1000)
    outputs.expect("0", job.transcript.outputs)
    said = [outputs.tokens("0", index, 0, 100) for index in range(2)]
    assert [each[:12] for each in said] == job.transcript.outputs
    assert said[0][:12] == cluster.tokens["pair"]
    assert said[0][12:] != said[1][12:]
    assert outputs.tokens("0", 1, 40, 8) == said[1][40:48]
    assert len(set(said[0][12:])) > 75


def test_the_page_tells_of_guesses_and_of_the_same_load_without(tmp_path: Path) -> None:
    jobs = [Job(0.0, 16, 100) for _ in range(2)]
    found, plain = run(jobs, 4, Acceptance((0.9,))), run(jobs, "off", None)
    report = make_report(found, plain=plain)
    assert report.speculation is not None
    assert report.speculation.plain is not None
    assert report.speculation.plain.steps == plain.steps > found.steps == report.steps
    assert report.speculation.accepted == found.guesses.accepted
    text = report_text(report)
    for part in (f"{found.guesses.accepted} of {found.guesses.drafted} guesses", "without", "tokens/s"):
        assert part in text
    assert make_report(plain).speculation is None
