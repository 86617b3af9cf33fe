"""Ratios, and the words around them."""

import json
from dataclasses import replace

import pytest

from octavo.bench.figures import FIGURES, CaseFigure, CaseWork, StepRows, Yardsticks
from octavo.bench.measurement import OTHERS, Measurement
from octavo.bench.report import ALONE, LLAMA_CPP, OPENVINO, WHOLE, BenchReport, Runs, to_text
from octavo.bench.workloads import make_case

FIGURE = {(figure.case, figure.name): figure for figure in FIGURES}
TIME_PER_TOKEN, FIRST_TOKEN = FIGURE["a", "time per token"], FIGURE["a", "first token"]
PROMPTS = FIGURE["c", "prompts"]


def run(case: str, wall_s: float, ms_per_token: float = 20.0, ttft_ms: float = 100.0) -> Measurement:
    cpu_s = {"worker": wall_s, OTHERS: 0.5 * wall_s}
    return Measurement(case, wall_s, 1.0, ms_per_token, ttft_ms, ttft_ms, 1, {"model": 0.9, "other": 0.1}, cpu_s)


def runs(name: str, threads: int, slowness: float, **memory: int) -> Runs:
    measurements = {
        "a": [run("a", 9.0, 30.0 * slowness, 99.0 * slowness), run("a", 9.0, 20.0 * slowness, 100.0 * slowness)],
        "c": [run("c", 4.0 * slowness), run("c", 5.0 * slowness)],
    }
    return Runs(name, threads, 2.5, "bf16", 10_000, {OPENVINO: "bf16"}, "", measurements, {"peak": 600 << 20, **memory})


@pytest.fixture
def report() -> BenchReport:
    # Reading the weights takes 10 ms with two threads; a row through the layers 1 ms and through the head 2 ms.
    best = Yardsticks(1e6, {1: 0.001, 2048: 2.048}, {1: 0.002, 8: 0.016})
    worse = Yardsticks(1e5, {1: 0.1, 2048: 3.0}, {1: 0.003, 8: 0.2})
    work = {
        "a": CaseWork(make_case("a", 100), [StepRows(50, 0), StepRows(78, 1), StepRows(1, 1)]),
        "c": CaseWork(make_case("c", 100), [StepRows(500, 4), StepRows(500, 4)]),
    }
    one_thread = Yardsticks(1e5, {1: 0.01, 2048: 20.48}, best.head_s)
    alone = runs(ALONE, 2, 1.0, kv=100 << 20)
    others = [runs(WHOLE, 2, 1.25), runs(WHOLE, 1, 1.5), runs(OPENVINO, 2, 2.0)]
    return BenchReport({"threads": "[1, 2]"}, work, {2: [worse, best], 1: [one_thread]}, [alone, *others])


def test_a_figure_is_the_best_of_its_runs_over_the_best_of_its_floors(report: BenchReport) -> None:
    alone = report.rows(TIME_PER_TOKEN)[0]
    assert (alone.value, alone.floor, alone.over_floor) == pytest.approx((20.0, 10.0, 2.0))
    # 128 tokens through the layers and one through the head.
    alone = report.rows(FIRST_TOKEN)[0]
    assert (alone.value, alone.floor, alone.over_floor) == pytest.approx((99.0, 130.0, 99 / 130))


def test_rates_have_the_ratio_of_their_times(report: BenchReport) -> None:
    alone = report.rows(PROMPTS)[0]
    # 1,000 rows through the layers, 8 through the head.
    assert (alone.value, alone.floor) == pytest.approx((8192 / 4.0, 8192 / 1.016))
    assert alone.over_floor == pytest.approx(4.0 / 1.016)


def test_speeds_are_compared_with_the_worker_alone_and_with_openvino(report: BenchReport) -> None:
    alone, whole, whole_alone_on_a_core, openvino = report.rows(PROMPTS)
    assert (alone.to_alone, whole.to_alone, openvino.to_alone) == pytest.approx((1.0, 0.8, 0.5))
    # The worker alone did not run with one thread.
    assert whole_alone_on_a_core.to_alone is None
    assert (alone.to_openvino, whole.to_openvino, openvino.to_openvino) == pytest.approx((2.0, 1.6, 1.0))


def test_formats_are_compared_with_bf16_and_with_the_formats_of_peers_that_are_nearest(report: BenchReport) -> None:
    def small(name: str, slowness: float, form: str) -> Runs:
        named = {OPENVINO: "int4", LLAMA_CPP: "Q4_0"}
        return replace(runs(name, 2, slowness), format=form, weight_bytes=2_500, peers=named)

    others = [small(ALONE, 0.5, "q4_0"), small(LLAMA_CPP, 0.6, "Q4_0"), small(LLAMA_CPP, 0.1, "Q8_0")]
    # Another system is not asked for every case.
    del others[1].measurements["c"]
    report = replace(report, runs=[*report.runs, *others])
    ours = report.rows(TIME_PER_TOKEN)[4]
    assert (ours.value, ours.floor, ours.over_floor) == pytest.approx((10.0, 2.5, 4.0))
    assert (ours.to_alone, ours.to_plain, ours.to_llama_cpp) == pytest.approx((1.0, 2.0, 1.2))
    # OpenVINO ran in bf16 alone.
    assert ours.to_openvino is None
    assert [row.system for row in report.rows(PROMPTS)] == [ALONE, WHOLE, WHOLE, OPENVINO, ALONE, LLAMA_CPP]
    assert report.rows(PROMPTS)[4].to_llama_cpp is None
    lines = [" ".join(line.split()) for line in to_text(report).splitlines()]
    assert "worker alone q4_0, 2 threads 10.0 ms 4.00 1.00 2.00 1.20 25%" in lines


def test_each_number_of_threads_has_its_own_floor(report: BenchReport) -> None:
    assert [row.floor for row in report.rows(TIME_PER_TOKEN)] == pytest.approx([10.0, 10.0, 100.0, 10.0])


@pytest.mark.parametrize(
    ("case", "name", "over_floor", "to_openvino"),
    [
        ("a", "time per token", 9.5 / 7.3, 11.2 / 9.5),
        ("a", "first token", None, 58.6 / 57),
        ("b", "output", 1029 / 720, 720 / 586),
        ("c", "prompts", 3431 / 2600, 2600 / 2471),
        ("d", "all", None, 8.2 / 1.8),
        ("d-warm", "all", None, None),
        ("e", "all", None, 1.19 / 1.15),
    ],
)
def test_goals_are_ratios(case: str, name: str, over_floor: float | None, to_openvino: float | None) -> None:
    figure: CaseFigure = FIGURE[case, name]
    for goal, expected in ((figure.goal_over_floor, over_floor), (figure.goal_to_openvino, to_openvino)):
        assert goal == (None if expected is None else pytest.approx(expected))


def test_the_text_has_every_figure_with_its_floor_and_ratios(report: BenchReport) -> None:
    lines = to_text(report).splitlines()
    alone = next(line for line in lines if line.startswith("  worker alone bf16, 2 threads"))
    assert " ".join(alone.split()) == "worker alone bf16, 2 threads 20.0 ms 2.00 1.30 1.00 1.00 2.00 1.18 25%"
    assert "  floor with 2: 10.0 ms, reading 0 MB of weights at 0.0 GB/s" in lines
    assert "  floor with 2: 8063 tokens/s, torch's matrix products of its 2 steps" in lines
    assert "best --threads for c, prompts, bf16 through all processes: 2" in lines


def test_the_text_tells_where_memory_went(report: BenchReport) -> None:
    told = "600 MiB resident: 0 MiB weights, 100 MiB KV blocks, 500 MiB more"
    assert f"worker alone bf16, 2 threads: ready after 2.5 s, at most {told}" in to_text(report)


def test_json_keeps_every_run_and_yardstick(report: BenchReport) -> None:
    value = json.loads(json.dumps(report.to_json()))
    assert [len(one["measurements"]["a"]) for one in value["runs"]] == [2, 2, 2, 2]
    assert {threads: len(several) for threads, several in value["yardsticks"].items()} == {"2": 2, "1": 1}
    assert value["steps"]["a"] == [[50, 0], [78, 1], [1, 1]]
    assert value["figures"][0]["rows"][0]["over_floor"] == pytest.approx(2.0)
