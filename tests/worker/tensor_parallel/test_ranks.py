"""One rank's way from start to end, as a process of its own."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.testing.depth import deep

_RANK = "from octavo.worker.cli.worker import worker; worker()"
# Each rank imports torch, one after the other: eight seconds of CPU, of which a busy machine gives few in a minute.
_WAIT_S = 240.0


@pytest.mark.parametrize("number", [signal.SIGTERM, *deep(signal.SIGINT)])
def test_a_rank_that_waits_for_the_first_one_ends_at_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as first:
        first.settimeout(_WAIT_S)
        options = ["--tp", "2", "--tp-rank", "1", "--tp-rendezvous", f"127.0.0.1:{first.getsockname()[1]}"]
        rank = subprocess.Popen([sys.executable, "-c", _RANK, *options], stderr=subprocess.DEVNULL)
        waiting, _ = first.accept()
        with waiting:
            rank.send_signal(number)
            assert rank.wait(_WAIT_S) == -number


_FAILING_RANK = """
import os
from octavo.worker.cli.worker import worker
from octavo.worker.step import model_runner
def refuse(name):
    raise model_runner.ModelRunnerError("there is no such GPU")
if "OCTAVO_TP_RANK" in os.environ:
    model_runner._torch_device = refuse
worker()
"""


def test_a_rank_that_will_not_do_says_why_and_ends_all_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    command = [sys.executable, "-c", _FAILING_RANK, "--tp", "2", "--load-format", "dummy"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    assert "there is no such GPU" in ended.stderr
    assert ended.returncode == 2
