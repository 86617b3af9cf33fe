"""Conversations and restarts in the simulation: what is said before is found, where it still is."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator import hardware
from octavo.simulator.cell import Restart
from octavo.simulator.cli import simulate
from octavo.simulator.cluster_options import CellRoute
from octavo.simulator.device import DiskSpec, ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation, SimulationOutcome
from octavo.simulator.hardware import GPUS, MODELS
from octavo.workload.conversations import by_turn
from octavo.workload.job import Job

THINK_S = 10.0


@dataclass(frozen=True)
class Quick:
    """An eighth of a second for any step."""

    def seconds(self, shape: StepShape) -> float:
        return 0.125


def talk(name: str = "a", turns: int = 3, at_s: float = 0.0) -> list[Job]:
    """Messages of 33 tokens and answers of 8."""
    jobs = [Job(at_s, 33, 8, conversation=name, turn=1)]
    for turn in range(2, turns + 1):
        history = jobs[-1].prompt_tokens + 8
        later = Job(at_s, history + 33, 8, conversation=name, turn=turn, history_tokens=history, think_s=THINK_S)
        jobs.append(later)
    return jobs


def run(
    jobs: list[Job], *, restarts: tuple[Restart, ...] = (), cells: int = 1, replicas: int = 1, **spec: Any
) -> SimulationOutcome:
    replica = replace(ReplicaSpec(256, 4, Quick(), max_model_len=1024, num_cpu_blocks=256), **spec)
    config = SchedulerConfig(max_steps_in_flight=1, watermark=0.0)
    cluster = Cluster(config, [replica] * replicas, cells, restarts=restarts)
    return Simulation(cluster, route=CellRoute(cells) if cells > 1 else None).run(jobs)


def computed(outcome: SimulationOutcome) -> list[int]:
    return [turn.computed_tokens for turn in by_turn(outcome.served)]


def test_a_turn_comes_when_the_one_before_has_ended_and_its_reader_has_thought() -> None:
    served = run(talk()).served
    assert [each.num_tokens for each in served] == [8, 8, 8]
    assert [each.finished_s for each in served] == [1.0, 12.0, 23.0]
    assert [each.job.arrival_s for each in served] == [0.0, 11.0, 22.0]
    assert {each.ttft for each in served} == {0.125}


def test_of_a_later_turn_what_is_new_is_computed() -> None:
    outcome = run(talk())
    # Of 33 + 8 tokens said 40 are computed, in 10 blocks of 4; then of 82 tokens 80.
    assert computed(outcome) == [33, 34, 35]
    assert outcome.found == {"device": 40 + 80}


def test_after_a_restart_all_is_computed_again_but_what_a_disk_has() -> None:
    between = (Restart(15.0, 2.0),)
    lost = run(talk(), restarts=between)
    assert computed(lost) == [33, 34, 115]
    assert lost.found == {"device": 40}
    kept = run(talk(), restarts=between, disk=DiskSpec(1000, 0.0, mirror=True))
    assert computed(kept) == [33, 34, 35]
    assert kept.found == {"device": 40, "disk": 80}


def test_a_disk_has_room_for_so_many_blocks_and_reads_one_after_the_other() -> None:
    between = (Restart(15.0, 2.0),)
    small = run(talk(), restarts=between, disk=DiskSpec(5, 0.0, mirror=True))
    assert computed(small) == [33, 34, 115], "the beginning has made way"
    slow = run(talk(), restarts=between, disk=DiskSpec(1000, 0.125, mirror=True))
    quick = run(talk(), restarts=between, disk=DiskSpec(1000, 0.0, mirror=True))
    assert slow.served[-1].ttft is not None
    assert quick.served[-1].ttft is not None
    assert slow.served[-1].ttft - quick.served[-1].ttft == pytest.approx(20 * 0.125, abs=0.25)


def test_requests_that_run_when_their_worker_ends_come_to_their_end() -> None:
    outcome = run([Job(0.0, 33, 40)], restarts=(Restart(2.0, 1.0),))
    (served,) = outcome.served
    assert (served.num_tokens, served.error) == (40, "")
    assert served.finished_s == pytest.approx(40 * 0.125 + 1.0, abs=0.5)
    # They go on elsewhere at once where there is another.
    (other,) = run([Job(0.0, 33, 40)], restarts=(Restart(2.0, 60.0),), replicas=2).served
    assert other.finished_s == pytest.approx(40 * 0.125, abs=0.5)


def test_what_follows_a_turn_that_failed_fails() -> None:
    jobs = talk()
    jobs[1] = replace(jobs[1], output_tokens=2000)
    served = run(jobs).served
    assert [bool(each.error) for each in served] == [False, True, True]
    assert served[2].error == "conversation_broken: a turn before failed"


def test_conversations_are_the_same_whatever_process_simulates_their_cells() -> None:
    jobs = [turn for number in range(8) for turn in talk(str(number), at_s=number / 4)]
    # Other processes must find the latency's class.
    spec = hardware.replica(MODELS["opt-13b"], GPUS["a100-40gb"], 1, block_size=16, num_blocks=256, num_cpu_blocks=256)
    cluster = Cluster(SchedulerConfig(), [spec] * 2, 2, restarts=(Restart(15.0, 2.0),))
    here, there = (Simulation(cluster, route=CellRoute(2), processes=count).run(jobs) for count in (1, 2))
    assert (here.served, here.found) == (there.served, there.found)
    assert [each.num_tokens for each in here.served] == [8] * 24


# -- the command ------------------------------------------------------------------------------------------------------

COMMAND = (
    *("--model", "opt-13b", "--gpu", "a100-40gb", "--turns", "3", "--think-time", "1", "--rate", "2"),
    *("--requests", "6", "--input-mean", "40", "--input-sigma", "0", "--output-mean", "8", "--output-sigma", "0"),
    *("--prefix-tokens", "32"),
)


def test_the_command_tells_what_was_computed_of_each_turn(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    disk = ("--restart", "2:0.5", "--kv-disk-blocks", "1000", "--kv-mirror")
    result = CliRunner().invoke(simulate, [*COMMAND, *disk, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())["report"]
    assert [turn["requests"] for turn in report["turns"]] == [6, 6, 6]
    total = sum(turn["computed_tokens"] for turn in report["turns"])
    assert report["prompt_tokens"] - total == sum(report["found"].values())
    assert report["found"]["disk"] > 0
    assert f"of {report['prompt_tokens']} tokens of prompts {total} (" in result.output


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--restart", "5"], "write AT:DOWN"),
        (["--restart", "-1:5"], "write AT:DOWN"),
        (["--restart", "inf:5"], "write AT:DOWN"),
        (["--restart", "5:5", "--restart", "7:1"], "cannot end again before it is back"),
        (["--kv-mirror"], "give it --kv-disk-blocks"),
        (["--kv-disk-blocks", "8", "--num-cpu-blocks", "0"], "give more than 0 --num-cpu-blocks"),
        (["--turns", "1"], "say with --turns how many it has"),
        (["--dataset", "chatbot"], "does not go with other lengths"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(wrong: list[str], message: str) -> None:
    result = CliRunner().invoke(simulate, [*COMMAND, *wrong])
    assert result.exit_code == 2
    assert message in result.output
