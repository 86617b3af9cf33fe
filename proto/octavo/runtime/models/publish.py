"""The publication of model directories: each appears whole or not at all, whoever is killed and however many write
it."""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Configuration, tokenizer, generation defaults and chat template.
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


class PublishError(Exception):
    """Raised for a place where no model directory can be written, with a remedy."""


def is_published(directory: Path) -> bool:
    """Tells whether `directory` holds a model."""
    return (directory / "config.json").is_file()


def publish(directory: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` to fill a new directory, which becomes `directory` when it is complete; does nothing if that
    exists.

    A second process waits for the first. Raises `PublishError` if `directory` holds something else or cannot be
    written, and whatever `write` raises.
    """
    if is_published(directory):
        return
    try:
        _publish(directory, write)
    except OSError as error:
        raise PublishError(
            f"cannot write {directory}: {error}; make room there or name another place (for the bundled model and for"
            " GGUF files with OCTAVO_CACHE)"
        ) from error


def _publish(directory: Path, write: Callable[[Path], None]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(f".{directory.name}.lock")) as usual_mode:
        if is_published(directory):
            return
        if directory.exists():
            raise PublishError(f"{directory} exists and holds no config.json; name another place or remove it")
        # The process that left this was killed while it held the lock.
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            with _disk_errors():
                write(partial)
            # What a link points to is not ours.
            for path in (each for each in partial.iterdir() if not each.is_symlink()):
                # The safetensors library lets no other user read the files that it writes.
                path.chmod(usual_mode)
                _sync(path)
            _sync(partial)
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(directory.parent)


def copy_description(source: Path, directory: Path, *, but: str) -> None:
    """Copies configuration and tokenizer of the model in `source` to `directory`, and no weights; and no file called
    `but`."""
    for path in sorted({path for pattern in _DESCRIPTION for path in source.glob(pattern)}):
        if path.name != but:
            shutil.copyfile(path, directory / path.name)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raises `OSError` where the libraries that write tensors and tokenizers raise errors of their own for a disk."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Holds the lock within the block, and yields the mode that new files get here."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
