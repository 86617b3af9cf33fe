"""`octavo bench serve` against real processes, over gRPC and over HTTP."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.loadgen.cli import bench
from octavo.loadgen.servers import Asking, Record, Secrets, ServerAddress
from octavo.loadgen.session import Session, SessionProgress, Side
from octavo.testbed.stack import Stack, free_address
from octavo.testbed.tiny_model import write_byte_model
from octavo.workload.job import Job, write_csv

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """With a second frontend, which a test may kill."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        directory = Path(name)
        write_byte_model(directory / "model")
        environment = {"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "5", "OCTAVO_FAKE_EOS_PROBABILITY": "0.3"}
        with Stack(directory / "model", directory / "run", environment) as stack:
            stack.start_named("frontend-1")
            yield stack.start_all()


def addresses(stack: Stack) -> dict[str, str]:
    return {"grpc": stack.address, "http": f"http+unix:{stack.http_socket}"}


def measured(address: str, jobs: Sequence[Job], rounds: int = 1, **asking: Any) -> Side:
    """What comes of runs without a warm-up."""
    side = Side(ServerAddress.parse(address), Asking(**asking), Secrets())
    asyncio.run(Session(jobs, rounds, timeout_s=240.0).run([side]))
    return side


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(bench, ["serve", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_lengths_samples_and_beams_come_out_as_asked(stack: Stack, door: str) -> None:
    jobs = [
        Job(0.0, 30, 7),
        Job(0.01, 5, 20, n=2),
        Job(0.02, 12, 6, n=2, beam_width=3),
        Job(0.03, 12, 1),
    ]
    [run] = measured(addresses(stack)[door], jobs).runs
    assert [(record.failure, record.num_tokens) for record in run.records] == [(None, n) for n in (7, 40, 12, 1)]
    assert [record.prompt_tokens for record in run.records] == [30, 5, 12, 12]
    assert not any(record.is_short for record in run.records)
    assert all((record.first_token_s or 0.0) <= (record.finished_s or 0.0) <= run.seconds for record in run.records)
    assert run.gaps.count > 0


@pytest.mark.parametrize(("door", "chat"), [("grpc", False), ("http", False), ("http", True)])
def test_a_prompt_may_be_a_text(stack: Stack, door: str, chat: bool) -> None:
    [run] = measured(addresses(stack)[door], [Job(0.0, 10, 5)], as_text=True, chat=chat).runs
    [record] = run.records
    assert (record.failure, record.num_tokens) == (None, 5)
    # This model has a token for every byte, and only the server can tell.
    assert record.served().job.prompt_tokens == record.prompt_tokens > 20


def test_every_token_is_counted_alone_where_that_is_asked_for(stack: Stack) -> None:
    [run] = measured(addresses(stack)["http"], [Job(0.0, 10, 12)], counted=True).runs
    assert run.records[0].deliveries > 1


@pytest.mark.parametrize(("door", "seed"), [("grpc", 1000), ("http", 2000)])
def test_only_what_requests_of_one_run_share_is_in_the_servers_cache(stack: Stack, door: str, seed: int) -> None:
    # A busy machine may not have computed the first before the next comes.
    for attempt, pause_s in enumerate((0.1, 1.0, 10.0)):
        jobs = [Job(pause_s * i, 80, 2, prefix="p", prefix_tokens=32) for i in range(3)]
        side = measured(addresses(stack)[door], jobs, rounds=2, seed=seed + 100 * attempt)
        cached = [[record.cached_tokens for record in run.records] for run in side.runs]
        assert [each[0] for each in cached] == [0, 0]
        if cached == [[0, 32, 32]] * 2:
            return
    pytest.fail(f"of 32 tokens that they share, so many were in the cache: {cached}")


def test_two_servers_are_compared_round_by_round(stack: Stack, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    doors = addresses(stack)
    arguments = [doors["grpc"], "--compare", doors["http"], "--rounds", "2", "--json", str(report)]
    workload = ["--dataset", "alpaca", "--output-max", "10", "--output-mean", "8", "--rate", "100", "--requests", "8"]
    result = invoke(*arguments, *workload, "--warm-up", "1", "--goodput", "latency<1min")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("8 of 8 requests") == 0
    assert result.stdout.count("16 of 16 requests finished") == 2
    assert result.stdout.count("16 kept the targets") == 2
    assert "B / A" in result.stdout
    places = [
        result.stderr.index(f"round {number}: {ServerAddress.parse(doors[door])}")
        for number in (1, 2)
        for door in doors
    ]
    assert places == sorted(places)
    found = json.loads(report.read_bytes())
    assert [server["server"] for server in found["servers"]] == [f"grpc://{doors['grpc']}", doors["http"]]
    assert [len(server["rounds"]) for server in found["servers"]] == [2, 2]
    assert {"requests_per_s", "ttft_p50", "latency_p99", "goodput_per_s"} <= {r["metric"] for r in found["ratios"]}


def test_what_there_is_is_told_where_the_other_server_cannot_be_measured(stack: Stack) -> None:
    workload = ["--arrivals", "at-once", "--requests", "2", "--output-sigma", "0", "--output-mean", "5"]
    result = invoke(stack.address, "--compare", f"http://{free_address()}", *workload)
    assert result.exit_code == 1
    assert "2 of 2 requests finished" in result.stdout
    assert "cannot reach http://" in result.stderr


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_what_the_server_refuses_is_shown_and_all_of_it_is_an_error(stack: Stack, tmp_path: Path, door: str) -> None:
    # The model has room for 2,048 tokens.
    write_csv(tmp_path / "trace.csv", [Job(0.0, 3000, 5), Job(0.1, 3000, 5)])
    arguments = [addresses(stack)[door], "--trace", str(tmp_path / "trace.csv")]
    result = invoke(*arguments, "--warm-up", "0")
    assert result.exit_code == 1
    assert "0 of 2 requests finished" in result.stdout
    assert "failed 2: " in result.stdout
    assert "PROMPT_TOO_LONG" in result.stdout.upper()
    # A warm-up finds it out before anything is measured.
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "failed every request of the warm-up" in result.stderr
    assert ("--openai-only" in result.stderr) == (door == "http")


def test_a_model_that_is_not_served_is_told(stack: Stack) -> None:
    for address in addresses(stack).values():
        result = invoke(address, "--model", "mine", "--arrivals", "at-once", "--requests", "1")
        assert result.exit_code == 1
        assert "'mine'" in result.stderr
        assert "model" in result.stderr.splitlines()[-1]


def test_ctrl_c_tells_what_there_is_and_leaves_nothing_behind(stack: Stack) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "bench", "serve", stack.address, "--warm-up", "0"]
    workload = [
        "--rate",
        "20",
        "--seconds",
        "600",
        "--input-sigma",
        "0",
        "--output-sigma",
        "0",
        "--output-mean",
        "1500",
    ]
    with subprocess.Popen([*command, *workload], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stack.wait_for(lambda: stack.load().running >= 3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted: " in output
    assert "still under way" in output
    assert "Traceback" not in errors
    stack.wait_idle()


async def test_a_server_that_dies_in_the_middle_is_counted(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, ended = [Job(0.05 * i, 10, 2 if i == 0 else 2000) for i in range(20)], asyncio.Event()
    side = Side(ServerAddress.parse(stack.address_of("frontend-1")), Asking(), Secrets())
    changed = SessionProgress.changed

    def note(progress: SessionProgress, record: Record) -> None:
        changed(progress, record)
        if record.finished_s is not None:
            ended.set()

    monkeypatch.setattr(SessionProgress, "changed", note)
    running = asyncio.create_task(Session(jobs, timeout_s=240.0).run([side]))
    await ended.wait()
    await asyncio.to_thread(stack.wait_for, lambda: stack.load().running >= 5)
    stack.kill("frontend-1")
    await running
    [run] = side.runs
    assert not run.interrupted
    assert [record.failure is None for record in run.records] == [True] + 19 * [False]
    assert {record.failure.kind for record in run.records if record.failure} == {"connection lost"}
