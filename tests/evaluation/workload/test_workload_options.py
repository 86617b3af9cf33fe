from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from octavo.workload.job import Job, write_csv
from octavo.workload.options import read_jobs, workload_options
from octavo.workload.synthetic import DATASETS, Poisson, Workload

Read = Callable[[str], list[Job]]
AT_ONCE = "--arrivals at-once --requests 50"


@click.command()
@click.option("--other", default=1)
@workload_options
def command(other: int, **settings: Any) -> list[Job]:
    return read_jobs(settings)


def read(line: str) -> list[Job]:
    jobs: list[Job] = command.main(line.split(), standalone_mode=False)
    return jobs


def complaint(line: str) -> str:
    result = CliRunner().invoke(command, line.split())
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_the_plainest_workload_is_sharegpt_at_a_rate() -> None:
    asked = read("--rate 2 --requests 20")
    assert asked == Workload(DATASETS["sharegpt"], Poisson(2.0), num_requests=20).jobs(0)


def test_everything_of_a_workload_can_be_said() -> None:
    jobs = read("--dataset alpaca --rate 5 --seconds 30 --beam-width 4 --n 2 --prefix-tokens 80 --prefixes 3 --seed 9")
    workload = Workload(
        DATASETS["alpaca"],
        Poisson(5.0),
        seconds=30.0,
        n=2,
        beam_width=4,
        prefix_tokens=80,
        num_prefixes=3,
    )
    assert jobs == workload.jobs(9)


def test_regular_arrivals_are_equally_far_apart() -> None:
    assert [job.arrival_s for job in read("--arrivals regular --rate 2 --seconds 2")] == [0.0, 0.5, 1.0, 1.5]


def test_arrivals_at_once_need_no_rate() -> None:
    assert {job.arrival_s for job in read(AT_ONCE)} == {0.0}


def test_a_spread_of_none_makes_all_lengths_equal() -> None:
    jobs = read(f"{AT_ONCE} --input-mean 2000 --input-sigma 0 --output-mean 10 --output-sigma 0")
    assert {(job.prompt_tokens, job.output_tokens) for job in jobs} == {(2000, 10)}


def test_lengths_can_be_changed_apart() -> None:
    usual, changed = read(AT_ONCE), read(f"{AT_ONCE} --output-mean 20 --output-max 30")
    assert [job.prompt_tokens for job in changed] == [job.prompt_tokens for job in usual]
    assert max(job.output_tokens for job in changed) == 30


def test_prompt_and_output_can_be_limited_together() -> None:
    jobs = read(f"{AT_ONCE} --total-max 128")
    assert max(job.prompt_tokens + job.output_tokens for job in jobs) == 128


def test_a_trace_says_everything(tmp_path: Path) -> None:
    jobs = [Job(0.0, 5, 6), Job(1.5, 7, 8, n=2)]
    write_csv(tmp_path / "trace.csv", jobs)
    assert read(f"--trace {tmp_path / 'trace.csv'} --seed 3") == jobs


def test_a_trace_contradicts_a_drawn_workload(tmp_path: Path) -> None:
    write_csv(tmp_path / "trace.csv", [Job(0.0, 5, 6)])
    assert "does not go with --rate, --prefix-tokens" in complaint(
        f"--trace {tmp_path / 'trace.csv'} --rate 2 --prefix-tokens 5"
    )


def test_a_bad_trace_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n-1,2,3\n")
    assert "line 2: arrival_s must be 0 or later, not -1.0" in complaint(f"--trace {tmp_path / 'trace.csv'}")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "say how many requests come in a second, with --rate"),
        ("--rate 2", "say when requests end"),
        ("--arrivals at-once --seconds 5", "say when requests end"),
        ("--arrivals at-once --rate 2 --requests 5", "at-once has no --rate"),
        ("--rate 0 --requests 5", "--rate"),
        ("--rate nan --requests 5", "not nan"),
        ("--rate 2 --seconds inf", "say when requests end"),
        ("--rate 2 --seconds nan --requests 5", "neither can be"),
        ("--rate 1e6 --seconds 3600", "more than 10000000 requests"),
        ("--rate 2 --requests 0", "--requests"),
        ("--rate 2 --requests 5 --dataset wikipedia", "'wikipedia' is not one of"),
        ("--rate 2 --requests 5 --prefixes 3", "--prefixes needs --prefix-tokens"),
        ("--rate 2 --requests 5 --prefix-tokens 5000", "leaves no room in 2048 tokens"),
        ("--rate 2 --requests 5 --n 3 --beam-width 2", "at most the beams"),
        ("--rate 2 --requests 5 --input-mean 5000", "--input-mean and its like: a mean of 5000 tokens must be between"),
        ("--rate 2 --requests 5 --output-sigma 9", "--output-mean and its like: sigma must be above 0 and at most 5"),
        ("--rate 2 --requests 5 --input-sigma 0 --input-max 9", "does not go with --input-max"),
        ("--rate 2 --requests 5 --input-mean 0.2 --input-sigma 0", "at least 1 token"),
        ("--rate 2 --requests 5 --dataset chatbot --input-mean 9", "does not go with other lengths: --input-mean"),
        ("--trace nowhere.csv", "does not exist"),
    ],
)
def test_a_workload_that_cannot_be_is_a_usage_error(line: str, told: str) -> None:
    assert told in complaint(line)
