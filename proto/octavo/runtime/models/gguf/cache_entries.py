"""The entries of the cache that stand for GGUF files: which of them processes use, and the removal of the others.

An entry is a directory that is named after its file's path, size and time of change. A process that uses one holds a
shared lock on the file `.use` in it until it ends, and sets its time. One lock of all entries keeps removals apart from
processes that are just finding or making theirs.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

# Grows when the same file gives another entry.
_VERSION = 1
_UNUSED_S = 30 * 24 * 3600.0
_USE = ".use"
_REMOVED = ".removed"
# The locks of the entries that this process uses.
_held: dict[Path, int] = {}


def entry_of(path: Path, cache: Path) -> Path:
    """Returns the entry of the file at `path`, there or not. Raises `OSError` if there is no such file."""
    return cache / "gguf" / _name(path)


@contextlib.contextmanager
def using(entry: Path) -> Iterator[None]:
    """Holds off removals within the block, which may make `entry`; afterwards this process uses it until it ends.

    In a cache that cannot be written to nothing is noted, as nothing is removed there.
    """
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(entry.parent / ".lock", fcntl.LOCK_SH):
        yield
        _use(entry)


def remove_unused(cache: Path, now: float | None = None) -> None:
    """Removes entries whose files are gone or have changed, and those that were not used for 30 days (at `now`, in
    seconds since 1970; None: by the file system's clock, which dates uses too), but none that a process uses. Leaves it
    to a later start where another process is at it."""
    root = cache / "gguf"
    with _locked(root / ".lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine, contextlib.suppress(OSError):
        if not is_mine:
            return
        os.utime(root / ".lock")
        now = (root / ".lock").stat().st_mtime if now is None else now
        for left in root.glob(f".*{_REMOVED}"):
            shutil.rmtree(left, ignore_errors=True)
        for entry in [each for each in root.iterdir() if each.is_dir() and not each.name.startswith(".")]:
            with contextlib.suppress(OSError):
                if reason := _why_stale(entry, now):
                    _remove(entry, reason)


def _name(path: Path) -> str:
    status = path.stat()
    described = f"{_VERSION}:{path}:{status.st_size}:{status.st_mtime_ns}"
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _use(entry: Path) -> None:
    for gone in [each for each in _held if not each.exists()]:
        os.close(_held.pop(gone))
    with contextlib.suppress(OSError):
        if entry not in _held:
            descriptor = os.open(entry / _USE, os.O_RDONLY | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _held[entry] = descriptor
        os.utime(entry / _USE)


def _why_stale(entry: Path, now: float) -> str | None:
    """Returns why `entry` is of no more use; None if it is. Raises `OSError` if it vanishes."""
    links = sorted(entry.glob("*/*.gguf"))
    if not all(link.exists() for link in links):
        return "its file is gone"
    if links and _name(links[0].readlink()) != entry.name:
        return "its file has changed"
    used = entry / _USE
    last = (used if used.exists() else entry).stat().st_mtime
    return "it has not been used for 30 days" if now - last > _UNUSED_S else None


def _remove(entry: Path, reason: str) -> None:
    with _locked(entry / _USE, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
        if not is_mine:
            return
        # Whoever is killed leaves nothing that looks whole.
        removed = entry.with_name(f".{entry.name}{_REMOVED}")
        entry.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        logger.info("removed %s from the cache: %s", entry, reason)


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[bool]:
    """Holds a lock on the file at `path`, which is made if need be, within the block; yields whether it could."""
    with contextlib.ExitStack() as undo:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, how)
        except OSError:
            is_mine = False
        else:
            is_mine = True
        yield is_mine
