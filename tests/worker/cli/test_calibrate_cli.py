"""`octavo calibrate` writes a file that can be read, and says in one line why it cannot."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from octavo.runtime.models.step_times import StepShape, read_calibration
from octavo.testbed.tiny_model import write_byte_model
from octavo.wire.costs import SwapCosts
from octavo.worker.cli.calibrate import calibrate


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        for variable in [key for key in os.environ if key.startswith("OCTAVO_")]:
            monkeypatch.delenv(variable)
        monkeypatch.setenv("OCTAVO_RUNTIME_DIR", name)
        write_byte_model(Path(name) / "model", max_model_len=256)
        yield Path(name)


def run(directory: Path, *arguments: str) -> Result:
    model = ("--model", str(directory / "model"), "--num-blocks", "128", "--max-num-seqs", "8")
    small = ("--out", str(directory / "c.json"), "--max-num-batched-tokens", "64")
    return CliRunner().invoke(calibrate, [*model, *small, *arguments])


def test_a_model_is_calibrated_into_a_file(directory: Path) -> None:
    result = run(directory, "--load-format", "dummy", "--dtype", "float32", "--threads", "1", "--max-model-len", "200")
    assert result.exit_code == 0, result.output
    found = read_calibration(directory / "c.json")
    assert (found.model, found.device, found.dtype) == ("model", "cpu", "float32")
    assert (found.max_model_len, found.vocab_size) == (200, 258)
    assert (found.block_size, found.num_blocks, found.num_cpu_blocks) == (16, 128, 32)
    assert 0 < found.times.seconds(StepShape(1, 1, 10)) < 10
    assert found.costs is not None
    for family in ("decode", "prefill", "mixed", "swap", "copy"):
        assert re.search(rf"^{family}: \d+ steps of .* ms$", result.stderr, re.MULTILINE)
        assert re.search(rf"^{family}: the model is off by [\d.]+%", result.stderr, re.MULTILINE)
    assert result.stdout.startswith(f"{directory}/c.json: model on cpu, off by ")


def test_the_time_of_a_step_is_what_the_device_takes(directory: Path) -> None:
    result = run(directory, "--device", "fake", "--fake-step-ms", "5")
    assert result.exit_code == 0, result.output
    times = read_calibration(directory / "c.json").times
    assert 0.005 < times.seconds(StepShape(4, 4, 400)) < 0.05


def test_without_cpu_blocks_no_swap_is_timed(directory: Path) -> None:
    result = run(directory, "--device", "fake", "--num-cpu-blocks", "0")
    assert result.exit_code == 0, result.output
    assert "swap" not in result.stderr
    found = read_calibration(directory / "c.json")
    assert found.costs is not None
    assert found.costs.swap == SwapCosts(0.0, 0.0, 0.0)
    assert found.costs.rows != []
    assert found.times.block_out_s == found.times.block_in_s == 0.0


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["--out", "/nowhere/c.json"], 2, "there is no directory /nowhere; make it first"),
        (["--out", "/"], 2, "'--out'"),
        (["--model", "/nowhere/at/all"], 2, "no model directory at /nowhere/at/all"),
        (["--max-num-seqs", "0"], 2, "'--max-num-seqs'"),
        (["--temperature", "-1"], 2, "'--temperature'"),
        (["--block-size", "0"], 2, "'--block-size'"),
        (["--fake-step-ms", "3"], 2, "mean nothing on cpu"),
        (["--threads", "1000000"], 2, "1000000 threads are asked for"),
    ],
)
def test_what_cannot_be_done_is_told(directory: Path, arguments: list[str], status: int, why: str) -> None:
    result = run(directory, *arguments)
    assert result.exit_code == status
    assert why in " ".join(result.stderr.split())
    assert not (directory / "c.json").exists()


def test_it_must_be_told_where_to_write() -> None:
    result = CliRunner().invoke(calibrate, [])
    assert result.exit_code == 2
    assert "'--out'" in result.stderr
