"""The room below a store's directory, which the segments of all identities and processes share: the oldest make way.

One lock keeps those apart who make and remove segments, and with it their files below the capacity. What exceeds
it are the segments that others are filling meanwhile, one each at most. Nobody waits long for the lock: a process that
is stopped while it holds it stops no other from computing, or from reading.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Final

from octavo.worker.kv_store.segment import SegmentFile, segment_files

_LOCK: Final = ".lock"
_LOCK_WAIT_S, _LOCK_RETRY_S = 1.0, 0.01


class KVStoreError(Exception):
    """Says why a directory cannot be a store's, and what to do."""


def prepare(directory: Path) -> None:
    """Makes the store's directory with mode 0700 if it is not there. Raises `KVStoreError` if it cannot be made, or if
    others than this user may look into it or write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise KVStoreError(f"cannot keep KV blocks in {directory}: {error}; name another place") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise KVStoreError(
            f"{directory} must be a directory of this user with mode {0o700:o}, not {stat.S_IMODE(found.st_mode):o}:"
            f" what lies there tells of prompts; run `chmod 700 {directory}`, or name a directory inside it"
        )


def all_segments(directory: Path) -> list[SegmentFile]:
    """Returns the segments of all identities below the store's directory, oldest first. Raises `OSError`."""
    with os.scandir(directory) as entries:
        places = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted((file for place in places for file in segment_files(place)), key=lambda file: (file.age, file.path))


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the store's lock within the block. Raises `OSError` if it cannot be had, or not for a second."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(descriptor)


def too_old(files: list[SegmentFile], num_bytes: int, capacity_bytes: int) -> list[SegmentFile]:
    """Returns those of all segments, oldest first, that have to go before `num_bytes` more fit."""
    excess = sum(file.num_bytes for file in files) + num_bytes - capacity_bytes
    sizes_before = accumulate((file.num_bytes for file in files), initial=0)
    return [file for file, before in zip(files, sizes_before, strict=False) if before < excess]


def remove(file: SegmentFile) -> None:
    """Removes a segment, and its directory if it was the last there. Whoever is reading it reads on. The caller holds
    the lock. Raises `OSError`."""
    file.path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        file.path.parent.rmdir()
