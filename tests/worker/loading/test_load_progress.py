"""What a load says of itself, to a log and to a terminal."""

import io
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.worker.loading.load_format import DummyWeights, open_weights
from octavo.worker.loading.progress import LoadProgress, WatchedWeights
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightsError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_log_gets_the_start_a_line_now_and_then_and_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = LoadProgress("loading m", 10_000_000, clock=clock, bar=False)
    for _ in range(10):
        clock.now += 1.5
        progress.advance(1_000_000)
    progress.close()
    assert caplog.messages == [
        "loading m: 10 MB",
        "loading m: 40 % after 6 s",
        "loading m: 80 % after 12 s",
        "loading m: done in 15.0 s",
    ]


def test_more_than_was_announced_is_no_more_than_all(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = LoadProgress("loading m", 0, clock=clock, bar=False)
    clock.now += 9
    progress.advance(5)
    assert caplog.messages[-1] == "loading m: 100 % after 9 s"


def test_a_terminal_gets_a_bar_if_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    progress = LoadProgress("loading m", 4_000_000, bar=True)
    progress.advance(1_000_000)
    assert shown.getvalue() == ""
    bar = progress._bar
    assert bar is not None
    bar.start_t -= 60
    progress.advance(1_000_000)
    bar.refresh()
    assert "loading m:  50%" in shown.getvalue()
    progress.close()


def test_a_file_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert LoadProgress("loading m", 1)._bar is None


def test_what_is_taken_is_counted_and_passed_through(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watched = WatchedWeights(DummyWeights(), LoadProgress("loading m", 4000, clock=clock, bar=False))
    clock.now += 5
    tensor = watched.take("a", (100, 5))
    assert torch.equal(tensor, DummyWeights().take("a", (100, 5)))
    assert caplog.messages[-1] == "loading m: 50 % after 5 s"
    watched.drop("b")
    watched.finish()
    assert caplog.messages[-1] == "loading m: done in 5.0 s"


def test_of_a_part_its_own_bytes_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watched = WatchedWeights(DummyWeights(), LoadProgress("loading m", 4000, clock=clock, bar=False))
    clock.now += 5
    part = TensorPart(1, (range(2),))
    assert torch.equal(watched.take("a", (100, 5), part), DummyWeights().take("a", (100, 5))[:, :2])
    assert caplog.messages[-1] == "loading m: 20 % after 5 s"


def test_a_rank_announces_its_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": torch.zeros(2_000_000)}, tmp_path / "model.safetensors")
    open_weights(tmp_path, "auto", ranks=4)
    assert caplog.messages == [f"loading {tmp_path}: 2 MB"]


def test_each_load_format_opens_its_source(tmp_path: Path) -> None:
    assert open_weights(tmp_path, "dummy").take("a", (2,)).shape == (2,)
    for load_format in ("auto", "safetensors"):
        with pytest.raises(WeightsError, match="holds neither"):
            open_weights(tmp_path, load_format)
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    for load_format in ("auto", "safetensors"):
        weights = open_weights(tmp_path, load_format)
        assert weights.shapes() == {"a": (3,)}
        with pytest.raises(WeightsError, match="no place for: a"):
            weights.finish()
        weights.drop("a")
        weights.finish()
