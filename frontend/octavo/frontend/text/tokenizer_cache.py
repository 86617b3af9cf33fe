"""Keeps what was read of a model directory's tokenizer, for reading takes a process of its own and two seconds.

An entry is named by the content of everything in the directory but weights, and by the versions of the libraries that
read the directory: so an entry never goes stale.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from octavo.runtime.models.directory import cache_directory
from octavo.runtime.telemetry.optional import TOKENIZER_CACHE, failed, tolerated

# Changes when other things are read of a directory.
_FORMAT: Final = "1"
_LIBRARIES: Final = ("transformers", "tokenizers")
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".npz"})
# More than any tokenizer has; hashing it all would take longer than it saves.
_MAX_FILES: Final = 256
_MAX_BYTES: Final = 256 << 20
_CONSEQUENCE: Final = "the tokenizer is read anew at every start, which takes some seconds"


def place_of(directory: Path) -> Path | None:
    """Returns the path of the entry of `directory`, there or not; None if the directory can have no entry."""
    digest = hashlib.sha256()
    try:
        for part in (_FORMAT, *map(metadata.version, _LIBRARIES)):
            digest.update(f"{part}\n".encode())
        for path in _files(directory):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(directory)} {len(content)}\n".encode() + content)
    except (OSError, metadata.PackageNotFoundError, _TooMuchError):
        return None
    return cache_directory() / "tokenizers" / digest.hexdigest()


class _TooMuchError(Exception):
    pass


def _files(directory: Path) -> Iterator[Path]:
    found = sorted(path for path in directory.rglob("*") if path.suffix not in _WEIGHTS and path.is_file())
    if len(found) > _MAX_FILES or sum(path.stat().st_size for path in found) > _MAX_BYTES:
        raise _TooMuchError
    yield from found


def read(place: Path) -> bytes | None:
    """Returns the entry at `place`, if this user wrote it and nobody else can write to it."""
    try:
        with place.open("rb") as file:
            status = os.fstat(file.fileno())
            is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            return file.read() if is_own else None
    except FileNotFoundError:
        return None
    except OSError as error:
        failed(TOKENIZER_CACHE, error, _CONSEQUENCE)
        return None


def write(place: Path, content: bytes) -> None:
    """Writes an entry. A cache that cannot be written to keeps nothing, and the log says so."""
    with tolerated(TOKENIZER_CACHE, _CONSEQUENCE):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, place)
        except OSError:
            os.unlink(name)
            raise
