"""Which ranks a worker is told to be of, and what of that cannot be meant."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.worker import make_runner
from octavo.worker.cli import worker as cli
from octavo.worker.cli.worker import worker
from octavo.worker.config import WorkerConfig


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a command line makes the worker, or what it complains of."""
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("octavo.worker.model_settings.available_cores", lambda: 4)
    made: list[WorkerConfig] = []
    monkeypatch.setattr(cli, "run", made.append)

    def configure(*arguments: str) -> WorkerConfig | str:
        found = CliRunner().invoke(worker, arguments)
        return made[-1] if found.exit_code == 0 else found.output

    return configure


def test_a_worker_is_one_rank_unless_told_otherwise(configured: Any) -> None:
    config = configured()
    assert (config.tp, config.ranks_here, config.is_local_follower) == (1, 1, False)


def test_all_ranks_are_here_unless_they_are_told_where_to_meet(configured: Any) -> None:
    assert configured("--tp", "4").ranks_here == 4
    assert configured("--tp", "4", "--tp-rank", "0", "--tp-rendezvous", "leader:5000").ranks_here == 1


def test_only_a_rank_that_the_first_one_started_leaves_it_to_speak(configured: Any, monkeypatch: Any) -> None:
    apart = configured("--tp", "2", "--tp-rank", "1", "--tp-rendezvous", "leader:5000")
    assert not apart.is_local_follower
    monkeypatch.setenv("OCTAVO_TP_RANK", "1")
    monkeypatch.setenv("OCTAVO_TP_RENDEZVOUS", "file:/run/octavo/tp")
    child = configured("--tp", "2")
    assert child.is_local_follower
    assert child.ranks_here == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--tp 2 --tp-rank 1", "go together"),
        ("--tp 2 --tp-rendezvous leader:5000", "go together"),
        ("--tp 2 --tp-rank 2 --tp-rendezvous leader:5000", "--tp 2 has 0 to 1"),
        ("--tp-rank 0 --tp-rendezvous leader:5000", "give --tp too"),
        ("--tp 2 --tp-rank 1 --tp-rendezvous leader", "write host:port"),
        ("--tp 2 --device fake", "the fake device computes no model"),
        ("--tp 2 --threads 3", "2 ranks of 3 threads"),
        ("--tp 0", "Invalid value for '--tp'"),
        ("--tp 1025", "Invalid value for '--tp'"),
    ],
)
def test_what_cannot_be_meant_is_refused(configured: Any, arguments: str, complaint: str) -> None:
    assert complaint in " ".join(configured(*arguments.split()).split())


@pytest.mark.parametrize("arguments", ["--tp 2 --threads 2", "--tp 8 --threads 1"])
def test_each_rank_may_have_a_thread(configured: Any, arguments: str) -> None:
    assert configured(*arguments.split()).threads


def test_ranks_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr(make_runner, "available_cores", lambda: 6)
    assert [make_runner._usual_threads(ranks) for ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ("--tp 2", "cuda:0"),
        ("--tp 2 --tp-rank 1 --tp-rendezvous file:/run/octavo/tp", "cuda:1"),
        ("--tp 2 --tp-rank 1 --tp-rendezvous leader:5000", "cuda"),
        ("", "cuda"),
    ],
)
def test_ranks_on_one_machine_take_a_gpu_each(configured: Any, arguments: str, device: str) -> None:
    config = configured("--device", "cuda", *arguments.split())
    assert config.own_device(config.tp_rank or 0) == device
