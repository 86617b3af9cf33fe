"""The cache's entries for GGUF files: those of no more use go at the next start, and none that a process uses."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.runtime.models.gguf.cache_entries import entry_of, remove_unused, using
from octavo.runtime.models.gguf.directory import model_directory
from octavo.testing.small.tiny_gguf import write_gguf

DAY_S = 24 * 3600.0
# Makes or finds the directory of a file, says so, and goes on until its input ends.
HOLDER = """
import sys
from pathlib import Path
from octavo.runtime.models.gguf.directory import model_directory
print(model_directory(Path(sys.argv[1]), Path(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def started_elsewhere(file: Path, cache: Path) -> "subprocess.Popen[str]":
    """Another process that uses `file`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file), str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(entry_of(file, cache) / file.stem)
    return process


def left_by_a_process(file: Path, cache: Path) -> Path:
    """The entry of `file` that a process has used that is no more."""
    process = started_elsewhere(file, cache)
    process.communicate()
    return entry_of(file, cache)


def delete(file: Path) -> None:
    file.unlink()


def change(file: Path) -> None:
    write_gguf(file, pre="gpt-2")
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize(("what", "reason"), [(delete, "its file is gone"), (change, "its file has changed")])
def test_the_next_start_removes_what_stands_for_no_file(
    tmp_path: Path, what: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, other, cache = write_gguf(tmp_path / "tiny.gguf"), write_gguf(tmp_path / "other.gguf"), tmp_path / "cache"
    entry = left_by_a_process(file, cache)
    with caplog.at_level("INFO"):
        kept = model_directory(other, cache)
        assert entry.exists(), "nothing has happened to its file"
        what(file)
        assert model_directory(other, cache) == kept
    assert sorted(each.name for each in (cache / "gguf").iterdir()) == sorted([".lock", kept.parent.name])
    assert f"removed {entry} from the cache: {reason}" in caplog.messages
    if file.exists():
        assert (model_directory(file, cache) / "config.json").is_file()


def test_an_entry_is_removed_30_days_after_its_last_use(tmp_path: Path) -> None:
    file, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    entry = left_by_a_process(file, cache)
    long_ago = time.time() - 100 * DAY_S
    os.utime(entry / ".use", (long_ago, long_ago))
    # A start is a use.
    left_by_a_process(file, cache)
    remove_unused(cache, time.time() + 29 * DAY_S)
    assert entry.exists()
    remove_unused(cache, time.time() + 31 * DAY_S)
    assert not entry.exists()


def test_what_a_process_uses_stays_until_it_has_ended(tmp_path: Path) -> None:
    file, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    entry = entry_of(file, cache)
    process = started_elsewhere(file, cache)
    try:
        file.unlink()
        for _ in range(2):
            remove_unused(cache, time.time() + 1000 * DAY_S)
            assert (entry / "tiny" / "tokenizer.json").is_file()
    finally:
        process.kill()
        process.communicate()
    remove_unused(cache)
    assert not entry.exists()


def test_nothing_is_removed_while_a_process_is_finding_its_own(tmp_path: Path) -> None:
    file, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    entry = left_by_a_process(file, cache)
    far = time.time() + 1000 * DAY_S
    with using(cache / "gguf" / "another"):
        remove_unused(cache, far)
        assert entry.exists()
    remove_unused(cache, far)
    assert not entry.exists()


def test_what_a_killed_process_was_removing_is_removed_by_the_next(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    left = cache / "gguf" / ".0123456789abcdef.removed" / "tiny"
    left.mkdir(parents=True)
    remove_unused(cache)
    assert not left.parent.exists()
