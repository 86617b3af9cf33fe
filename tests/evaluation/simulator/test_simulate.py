"""The command `octavo simulate`."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from octavo.cli.main import main
from octavo.runtime.models.step_times import Calibration, StepTimeModel, TokenTime
from octavo.simulator.hardware import GPUS, MODELS

HARDWARE = ["--model", "opt-13b", "--gpu", "a100-40gb"]
LOAD = ["--rate", "2", "--seconds", "20"]


def simulate(*flags: str | Path) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, flags)])


def refused(*flags: str | Path) -> str:
    result = simulate(*flags)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def written(file: Path) -> Any:
    return json.loads(file.read_bytes())


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A worker that takes 10 ms for every step."""
    times = StepTimeModel([TokenTime(1, 0.01)], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    path = tmp_path / "calibration.json"
    Calibration("small", "cpu", "bfloat16", 2048, 1000, 16, 500, 100, times, 0.01).write(path)
    return path


def test_it_prints_what_came_of_the_load() -> None:
    result = simulate(*HARDWARE, *LOAD)
    assert result.exit_code == 0, result.output
    for text in ("requests finished", "ttft", "replicas busy", "waiting requests", "blocks in use", "times real time"):
        assert text in result.output


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    flags = [*HARDWARE, *LOAD, "--replicas", "3", "--cells", "2", "--prefix-tokens", "40", "--prefixes", "5"]
    files = [tmp_path / name for name in ("one", "again", "shared", "other")]
    for file, seed, processes in zip(files, (1, 1, 1, 2), ("1", "1", "2", "1"), strict=True):
        assert simulate(*flags, "--seed", str(seed), "--processes", processes, "--json", file).exit_code == 0
    one, again, shared, other = (file.read_bytes() for file in files)
    assert one == again == shared != other
    report = written(files[0])["report"]
    assert report["summary"]["finished"] == report["summary"]["requests"] > 0
    assert {"time", "waiting", "running", "swapped", "blocks_used"} <= set(report["samples"][0])


def test_a_trace_says_what_comes(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.csv", tmp_path / "report"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,n\n0.5,100,20,1\n1,50,10,2\n")
    assert simulate(*HARDWARE, "--trace", trace, "--json", file).exit_code == 0
    summary = written(file)["report"]["summary"]
    assert (summary["finished"], round(summary["output_tokens_per_s"] * summary["seconds"])) == (2, 40)


@pytest.mark.parametrize(
    ("row", "fault"), [("-1,100,20", "arrival_s must be 0 or later"), ("1,-100,20", "lengths must be at least 1 token")]
)
def test_a_trace_with_negative_numbers_is_refused_with_its_line(tmp_path: Path, row: str, fault: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n0,10,10\n{row}\n")
    text = refused(*HARDWARE, "--trace", trace)
    assert "line 3" in text
    assert fault in text


def test_a_calibrated_worker_takes_the_time_that_was_measured(calibration: Path, tmp_path: Path) -> None:
    file = tmp_path / "report"
    assert simulate("--calibration", calibration, "--rate", "1", "--requests", "1", "--json", file).exit_code == 0
    report = written(file)["report"]
    assert report["summary"]["itl"]["p50"] == pytest.approx(0.01, rel=0.01)
    assert report["samples"][0]["blocks"] == 500


def test_blocks_may_differ_from_the_calibrated_worker_s(calibration: Path, tmp_path: Path) -> None:
    file = tmp_path / "report"
    flags = ["--rate", "1", "--requests", "1", "--num-blocks", "300", "--num-cpu-blocks", "0", "--json", str(file)]
    assert simulate("--calibration", calibration, *flags).exit_code == 0
    assert written(file)["report"]["samples"][0]["blocks"] == 300


def test_memory_under_pressure_is_seen() -> None:
    result = simulate(*HARDWARE, *LOAD, "--num-blocks", "160", "--policy", "paper", "--no-prefix-cache")
    assert " 0 preemptions" not in result.output
    assert " preemptions" in result.output


@pytest.mark.parametrize(("flag", "known"), [("--model", MODELS), ("--gpu", GPUS)])
def test_what_is_unknown_is_refused_with_what_is_known(flag: str, known: dict[str, object]) -> None:
    text = refused(*HARDWARE, *LOAD, flag, "abacus")
    assert "abacus" in text
    assert all(name in text for name in known)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (LOAD, "--model and --gpu, or --calibration"),
        (HARDWARE, "--rate"),
        ([*HARDWARE, *LOAD, "--model", "opt-66b"], "do not fit"),
        ([*HARDWARE, *LOAD, "--tp", "3"], "cannot share evenly"),
        ([*HARDWARE, *LOAD, "--cells", "2"], "--cells 2 need as many --replicas"),
        ([*HARDWARE, *LOAD, "--acceptance", "1.2"], "from 0 to 1"),
        ([*HARDWARE, *LOAD, "--proposals", "0.5"], "say with --acceptance"),
        ([*HARDWARE, *LOAD, "--plan", "ttft_p98<1s"], "ttft_p98"),
        ([*HARDWARE, *LOAD, "--plan", "ttft_p99<1s", "--replicas", "2"], "does not go with --replicas"),
        ([*HARDWARE, *LOAD, "--plan", "ttft_p99<1s", "--horizon", "2"], "does not go with --horizon"),
        ([*HARDWARE, *LOAD, "--plan", "ttft_p99<1s", "--cells", "9", "--max-replicas", "8"], "--max-replicas"),
    ],
)
def test_flags_that_say_too_little_or_too_much_are_refused(flags: list[str], fault: str) -> None:
    assert fault in refused(*flags)


def test_a_calibration_does_not_go_with_a_model(calibration: Path) -> None:
    assert "--calibration says all of a worker, so it does not go with --model, --gpu" in refused(
        *HARDWARE, *LOAD, "--calibration", calibration
    )


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text("{}")
    assert "is no calibration" in refused(*LOAD, "--calibration", file)


def test_a_file_that_is_no_event_log_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "events"
    file.write_bytes(b"nothing")
    assert str(file.name) in refused(*HARDWARE, "--event-log", file)
    assert "does not go with --rate, --seconds" in refused(*HARDWARE, *LOAD, "--event-log", file)


def test_an_event_log_says_what_can_be_guessed(tmp_path: Path) -> None:
    file = tmp_path / "events"
    file.write_bytes(b"nothing")
    assert "does not go with --acceptance" in refused(*HARDWARE, "--event-log", file, "--acceptance", "0.9")


def test_guesses_are_reported_beside_the_same_load_without_them(tmp_path: Path) -> None:
    flags = [*HARDWARE, *LOAD, "--acceptance", "0.8,0.9", "--proposals", "0.7", "--replicas", "2", "--cells", "2"]
    files = [tmp_path / name for name in ("one", "shared")]
    for file, processes in zip(files, ("1", "2"), strict=True):
        result = simulate(*flags, "--processes", processes, "--json", file)
        assert result.exit_code == 0, result.output
        assert "without" in result.output
    assert files[0].read_bytes() == files[1].read_bytes()
    report = written(files[0])["report"]
    found = report["speculation"]
    assert found["drafted"] > found["accepted"] > 0
    assert found["right_by_depth"][0] == pytest.approx(0.8, abs=0.05)
    assert found["plain"]["steps"] > report["steps"]
    assert found["plain"]["summary"]["latency"]["mean"] > report["summary"]["latency"]["mean"]


def test_a_plan_finds_what_suffices_and_says_what_it_tried(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    flags = [
        *HARDWARE,
        "--dataset",
        "alpaca",
        "--rate",
        "200",
        "--seconds",
        "4",
        "--plan",
        "ttft_p99<500ms,itl_p99<60ms",
        "--json",
        str(file),
    ]
    result = simulate(*flags)
    assert result.exit_code == 0, result.output
    plan = written(file)["plan"]
    found = plan["replicas"]
    assert f"ttft_p99<500 ms, itl_p99<60 ms: {found} replicas" in result.output
    kept = {each["replicas"]: not each["unmet"] for each in plan["tried"]}
    assert (kept[found - 1], kept[found], kept[found + 1]) == (False, True, True)
    assert result.stderr.count("tried ") == len(plan["tried"])
    assert all(each["summary"]["ttft"]["p99"] > 0 for each in plan["tried"])
    assert " output tokens/s, " in result.stdout


def test_a_plan_that_nothing_meets_says_why_and_fails() -> None:
    result = simulate(*HARDWARE, *LOAD, "--plan", "itl_p50<5ms", "--max-replicas", "4")
    assert result.exit_code == 1
    assert "no number of replicas from 1 to 4 keeps itl_p50<5 ms, because even on an idle replica" in result.output
