"""The table and the JSON of a GPU benchmark."""

import json
from pathlib import Path

import pytest

from octavo.bench.gpu.cases import CaseOutcome, CaseResult, Goal, GpuCase, Samples
from octavo.bench.gpu.floors import DeviceWork
from octavo.bench.gpu.report import GpuReport, duration, plan_text, progress

SHARE = Goal("share of the copy rate", "%", 80, 90, at_least=True)
TIMES = Goal("time over the best peer", "x", 1.15, 1.0)


def case(goal: str, target: Goal) -> GpuCase:
    return GpuCase(goal, "B=64", target, lambda machine: CaseResult(1.0), (DeviceWork(bytes=4.3e12),))


MEASURED = CaseResult(
    1.1,
    Samples(2e-3, 1.9e-3, 2.2e-3, 40),
    {"cuDNN": Samples(1.8e-3, 1.8e-3, 1.9e-3, 40), "SDPA flash": Samples(4e-3, 4e-3, 4e-3, 40)},
    {"FlexAttention": "RuntimeError: no\nluck"},
    {"layers": 4},
)
OUTCOMES = [
    CaseOutcome(case("K1", SHARE), 1e-3, CaseResult(93.0, Samples(1.1e-3, 1e-3, 1.2e-3, 9))),
    CaseOutcome(case("K2", TIMES), 1e-3, MEASURED, wall_s=3.0),
    CaseOutcome(case("E1", TIMES), 1e-3, skipped="it takes about 5 s, and 4 s are left"),
    CaseOutcome(case("R1", TIMES), 1e-3, failed="Traceback ...\nRuntimeError: no such luck\n"),
]


@pytest.fixture
def report() -> GpuReport:
    ceilings = {"device copy, read + written, TB/s": Samples(4.3, 4.2, 4.31, 9)}
    return GpuReport({"quick": "False"}, {"cuDNN": True, "FA3": False}, ceilings, outcomes=OUTCOMES)


def test_the_table_has_a_line_for_every_figure_and_for_everything_that_is_missing(report: GpuReport) -> None:
    lines = [" ".join(line.split()) for line in report.to_text().splitlines()]
    assert lines[0] == "device copy, read + written, TB/s: 4.3"
    assert "K1 B=64 1.1 ms 1 ms 93 % >= 80 / 90 % stretch" in lines
    assert "K2 B=64 2 ms 1 ms 1.8 ms cuDNN 1.1 x <= 1.15 / 1 x goal" in lines
    assert lines[-4:] == [
        "without FlexAttention in K2 B=64: RuntimeError: no luck",
        "skipped E1 B=64: it takes about 5 s, and 4 s are left",
        "FAILED R1 B=64: RuntimeError: no such luck",
        "peers that are not here: FA3",
    ]


@pytest.mark.parametrize(("index", "said"), [(0, "stretch"), (2, "skipped E1"), (3, "FAILED R1")])
def test_each_case_is_told_of_as_soon_as_it_is_done(index: int, said: str) -> None:
    line = progress(OUTCOMES[index])
    assert said in line
    assert "\n" not in line


def test_json_has_ratios_spreads_and_tracebacks(report: GpuReport, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    value = json.loads(path.read_bytes())
    share, times, skipped, failed = value["cases"]
    assert (share["verdict"], share["wanted"], share["hoped_for"], share["at_least"]) == ("stretch", 80, 90, True)
    assert times["ours_s"] == {"median": 2e-3, "low": 1.9e-3, "high": 2.2e-3, "count": 40}
    assert times["over_floor"] == pytest.approx(2.0)
    assert times["to_peers"] == pytest.approx({"cuDNN": 0.9, "SDPA flash": 2.0})
    assert times["missing"] == {"FlexAttention": "RuntimeError: no\nluck"}
    assert skipped["skipped"] == "it takes about 5 s, and 4 s are left"
    assert failed["failed"].startswith("Traceback")
    assert "value" not in failed
    assert value["rates"]["copy_bytes_per_s"] == 4.3e12
    assert value["ceilings"]["device copy, read + written, TB/s"]["low"] == 4.2


def test_a_plan_has_floors_by_nominal_rates_and_the_peers() -> None:
    needy = GpuCase(
        "S1", "out", SHARE, lambda machine: CaseResult(1.0), seconds=7.0, modules=("json", "no_such_module")
    )
    lines = [
        " ".join(line.split()) for line in plan_text([OUTCOMES[0].case, needy], {"a": True, "b": False}).splitlines()
    ]
    assert "K1 B=64 3 s 1 s >= 80 / 90 %" in lines
    assert "S1 out 7 s >= 80 / 90 % needs no_such_module" in lines
    assert lines[-2:] == ["peers here: a", "not here: b"]


@pytest.mark.parametrize(("seconds", "text"), [(36.9, "36.9 s"), (1.25e-3, "1.25 ms"), (1e-5, "10 us"), (5e-9, "5 ns")])
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text
