"""A disk that fails: what writes below a directory meets the errors that it would meet there.

Python's own ways to write are replaced, so that each error can be had as any user and without a mount. What libraries
write by themselves is met by `short_files`, where the kernel itself refuses.
"""

import builtins
import errno
import io
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What changes a directory, by its first argument.
_MAKING: Final = ("mkdir", "rename", "replace", "link", "symlink", "truncate", "chmod")


@dataclass(frozen=True)
class Failure:
    """Describes how a disk fails: already when something is to be made, or only when bytes are to be written."""

    number: int
    at_making: bool = False

    def raised(self, path: object) -> OSError:
        """Makes the error as the system raises it."""
        return OSError(self.number, os.strerror(self.number), path)


READ_ONLY: Final = Failure(errno.EROFS, at_making=True)
NO_INODE: Final = Failure(errno.ENOSPC, at_making=True)
FULL: Final = Failure(errno.ENOSPC)
BROKEN: Final = Failure(errno.EIO)


@dataclass
class Disk:
    """Fails, and notes in `met` the source files from which something met the failure, directly or through others."""

    failure: Failure
    met: set[str] = field(default_factory=set)
    is_mended: bool = False

    def mend(self) -> None:
        """From now on files take what is written to them, those too that are open."""
        self.is_mended = True

    def fail(self, path: object) -> OSError:
        frame = sys._getframe()
        while frame:
            self.met.add(frame.f_code.co_filename)
            if (outer := frame.f_back) is None:
                break
            frame = outer
        return self.failure.raised(path if isinstance(path, int) else os.fsdecode(path))  # type: ignore[arg-type]


class _FailingFile(io.FileIO):
    """Takes `room` bytes and fails then, having written some of what it was given, as a disk does."""

    disk: Disk
    room: int

    def write(self, content: Any) -> int:
        part = memoryview(content).cast("B")
        if not self.disk.is_mended:
            part = part[: self.room]
            if not part:
                raise self.disk.fail(self.name)
            self.room -= len(part)
        return super().write(part) or 0


@contextmanager
def failing_disk(directory: Path, failure: Failure, *, room: int = 0) -> Iterator[Disk]:
    """Inside the block the disk below `directory` fails; behind the first `room` bytes of each file if it fails to
    write."""
    disk, real_open, real_os_open = Disk(failure), io.open, os.open

    def is_below(path: Any) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        where = Path(os.fsdecode(path)).absolute()
        return where == directory or directory in where.parents

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or not is_below(file):
            return real_open(file, mode, buffering, *args, **kwargs)
        if failure.at_making:
            raise disk.fail(file)
        raw = _FailingFile(file, mode.replace("b", "").replace("t", ""), kwargs.pop("closefd", True))
        raw.disk, raw.room = disk, room
        if "b" in mode:
            return raw if buffering == 0 else io.BufferedWriter(raw)
        return io.TextIOWrapper(io.BufferedWriter(raw), *args, **kwargs)

    def os_opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if failure.at_making and flags & _WRITING and is_below(path):
            raise disk.fail(path)
        return real_os_open(path, flags, *args, **kwargs)

    def filled(real: Callable[..., int]) -> Callable[..., int]:
        def fill(descriptor: int, *args: Any) -> int:
            if is_below(descriptor):
                raise disk.fail(descriptor)
            return real(descriptor, *args)

        return fill

    def made(real: Callable[..., Any]) -> Callable[..., Any]:
        def make(path: Any, *args: Any, **kwargs: Any) -> Any:
            if is_below(path):
                raise disk.fail(path)
            return real(path, *args, **kwargs)

        return make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        patch.setattr(os, "open", os_opened)
        for name in ("sendfile", "pwrite"):
            patch.setattr(os, name, filled(getattr(os, name)))
        if failure.at_making:
            for name in _MAKING:
                patch.setattr(os, name, made(getattr(os, name)))
        yield disk


@contextmanager
def short_files(most: int = 4096) -> Iterator[None]:
    """Inside the block the kernel lets no file of this process grow beyond `most` bytes (EFBIG), whoever writes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
