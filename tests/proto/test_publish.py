"""A directory is there whole or not at all, and written once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.runtime.models.publish import PublishError, is_published, publish


def write(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def never(_: Path) -> None:
    raise AssertionError("written twice")


def test_what_is_written_appears_and_is_then_left_alone(tmp_path: Path) -> None:
    publish(tmp_path / "made" / "model", write)
    assert is_published(tmp_path / "made" / "model")
    publish(tmp_path / "made" / "model", never)


def test_its_files_can_be_read_by_those_who_may_read_what_is_written_here(tmp_path: Path) -> None:
    def write_secretly(directory: Path) -> None:
        write(directory)
        (directory / "config.json").chmod(0o600)

    (tmp_path / "usual").touch()
    publish(tmp_path / "model", write_secretly)
    assert (tmp_path / "model" / "config.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        write(directory)
        raise OSError("no space left on device")

    with pytest.raises(PublishError, match=r"cannot write .*model: no space left on device; make room there"):
        publish(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_what_a_killed_run_left_is_swept_away(tmp_path: Path) -> None:
    left = tmp_path / ".model.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    publish(tmp_path / "model", write)
    assert not left.exists()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_of_runs_at_the_same_time_one_writes_and_all_wait(tmp_path: Path) -> None:
    written = []
    together = threading.Barrier(4)

    def write_and_tell(directory: Path) -> None:
        written.append(directory)
        write(directory)

    def run() -> bool:
        together.wait(60)
        publish(tmp_path / "model", write_and_tell)
        return is_published(tmp_path / "model")

    with ThreadPoolExecutor(4) as pool:
        assert [run.result(60) for run in [pool.submit(run) for _ in range(4)]] == [True] * 4
    assert len(written) == 1


def test_a_place_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(PublishError, match=r"exists and holds no config\.json; name another place or remove it"):
        publish(tmp_path / "model", never)
