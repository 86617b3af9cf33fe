"""What is simulated of workers apart for prompts and for what follows."""

from dataclasses import replace

import pytest

from octavo.bench.whole.roles_simulated import Case, Load, main, measure
from octavo.simulator import hardware
from octavo.simulator.device import PeerLink
from octavo.simulator.hardware import GPUS, MODELS
from octavo.wire.steps import WorkerRole

LOAD = Load(1.0, 8.0, 256, 64, 4.0, 8192)


def test_streams_do_not_depend_on_the_long_prompts() -> None:
    streams = [job for job in LOAD.jobs() if job.prompt_tokens == 256]
    assert streams == replace(LOAD, longs_per_s=0.0).jobs()
    assert 0 < len(streams) < len(LOAD.jobs())


def test_requests_move_only_where_replicas_are_apart() -> None:
    replica = hardware.replica(MODELS["llama-3.1-8b"], GPUS["h200"])
    replica = replace(replica, peer_link=PeerLink(1e-4, 1e-3))
    both = measure(Case("both", (WorkerRole.BOTH, WorkerRole.BOTH), None), LOAD, replica)
    apart = measure(Case("apart", (WorkerRole.PREFILL, WorkerRole.DECODE), None), LOAD, replica)
    assert apart.moved > both.moved
    assert apart.moved_gb > both.moved_gb
    assert both.long_first is not None


def test_it_prints_a_row_for_each_case_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0.5", "--streams", "20", "--answer-tokens", "20", "--longs", "0", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 3
    assert lines[1].split()[-3:] == ["0", "(0.0", "GB)"]
