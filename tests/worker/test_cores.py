"""Cores by affinity and by both versions of cgroups."""

from pathlib import Path

import pytest

from octavo.worker.process import available_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


def test_without_a_quota_there_are_as_many_as_the_process_is_pinned_to(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("nonsense", 8),
    ],
)
def test_a_quota_of_version_2_counts_in_whole_cores(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert available_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_version_1_too(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cores(tmp_path) == cores
