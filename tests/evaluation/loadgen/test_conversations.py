"""`octavo bench serve` plays conversations: against a scripted caller, and against real processes, where what is found
computed is what the simulator says."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.loadgen.cli import bench
from octavo.loadgen.events import TimedCommand, found_between, found_tokens, run_at
from octavo.loadgen.servers import (
    NOTHING_SAID,
    Answer,
    AnswerRecorder,
    Asking,
    Call,
    Failure,
    Said,
    Secrets,
    ServerAddress,
    TargetError,
)
from octavo.loadgen.session import OpenLoop, Session, Side
from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator.cell import Restart
from octavo.simulator.device import DiskSpec, ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation
from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model
from octavo.workload.conversations import by_turn
from octavo.workload.job import Job
from octavo.workload.synthetic import AtOnce, Dataset, Fixed, Workload

TALK = Workload(Dataset("talk", Fixed(40), Fixed(10)), AtOnce(), num_requests=2, turns=3, prefix_tokens=20).jobs(3)


# -- what is sent, and when -------------------------------------------------------------------------------------------


def test_the_next_prompt_is_what_was_sent_and_answered_and_something_new() -> None:
    first, second = TALK[:2]
    answer = Answer(" an answer", [900, 901])
    by_ids, by_text, chat = Asking(), Asking(as_text=True), Asking(chat=True)
    said = by_ids.said_after(first, 0, NOTHING_SAID, answer)
    prompt = by_ids.body(second, 1, said)["prompt"]
    assert prompt[:62] == [*by_ids.token_ids(first, 0), 900, 901]
    assert len(prompt) == 62 + 40
    text = by_text.body(second, 1, by_text.said_after(first, 0, NOTHING_SAID, answer))["prompt"]
    assert text.startswith(f"{by_text.text(first, 0)} an answer ")
    assert len(text.split()) == 60 + 2 + 40
    asked = chat.body(first, 0)["messages"]
    messages = chat.body(second, 1, chat.said_after(first, 0, NOTHING_SAID, answer))["messages"]
    assert messages[:2] == [*asked, {"role": "assistant", "content": " an answer"}]
    assert len(messages[2]["content"].split()) == 40


class Talk:
    """Takes a virtual second for each answer, and fails those of the numbers in `fails`."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.now = 0.0
        self.fails = fails
        self.prepared: list[tuple[int, float, int]] = []

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds

    def prepare(self, job: Job, index: int, said: Said) -> Call:
        self.prepared.append((index, self.now, len(said.token_ids)))

        async def call(recorder: AnswerRecorder) -> None:
            self.now += 1.0
            if index in self.fails:
                raise Failure("HTTP 500")
            recorder.tokens(0, 2)
            recorder.says("ab", [1, 2])
            recorder.end()

        return call


def serve(talk: Talk, jobs: list[Job]) -> OpenLoop:
    return OpenLoop(
        jobs,
        talk.prepare,
        timeout_s=60.0,
        said_after=lambda job, index, said, answer: Said(token_ids=[*said.token_ids, *answer.token_ids]),
        clock=lambda: talk.now,
        sleep=talk.sleep,
    )


async def test_a_turn_is_sent_after_the_answer_before_and_a_pause() -> None:
    jobs = [job if job.turn == 1 else replace(job, think_s=5.0) for job in TALK[:3]]
    talk = Talk()
    run = await serve(talk, jobs).serve()
    assert talk.prepared == [(0, 0.0, 0), (1, 1.0, 2), (2, 7.0, 4)]
    assert [record.sent_s for record in run.records] == [0.0, 6.0, 12.0]
    # Measured from when it was due, not from the start.
    assert [record.served().ttft for record in run.records] == [1.0, 1.0, 1.0]
    assert run.seconds == 13.0


async def test_turns_behind_one_that_failed_are_not_sent_and_have_failed() -> None:
    talk = Talk(fails=(1,))
    run = await serve(talk, TALK[:3]).serve()
    assert [index for index, _, _ in talk.prepared] == [0, 1]
    assert [record.failure and record.failure.kind for record in run.records] == [
        None,
        "HTTP 500",
        "conversation broken",
    ]
    assert all(record.sent_s is not None for record in run.records)


def test_ids_of_answers_must_be_told_over_http() -> None:
    flags = ["--turns", "2", "--requests", "1", "--arrivals", "at-once"]
    result = CliRunner().invoke(bench, ["serve", "http://127.0.0.1:1", *flags])
    assert result.exit_code == 2
    assert "give --count-tokens, or --prompts text or --api chat" in " ".join(result.output.split())


async def test_commands_are_run_at_their_times_and_tell_how_they_ended(tmp_path: Path) -> None:
    commands = [TimedCommand(0.02, f"test -e {tmp_path}/first"), TimedCommand(0.0, f"touch {tmp_path}/first; exit 3")]
    second, first = await run_at(commands)
    assert (first.status, (tmp_path / "first").exists()) == (3, True)
    assert second.status in (0, 1)


def test_what_a_worker_found_counts_anew_after_its_start() -> None:
    before = {("a", "device"): 10, ("b", "device"): 50, ("b", "disk"): 5}
    after = {("a", "device"): 30, ("b", "device"): 20, ("b", "disk"): 5, ("c", "cpu"): 7}
    assert found_between(before, after) == {"device": 20 + 20, "cpu": 7}


async def test_a_scheduler_that_does_not_answer_is_named() -> None:
    with pytest.raises(TargetError, match=r"Admin service at 127\.0\.0\.1:1 does not answer"):
        await found_tokens("127.0.0.1:1")


# -- beside the simulator ---------------------------------------------------------------------------------------------


class Quick:
    def seconds(self, shape: StepShape) -> float:
        return 0.005


def simulated(jobs: list[Job], *restarts: Restart, disk: DiskSpec | None = None) -> tuple[list[int], dict[str, int]]:
    """What is computed of each turn, and found in each tier, as the simulator says it."""
    spec = ReplicaSpec(1024, 16, Quick(), max_model_len=2048, num_cpu_blocks=1024, disk=disk)
    outcome = Simulation(Cluster(SchedulerConfig(), [spec], restarts=restarts)).run(jobs)
    return [turn.computed_tokens for turn in by_turn(outcome.served)], outcome.found


@pytest.fixture
def stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        directory = Path(name)
        write_byte_model(directory / "model")
        # Where that is measured, a fake model's tokens are computed sooner than any disk reads.
        environment = {
            **{"OCTAVO_DEVICE": "fake", "OCTAVO_NUM_BLOCKS": "1024", "OCTAVO_NUM_CPU_BLOCKS": "1024"},
            **{"OCTAVO_KV_DISK": str(directory / "kv"), "OCTAVO_KV_MIRROR": "1", "OCTAVO_CALIBRATE": "0"},
        }
        with Stack(directory / "model", directory / "run", environment) as stack:
            yield stack.start_all()


def measured(address: str, jobs: list[Job], **asking: Any) -> list[int]:
    side = Side(ServerAddress.parse(address), Asking(**asking), Secrets())
    asyncio.run(Session(jobs, timeout_s=240.0).run([side]))
    [run] = side.runs
    assert [record.failure for record in run.records] == [None] * len(jobs)
    return [turn.computed_tokens for turn in by_turn(record.served() for record in run.records)]


@pytest.mark.system
def test_real_processes_compute_of_each_turn_what_the_simulator_says(stack: Stack) -> None:
    # One conversation after the other: side by side it is chance who finds the system prompt of whom.
    jobs = [replace(job, arrival_s=0.0) for job in TALK[:3]]
    expected, found = simulated(jobs)
    assert expected == [60, 110 - 64, 160 - 112]
    assert measured(stack.address, jobs, seed=1) == expected
    http = f"http+unix:{stack.http_socket}"
    assert measured(http, jobs, seed=2, counted=True) == expected
    assert sum(tier.hit_tokens for tier in stack.load().workers[0].tiers) == 2 * sum(found.values())
    # A text is retokenized, and here a token for each byte.
    first, *later = measured(http, jobs, seed=3, as_text=True)
    assert all(count < first for count in later)


@pytest.mark.system
def test_after_a_restart_a_disk_gives_what_the_simulator_says(stack: Stack) -> None:
    """The worker is killed and started anew while the reader thinks."""
    jobs = [replace(job, think_s=0.0) for job in TALK[:3]]
    slow = [job if job.turn == 1 else replace(job, think_s=10.0) for job in jobs]
    disk = DiskSpec(10_000, mirror=True)
    expected, found = simulated(slow, Restart(15.0, 1.0), disk=disk)
    assert set(found) == {"device", "disk"}
    without, _ = simulated(slow, Restart(15.0, 1.0))
    assert without[2] > 2 * expected[2]

    class Restarting(Asking):
        """Restarts the worker before the third turn: nothing else is under way."""

        def said_after(self, job: Job, index: int, said: Said, answer: Answer) -> Said:
            if job.turn == 2:
                stack.wait_idle()
                stack.kill("worker-0")
                stack.wait_for(lambda: not stack.load().workers)
                stack.start_named("worker-0")
                stack.wait_for(lambda: len(stack.load().workers) == 1)
            return super().said_after(job, index, said, answer)

    side = Side(ServerAddress.parse(stack.address), Restarting(seed=4), Secrets())
    asyncio.run(Session(jobs, timeout_s=240.0, admin_address=stack.admin_address).run([side]))
    [run] = side.runs
    assert [record.failure for record in run.records] == [None] * 3
    assert [turn.computed_tokens for turn in by_turn(record.served() for record in run.records)] == expected
    # What the first process had found is not known any more.
    assert run.found == {"disk": found["disk"]}


@pytest.mark.system
def test_the_command_tells_of_turns_tiers_and_commands(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = (
        *("--turns", "3", "--requests", "2", "--arrivals", "at-once", "--input-mean", "40", "--input-sigma", "0"),
        *("--output-mean", "8", "--output-sigma", "0", "--warm-up", "0", "--at", "0", "exit 3", "--json", str(path)),
    )
    result = CliRunner().invoke(
        bench, ["serve", stack.address, "--scheduler-admin", stack.admin_address, *flags], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())["servers"][0]["report"]
    assert [turn["requests"] for turn in report["turns"]] == [2, 2, 2]
    assert sum(report["found"].values()) == round(report["cached_share"] * 2 * (40 + 88 + 136))
    assert f"found, by tier: {report['found']['device']} tokens device" in result.output
    assert "at 0 ms was run, and ended with status 3: exit 3" in result.output
