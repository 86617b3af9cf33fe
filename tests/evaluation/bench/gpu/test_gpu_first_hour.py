"""What a GPU is to show first: every step within its time, nothing lost, and a line for what is missing."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from octavo.bench.gpu.served.first_hour import Step, StepEnd, main, page, run, steps

ENVIRONMENT = {"PYTHONPATH": "", "PATH": os.environ["PATH"]}
LONG = "OCTAVO_TEST_LONG" in os.environ


def step(name: str, code: str, seconds: float = 60.0, modules: tuple[str, ...] = (), *, on_gpu: bool = False) -> Step:
    return Step(name, "a step", (sys.executable, "-c", code, "{out}", "{seconds}"), seconds, modules, on_gpu)


def outcomes(tmp_path: Path, *listed: Step, budget_s: float = 600.0) -> list[StepEnd]:
    """Runs steps while no time passes but that of a step that is stopped."""
    return list(run(listed, budget_s, tmp_path / "result", ENVIRONMENT, clock=lambda: 0.0))


def test_what_fails_or_hangs_loses_nothing_of_the_others(tmp_path: Path) -> None:
    hangs = "import os, time; print('so far', flush=True); os.fork(); time.sleep(600)"
    failed, stopped, passed = outcomes(
        tmp_path, step("a", "raise SystemExit(3)"), step("b", hangs, 10.0), step("c", "print('fine')")
    )
    assert (failed.state, failed.reason) == ("failed", "it ended with 3")
    assert (stopped.state, stopped.reason, stopped.output) == ("stopped", "it was given 10 s", ["so far"])
    assert (passed.state, passed.output) == ("passed", ["fine"])


def test_a_steps_file_becomes_its_result_and_it_knows_its_time(tmp_path: Path) -> None:
    code = "import sys, json; json.dump({'seconds': sys.argv[2]}, open(sys.argv[1], 'w'))"
    [outcome] = outcomes(tmp_path, step("bench", code, 100.0), budget_s=50.0)
    assert outcome.result["seconds"] == "45"


def test_what_is_missing_is_told_and_nothing_is_run(tmp_path: Path) -> None:
    code = "raise SystemExit(1)"
    found = outcomes(
        tmp_path,
        step("machine", "print('{\"gpus\": 0}')"),
        step("modules", code, modules=("json", "no_such_module")),
        step("gpu", code, on_gpu=True),
    )
    assert [outcome.state for outcome in found] == ["passed", "skipped", "skipped"]
    assert [outcome.reason for outcome in found[1:]] == [
        "no_such_module cannot be imported",
        "there is no GPU, or torch finds none",
    ]
    [late] = outcomes(tmp_path, step("late", code), budget_s=0.0)
    assert (late.state, late.reason) == ("skipped", "0 s are left")


def test_a_page_holds_a_line_for_each_step_and_the_end_of_what_each_said() -> None:
    said = [f"line {number}" for number in range(500)]
    text = page([StepEnd("a", "first", "failed", "it ended with 1", output=said), StepEnd("b", "second", reason="no")])
    first, second, *rest = text.splitlines()
    assert "failed" in first
    assert second.endswith("second: no")
    assert rest[-1] == "line 499"
    assert len(rest) < 40


def test_all_of_it_fits_into_ten_minutes_and_begins_with_what_is_there() -> None:
    listed = steps()
    assert [each.name for each in listed] == [
        *("machine", "unpack", "ahead", "gpu", "tests", "layout", "kernels", "steps")
    ]
    assert [each.name for each in steps(rehearse=True)] == [each.name for each in listed]


@pytest.mark.deep
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is skipped without a GPU")
def test_without_a_gpu_each_step_passes_or_is_skipped_with_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "found" / "report.json"
    assert main(["--out", str(out), "--only", "machine", "gpu", "kernels", "steps"]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))["steps"]
    assert [each["name"] for each in found] == [each.name for each in steps()]
    assert [each["state"] for each in found] == ["passed", *["skipped"] * 7]
    assert found[0]["result"]["torch"] == torch.__version__
    assert all(each["reason"] for each in found[1:])
    lines = out.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    assert lines[3].endswith("there is no GPU, or torch finds none")


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not LONG, reason="the deep run does all of it; here the parts are tested")
def test_a_rehearsal_runs_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["--rehearse", "--out", str(out)]) == 0, out.with_suffix(".txt").read_text(encoding="utf-8")
    found = {each["name"]: each for each in json.loads(out.read_text(encoding="utf-8"))["steps"]}
    assert {name for name, each in found.items() if each["state"] == "skipped"} <= {"unpack"}
    assert {case["goal"] for case in found["layout"]["result"]["cases"]} == {"K10", "K11", "K13", "S4"}
