"""Which kernels a worker takes where it has to measure, and that the workers of a machine agree."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig

from octavo.kernels.native.library import VARIANT_VARIABLE, NativeLibrary, find, set_aside
from octavo.runtime.models.directory import cache_directory
from octavo.testbed.models import fp32_runner, write_tiny_model
from octavo.testing.native import loaded
from octavo.worker.cli import worker as cli
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models import kernel_race
from octavo.worker.models.config import DecoderConfig, read_config
from octavo.worker.models.kernel_race import Speeds, known, measure, settle, to_measure

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SETTINGS = ModelSettings(dtype="float32", block_size=16, threads=1)
SLOWER, FASTER = Speeds(0.5, 0.9), Speeds(2.0, 1.5)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own, a CPU that has AVX2 at most, and nobody's choice; afterwards all is as it was."""
    library = loaded()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIANT_VARIABLE, raising=False)
    monkeypatch.setattr(kernel_race, "find", lambda: replace(library, variant="avx2"))
    yield
    set_aside(None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", LlamaConfig(**SIZES))
    return tmp_path / "model"


@pytest.fixture
def config(model: Path) -> DecoderConfig:
    return read_config(model)


def large(config: DecoderConfig) -> DecoderConfig:
    """Worth measuring."""
    return replace(config, hidden_size=1024, intermediate_size=2048)


def test_torch_is_taken_where_it_is_clearly_faster_over_both() -> None:
    assert SLOWER.torch_is_faster
    assert not FASTER.torch_is_faster
    assert not Speeds(0.99, 0.95).torch_is_faster  # chance
    assert not Speeds(0.5, 2.5).torch_is_faster
    assert Speeds(0.3, 2.0).torch_is_faster


def test_nothing_is_measured_where_there_is_no_choice(config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert to_measure(large(config), exact=False)
    assert not to_measure(large(config), exact=True)
    assert not to_measure(config, exact=False)  # too small to matter
    for variant in ("avx512", "avx512_bf16", "amx"):
        monkeypatch.setattr(kernel_race, "find", lambda variant=variant: NativeLibrary(variant, loaded().functions))
        assert not to_measure(large(config), exact=False)
    monkeypatch.setattr(kernel_race, "find", lambda: NativeLibrary("portable", loaded().functions))
    assert to_measure(large(config), exact=False)
    monkeypatch.setenv(VARIANT_VARIABLE, "portable")
    assert not to_measure(large(config), exact=False)


def test_both_ways_are_measured_and_nothing_of_it_stays(config: DecoderConfig) -> None:
    # Whatever the tests before were told to load.
    find.cache_clear()
    before = loaded()
    speeds = measure(config, torch.float32, 16)
    assert speeds.prefill > 0
    assert speeds.decode > 0
    after = find()
    assert isinstance(after, NativeLibrary)
    assert after.variant == before.variant


def test_the_first_workers_figures_hold_for_the_others(config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([SLOWER, FASTER])
    monkeypatch.setattr(kernel_race, "measure", lambda *_: next(figures))
    assert known(config, torch.float32, 16) == SLOWER
    assert known(config, torch.float32, 16) == SLOWER
    # Of another type nothing is known yet.
    assert known(config, torch.bfloat16, 16) == FASTER


def test_of_two_that_measure_at_once_one_prevails(config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(*_: object) -> Speeds:
        monkeypatch.setattr(kernel_race, "measure", lambda *_: FASTER)
        assert known(config, torch.float32, 16) == FASTER
        return SLOWER

    monkeypatch.setattr(kernel_race, "measure", overtaken)
    assert known(config, torch.float32, 16) == FASTER


@pytest.mark.parametrize("text", ["", "{", '{"prefill": 1.0}', '{"prefill": "fast", "decode": 1.0}', "[]"])
def test_a_file_without_figures_is_written_anew(
    config: DecoderConfig, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(kernel_race, "measure", lambda *_: SLOWER)
    known(config, torch.float32, 16)
    [path] = (cache_directory() / "kernels").iterdir()
    path.write_text(text)
    monkeypatch.setattr(kernel_race, "measure", lambda *_: FASTER)
    assert known(config, torch.float32, 16) == FASTER
    assert json.loads(path.read_text()) == {"prefill": 2.0, "decode": 1.5}


def test_a_cache_that_takes_nothing_is_said_and_ends_nothing(
    config: DecoderConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(kernel_race, "measure", lambda *_: SLOWER)
    assert known(config, torch.float32, 16) == SLOWER
    assert "workers may choose differently" in caplog.text


class Ranks:
    """A group whose other rank gives `other`."""

    rank, size = 0, 2

    def __init__(self, other: int) -> None:
        self.other = other

    def exchange(self, number: int) -> list[int]:
        return [number, self.other]


def test_ranks_take_torch_together_or_not_at_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_race, "_speeds", lambda *_: SLOWER)
    chosen = settle(model, SETTINGS, Ranks(1))  # type: ignore[arg-type]
    assert chosen is not None
    assert chosen.startswith("Octavo's own kernels compute")
    chosen = settle(model, SETTINGS, Ranks(0))  # type: ignore[arg-type]
    assert chosen is not None
    assert chosen.startswith("torch computes")


def test_what_cannot_be_measured_is_said_and_ends_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Speeds:
        raise RuntimeError("no memory")

    monkeypatch.setattr(kernel_race, "to_measure", lambda *_, **__: True)
    monkeypatch.setattr(kernel_race, "measure", fail)
    assert settle(model, SETTINGS) is None
    assert "it cannot be measured whether torch is faster (no memory)" in caplog.text
    assert fp32_runner(model, num_blocks=8, num_cpu_blocks=0, threads=1).kernels.startswith("native ")


@pytest.mark.parametrize("speeds", [SLOWER, FASTER])
def test_a_worker_says_at_its_start_what_it_takes_and_takes_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, speeds: Speeds
) -> None:
    monkeypatch.setattr(kernel_race, "to_measure", lambda *_, **__: True)
    monkeypatch.setattr(kernel_race, "measure", lambda *_: speeds)
    monkeypatch.setattr(cli, "serve", lambda *_, **__: None)
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(model.parent))
    options = ["--num-blocks", "8", "--dtype", "float32", "--threads", "1", "--health-address", "127.0.0.1:0"]
    result = CliRunner().invoke(cli.worker, ["--model", str(model), *options])
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    if speeds is FASTER:
        assert first.startswith("Octavo's own kernels compute: they have 2.00 times torch's speed in a prefill")
        assert "; kernels: native " in "".join(rest)
    else:
        assert first.startswith("torch computes: Octavo's own kernels have 0.50 times torch's speed in a prefill")
        assert "; kernels: torch (not Octavo's own kernels: measured on this CPU, they have 0.50 times" in "".join(rest)
