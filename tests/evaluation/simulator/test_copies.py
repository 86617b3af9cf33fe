"""Replicas copy each other's blocks in the simulation: of requests that move, and of prefixes. Times are sums of powers
of two, so they are exact."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.runtime.models.step_times import Calibration, StepShape, StepTimeModel, TokenTime
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator import hardware
from octavo.simulator.cell import Copied, Restart
from octavo.simulator.cli import simulate
from octavo.simulator.cluster_options import CellRoute
from octavo.simulator.device import PeerLink, ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation, SimulationOutcome
from octavo.simulator.hardware import GPUS, MODELS
from octavo.wire.steps import WorkerRole
from octavo.workload.job import Job

BOTH, PREFILL, DECODE = WorkerRole.BOTH, WorkerRole.PREFILL, WorkerRole.DECODE
STEP_S = 0.125
LINK = PeerLink(block_s=1 / 64, copy_s=0.125)
# 8 blocks, and one token of a ninth.
JOB = Job(0.0, 33, 8)
COPY_S = 0.125 + 9 / 64


@dataclass(frozen=True)
class Quick:
    """An eighth of a second for any step."""

    def seconds(self, shape: StepShape) -> float:
        return STEP_S


def run(
    jobs: list[Job],
    roles: tuple[WorkerRole, ...] = (PREFILL, DECODE),
    *,
    link: PeerLink | None = LINK,
    restarts: tuple[Restart, ...] = (),
    link_s: float = 0.0,
    **config: Any,
) -> SimulationOutcome:
    """Without costs that were measured, so that whatever may move does."""
    spec = ReplicaSpec(256, 4, Quick(), max_model_len=1024, num_cpu_blocks=256, kv_bytes_per_token=2, peer_link=link)
    settings = SchedulerConfig(**{"max_steps_in_flight": 1, "watermark": 0.0, **config})
    replicas = [replace(spec, role=role) for role in roles]
    outcome = Simulation(Cluster(settings, replicas, restarts=restarts, link_s=link_s)).run(jobs)
    assert [(each.num_tokens, each.error) for each in outcome.served] == [(job.output_tokens, "") for job in jobs]
    return outcome


def test_a_request_goes_on_behind_its_prompt_once_its_blocks_are_copied() -> None:
    outcome = run([JOB])
    (served,) = outcome.served
    # The first token comes of the prompt, the second of a step of the other replica.
    assert served.first_token_s == STEP_S
    assert served.finished_s == STEP_S + COPY_S + 7 * STEP_S
    assert outcome.copied == Copied(requests=1, blocks=9, nbytes=9 * 4 * 2)
    # Every token was computed once.
    assert outcome.steps == 8


def test_a_copy_takes_the_messages_time_too() -> None:
    (served,) = run([JOB], link_s=0.25).served
    # Of every step, and of the copy, there and back.
    assert served.finished_s == STEP_S + COPY_S + 7 * STEP_S + 9 * 0.5


def test_copies_between_the_same_two_come_one_after_the_other() -> None:
    outcome = run([JOB, JOB])
    assert outcome.copied == Copied(requests=2, blocks=18, nbytes=18 * 4 * 2)
    # Its first step there is the first that begins once it has come.
    ends = [STEP_S + COPY_S + 7 * STEP_S, STEP_S + COPY_S + 3 * STEP_S + 7 * STEP_S]
    assert [each.finished_s for each in outcome.served] == ends


def test_nothing_is_written_before_the_steps_are_done_that_the_replica_has() -> None:
    """The second request comes while the first runs where it is to go."""
    late = Job(1.0, 33, 8)
    first, second = run([JOB, late]).served
    assert first.finished_s is not None
    assert first.finished_s > 1.0
    assert second.first_token_s is not None
    assert second.finished_s is not None
    assert second.finished_s >= second.first_token_s + COPY_S + 7 * STEP_S


def test_without_a_link_nothing_moves() -> None:
    outcome = run([JOB], link=None)
    assert outcome.served[0].finished_s == 8 * STEP_S
    assert outcome.copied == Copied()


def test_a_request_is_computed_again_whose_source_ends_in_mid_copy() -> None:
    outcome = run([JOB], restarts=(Restart(0.25, 60.0),))
    (served,) = outcome.served
    # Prompt and first token are a prompt for the other, which answers for the copy that has come to nothing.
    assert served.finished_s == 0.25 + 7 * STEP_S
    assert outcome.copied == Copied(failed=1)


def test_a_request_goes_on_where_it_is_when_its_target_ends_in_mid_copy() -> None:
    outcome = run([JOB], (DECODE, PREFILL), restarts=(Restart(0.25, 60.0),))
    (served,) = outcome.served
    assert served.finished_s == 0.25 + 7 * STEP_S
    assert outcome.copied == Copied()


def test_requests_move_to_a_replica_that_is_back() -> None:
    jobs = [Job(0.5, 33, 80) for _ in range(10)]
    outcome = run(jobs, (BOTH, BOTH), restarts=(Restart(0.25, 1.0),))
    assert outcome.copied.requests >= 2
    assert not outcome.copied.failed
    assert not run(jobs, (BOTH, BOTH), restarts=(Restart(0.25, 1.0),), link=None).copied.requests


def test_a_prefix_is_copied_from_the_replica_that_has_it() -> None:
    jobs = [Job(0.0, 33, 40, prefix="a", prefix_tokens=32), Job(1.0, 33, 4, prefix="a", prefix_tokens=32)]
    # One request fills a replica.
    outcome = run(jobs, (BOTH, BOTH), max_num_seqs=1)
    assert outcome.copied == Copied(prefix_blocks=8, nbytes=8 * 4 * 2)
    assert outcome.found == {"replica": 32}
    second = outcome.served[1]
    assert second.first_token_s == 1.0 + 0.125 + 8 / 64 + STEP_S
    assert run(jobs, (BOTH, BOTH), max_num_seqs=1, link=None).found == {}


def test_copies_are_the_same_whatever_process_simulates_their_cells() -> None:
    spec = hardware.replica(MODELS["llama-3-8b"], GPUS["h200"], num_blocks=4000, num_cpu_blocks=4000)
    spec = replace(spec, peer_link=PeerLink(1e-4, 1e-3))
    replicas = [replace(spec, role=role) for role in (PREFILL, PREFILL, DECODE, DECODE)]
    cluster = Cluster(SchedulerConfig(), replicas, 2)
    jobs = [Job(number / 50, 2000, 20) for number in range(40)]
    here, there = (Simulation(cluster, route=CellRoute(2), processes=count).run(jobs) for count in (1, 2))
    assert (here.served, here.copied) == (there.served, there.copied)
    assert here.copied.requests > 10
    assert here.copied.nbytes == here.copied.blocks * spec.block_bytes


# -- the command ------------------------------------------------------------------------------------------------------

COMMAND = (
    *("--model", "llama-3-8b", "--gpu", "h200", "--rate", "20", "--requests", "30", "--replicas", "2"),
    *("--input-mean", "800", "--input-sigma", "0", "--output-mean", "16", "--output-sigma", "0"),
)
APART = (*COMMAND, "--prefill", "1", "--decode", "1", "--peer-bandwidth", "25", "--peer-latency", "0.001")


def test_the_command_tells_what_was_copied(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = CliRunner().invoke(simulate, [*APART, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    copied = json.loads(path.read_text())["report"]["copied"]
    assert copied["requests"] > 0
    # 128 KiB for each token, in blocks of 16.
    assert copied["nbytes"] == copied["blocks"] * 16 * 128 * 1024
    assert f"{copied['requests']} requests moved between replicas with {copied['blocks']} blocks" in result.output


def test_a_calibrated_worker_moves_blocks_of_its_own_size(tmp_path: Path) -> None:
    times = StepTimeModel([TokenTime(1, 0.01)], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    found = Calibration("small", "cpu", "bfloat16", 2048, 1000, 16, 500, 100, times, 0.01)
    path = tmp_path / "calibration.json"
    load = [*COMMAND[4:], "--calibration", str(path), "--prefill", "1", "--decode", "1", "--peer-bandwidth", "1"]
    found.write(path)
    assert "calibrate anew" in CliRunner().invoke(simulate, load).output
    Calibration(**{**{name: getattr(found, name) for name in found.__struct_fields__}, "kv_bytes_per_token": 10}).write(
        path
    )
    result = CliRunner().invoke(simulate, load, catch_exceptions=False)
    assert "30 requests moved between replicas" in result.output


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((*COMMAND, "--prefill", "1"), "say with --peer-bandwidth how fast"),
        ((*COMMAND, "--peer-latency", "1"), "say with --peer-bandwidth how fast blocks move"),
        ((*COMMAND, "--peer-bandwidth", "1", "--num-cpu-blocks", "0"), "give more than 0 --num-cpu-blocks"),
        ((*APART, "--prefill", "2", "--decode", "0"), "one at least must compute what follows"),
        ((*APART, "--decode", "2"), "one at least must compute what follows"),
        ((*APART, "--cells", "2"), "give multiples of that"),
        ((*COMMAND[:-12], "--rate", "2", "--seconds", "2", *APART[-8:], "--plan", "ttft_p99<1s"), "does not go with"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(wrong: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(simulate, list(wrong))
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
