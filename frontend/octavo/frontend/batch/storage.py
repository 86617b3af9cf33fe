"""Lays out the directory of files and batches: a folder for each tenant, for its owner's eyes alone.

    tenants/TENANT/files/ID.json, ID.data     a file, and what is known of it
    tenants/TENANT/batches/ID/record.json     a batch, with input.jsonl, which stays when the client deletes the file
    open/ID                                   names the tenant of a batch that is not over

Several frontends may share the directory, one after another or at once.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from octavo.frontend.errors import NotFound, Reason
from octavo.frontend.http.envelope import unix_time

T = TypeVar("T")

_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_ID: Final = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
# Seconds after which what was being written when its process ended is removed.
_LEFT_OVER_S: Final = 3600.0
PART: Final = ".part"


class StorageError(Exception):
    """The directory cannot be used. The message says what to do."""


class Storage:
    """Knows where everything lies below `root`, and makes folders as they are needed."""

    def __init__(self, root: Path) -> None:
        """Raises `StorageError`."""
        self._root = root
        try:
            for each in (root, self._open, root / "tenants"):
                each.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
            root.chmod(_FOLDER_MODE)
        except OSError as error:
            raise StorageError(f"no files and batches can be kept in {root}: {error}; name another place") from error

    @property
    def _open(self) -> Path:
        return self._root / "open"

    def files_of(self, tenant: str) -> Path:
        """Returns the folder of a tenant's files. Raises `OSError`."""
        return self._folder(tenant, "files")

    def batches_of(self, tenant: str) -> Path:
        """Returns the folder of a tenant's batches. Raises `OSError`."""
        return self._folder(tenant, "batches")

    def _folder(self, tenant: str, kind: str) -> Path:
        # A tenant's name may hold what no name of a folder can.
        own = self._root / "tenants" / hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]
        for folder in (own, own / kind):
            # Parents that are made along with a folder do not get its mode.
            folder.mkdir(_FOLDER_MODE, exist_ok=True)
        return own / kind

    def mark_open(self, batch_id: str, tenant: str) -> None:
        """Notes that a batch is to be worked on. Raises `OSError`."""
        write_record(self._open / batch_id, tenant)

    def mark_over(self, batch_id: str) -> None:
        """Notes that a batch is over. Raises `OSError`."""
        (self._open / batch_id).unlink(missing_ok=True)

    def open_batches(self) -> Iterator[tuple[str, str]]:
        """Yields the ids of batches that are not over, with their tenants. Raises `OSError`."""
        for path in sorted(self._open.iterdir()):
            if _ID.fullmatch(path.name) and (tenant := read_record(path, str)) is not None:
                yield path.name, tenant

    def folders(self, kind: str) -> Iterator[Path]:
        """Yields the folders of all tenants' files or batches. Raises `OSError`."""
        for tenant in (self._root / "tenants").iterdir():
            if (folder := tenant / kind).is_dir():
                yield folder


def fresh_id(prefix: str) -> str:
    """Returns an id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


def check_id(found: str, reason: Reason) -> str:
    """Returns an id that is the name of a file too. Raises `NotFound` for what was never one."""
    if not _ID.fullmatch(found):
        raise unknown(found, reason)
    return found


def unknown(found: str, reason: Reason) -> NotFound:
    """Returns the error for an id that names nothing of the caller's."""
    kind = "file" if reason is Reason.FILE_NOT_FOUND else "batch"
    return NotFound(reason, f"you have no {kind} {found[:128]!r}: it was deleted, has expired, or is another's")


def write_record(path: Path, record: object) -> None:
    """Writes JSON, so that others read either what was there before or all of this. Raises `OSError`."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE), "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def read_record(path: Path, kind: type[T]) -> T | None:
    """Reads JSON as `kind`; None where there is none, or it is no such thing. Raises `OSError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def remove_left_overs(folder: Path) -> None:
    """Removes what was being written when its process ended. Raises `OSError`."""
    for path in folder.glob(f"*{PART}"):
        with suppress(FileNotFoundError):
            if unix_time() - path.stat().st_mtime > _LEFT_OVER_S:
                path.unlink()
