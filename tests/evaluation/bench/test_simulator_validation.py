"""The command that compares simulation and reality: its figures are of the same jobs, and it says what it missed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from octavo.bench.whole import simulator_validation
from octavo.bench.whole.simulator_validation import (
    ComparedMetric,
    Pipeline,
    RateRow,
    RunFigures,
    Server,
    Turn,
    main,
    measure_pipeline,
    row_text,
    simulate,
    sustained_rate,
    to_json,
    workload,
    write,
)
from octavo.runtime.models.step_times import Calibration, StepTimeModel, TokenTime
from octavo.testbed.tiny_model import write_byte_model
from octavo.workload.job import Job

STEP_S, PAIR_S = 0.02, 0.0001
TIMES = StepTimeModel([TokenTime(1, STEP_S), TokenTime(1000, STEP_S)], *8 * [0.0])
CALIBRATION = Calibration("tiny", "cpu", "none", 2048, 258, 16, 1000, 0, TIMES, 0.0)
PLANTED = Pipeline(front_s=0.004, step_s=0.003, sampled_s=0.0005)


class PlantedServer(Server):
    """Does what the simulation says, with a pipeline of its own."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, jobs: "list[Job]") -> RunFigures:  # type: ignore[override]
        self.sizes.append(len(jobs))
        return simulate(jobs, CALIBRATION, PLANTED)


def test_what_others_add_to_steps_tokens_and_answers_is_found() -> None:
    server = PlantedServer()
    found = measure_pipeline(server, CALIBRATION, batches=(1, 4, 16), num_tokens=8, rounds=2)
    for name in ("front_s", "step_s", "sampled_s"):
        assert getattr(found, name) == pytest.approx(getattr(PLANTED, name), rel=0.3, abs=2e-4), name
    assert sorted(set(server.sizes)) == [1, 4, 16]


def test_tokens_that_came_at_once_are_measured_again_and_not_for_ever() -> None:
    class LateServer(PlantedServer):
        """Its client was too late for every other batch, or for all."""

        def __init__(self, *, always: bool) -> None:
            super().__init__()
            self.always = always

        def run(self, jobs: "list[Job]") -> RunFigures:  # type: ignore[override]
            measured = super().run(jobs)
            if jobs[0].output_tokens == 8 and (self.always or len(self.sizes) % 2):
                return replace(measured, summary=replace(measured.summary, itl=None))
            return measured

    found = measure_pipeline(LateServer(always=False), CALIBRATION, batches=(1, 4), num_tokens=8, rounds=2)
    assert found.step_s == pytest.approx(PLANTED.step_s, rel=0.3)
    with pytest.raises(RuntimeError, match="too busy to measure"):
        measure_pipeline(LateServer(always=True), CALIBRATION, batches=(1,), num_tokens=8, rounds=1)


def test_a_pipeline_makes_answers_later_and_steps_longer() -> None:
    jobs = [Job(1.0, 32, 11)]
    alone, beside = (simulate(jobs, CALIBRATION, pipeline).summary for pipeline in (Pipeline(), PLANTED))
    assert alone.ttft is not None
    assert beside.ttft is not None
    assert alone.latency is not None
    assert beside.latency is not None
    assert alone.ttft.p50 == pytest.approx(STEP_S)
    assert alone.latency.p50 == pytest.approx(11 * STEP_S)
    assert beside.ttft.p50 == pytest.approx(STEP_S + 0.004 + 0.0035)
    assert beside.latency.p50 == pytest.approx(11 * (STEP_S + 0.0035) + 0.004)


def test_requests_have_the_same_lengths_at_every_rate() -> None:
    few, many = workload(2.0, 10.0, seed=1), workload(4.0, 10.0, seed=1)
    assert (len(few), len(many)) == (20, 40)
    for one, other in zip(few, many, strict=False):
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
    assert many[19].arrival_s < few[19].arrival_s


def test_a_faster_worker_sustains_a_higher_rate() -> None:
    slower = sustained_rate(CALIBRATION, Pipeline(step_s=STEP_S))
    assert sustained_rate(CALIBRATION, Pipeline()) == pytest.approx(2 * slower, rel=0.01)


def made_row(real: Pipeline, simulated: Pipeline) -> RateRow:
    jobs = workload(4.0, 10.0, seed=1)
    ran = [simulate(jobs, CALIBRATION, each) for each in (real, simulated)]
    return RateRow(0.5, 4.0, [Turn(CALIBRATION, simulated, *ran)])


def test_what_is_off_by_more_than_its_goal_is_missed() -> None:
    assert [ComparedMetric("ttft p50", [1.0], [each]).is_met for each in (1.14, 0.86, 1.16, 0.84)] == [
        True,
        True,
        False,
        False,
    ]
    assert [ComparedMetric("ttft p99", [1.0], [each]).is_met for each in (1.29, 0.71, 1.31, 0.69)] == [
        True,
        True,
        False,
        False,
    ]


def test_figures_are_means_of_turns_and_tell_how_far_reality_is_from_itself() -> None:
    figure = ComparedMetric("requests/s", [1.0, 3.0], [0.5, 1.5])
    assert (figure.real, figure.simulated, figure.error, figure.spread) == (2.0, 1.0, -0.5, 1.0)


def test_the_table_has_every_figure_and_marks_what_is_missed() -> None:
    text = row_text(made_row(Pipeline(), Pipeline(step_s=STEP_S)))
    for name in ("requests/s", "output tokens/s", "ttft p50", "itl p99", "latency p99", "ms of a step"):
        assert name in text
    [line] = [line for line in text.splitlines() if "itl p50" in line]
    assert line.endswith("missed")
    assert "missed" not in row_text(made_row(PLANTED, PLANTED))


def test_figures_are_written_beside_those_of_others(tmp_path: Path) -> None:
    path = tmp_path / "simulator.json"
    path.write_text('{"speed": 1}')
    write(to_json([made_row(PLANTED, Pipeline())]), path)
    found = json.loads(path.read_text())
    assert found["speed"] == 1
    [row] = found["validation"]["rows"]
    errors = {each["metric"]: each["error"] for each in row["figures"]}
    assert errors["itl p50"] < 0.0
    [turn] = row["turns"]
    assert turn["real"]["summary"]["requests"] == row["requests"] == 40


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [key for key in os.environ if key.startswith("OCTAVO_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("OCTAVO_DEVICE", "fake")
    monkeypatch.setenv("OCTAVO_FAKE_STEP_MS", "2")
    monkeypatch.setattr(simulator_validation, "LOADS", (0.3,))


@pytest.mark.deep
@pytest.mark.usefixtures("fake_worker")
def test_real_processes_and_the_simulator_serve_the_same_jobs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_byte_model(tmp_path / "m")
    out = tmp_path / "v.json"
    quick = ["--turns", "2", "--seconds", "1", "--rounds", "1", "--tokens", "4", "--most", "2"]
    status = main(["--model", str(tmp_path / "m"), "--json", str(out), *quick])
    found = json.loads(out.read_text())["validation"]
    assert found["machine"]["cores"] >= 1
    [row] = found["rows"]
    assert len(row["turns"]) == 2
    for turn in row["turns"]:
        msgspec.convert(turn["calibration"], Calibration)
        assert turn["pipeline"].keys() == {"front_s", "step_s", "sampled_s"}
        for side in ("real", "simulated"):
            assert turn[side]["summary"]["finished"] == row["requests"] // 2 > 0
            assert turn[side]["steps"] > 0
    met = [abs(each["error"]) <= each["goal"] for each in row["figures"]]
    assert len(met) == 8
    assert status == (not all(met))
    assert f"{sum(met)} of 8 figures within their goals" in capfd.readouterr().out
