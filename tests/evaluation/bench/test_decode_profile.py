"""The profile of a decode step, on a model that takes no time."""

from pathlib import Path

import pytest

from octavo.bench.alone import profile_decode
from octavo.bench.in_process import InProcess, ObservedRunner
from octavo.testing.cluster import write_fake_model
from octavo.worker.fake.runner import FakeRunner


def profile(directory: Path, num_blocks: int) -> dict[str, float]:
    runner = ObservedRunner(FakeRunner(write_fake_model(directory), block_size=16, num_blocks=num_blocks))
    return profile_decode(InProcess(runner), runner, None)


def test_each_stage_of_a_step_has_its_time(tmp_path: Path) -> None:
    found = profile(tmp_path, 2000)
    assert list(found) == ["scheduler", "prepare", "model", "sample", "other"]
    assert all(milliseconds >= 0 for milliseconds in found.values())
    assert found["scheduler"] > 0


def test_sequences_that_do_not_fit_together_are_told_of(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="do not fit into 600 blocks"):
        profile(tmp_path, 600)
