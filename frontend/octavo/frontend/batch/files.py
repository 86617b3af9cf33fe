"""Keeps clients' files on the disk, within the bounds of their tenants, until they expire."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.frontend.batch.storage import (
    PART,
    Storage,
    check_id,
    fresh_id,
    read_record,
    remove_left_overs,
    unknown,
    write_record,
)
from octavo.frontend.errors import InvalidRequest, Reason

_MODE: Final = 0o600
_RECORD, _CONTENT = ".json", ".data"
PREFIX: Final = "file-"
INPUT, OUTPUT = "batch", "batch_output"


@dataclass(frozen=True)
class FileBounds:
    """Bounds files: the bytes of one, those of all of a tenant's, and the seconds for which one is kept."""

    max_bytes: int
    tenant_max_bytes: int
    expiry_s: int


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what is known of a file. Times are Unix times."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """Returns OpenAI's object of the file."""
        return {**msgspec.to_builtins(self), "object": "file", "status": "processed", "status_details": None}


class Upload:
    """Takes in one file, piece by piece."""

    def __init__(self, folder: Path, file_id: str, max_bytes: int) -> None:
        """Begins the file. Raises `OSError`."""
        self.id = file_id
        self.size = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._part = folder / f"{file_id}{_CONTENT}{PART}"
        self._file = os.fdopen(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb", buffering=0)

    def write(self, content: bytes) -> None:
        """Adds a piece. Raises `InvalidRequest` for a file that is too large, `OSError`."""
        self.size += len(content)
        if self.size > self._max_bytes:
            raise too_large(self._max_bytes)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]

    def finish(self, filename: str, created_at: int, expires_at: int) -> FileRecord:
        """Returns what is known of the file, once it is on the disk. Raises `OSError`."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._folder / f"{self.id}{_CONTENT}")
        record = FileRecord(
            id=self.id,
            bytes=self.size,
            created_at=created_at,
            expires_at=expires_at,
            filename=filename,
            purpose=INPUT,
        )
        write_record(self._folder / f"{self.id}{_RECORD}", record)
        return record

    def abandon(self) -> None:
        """Leaves nothing of the file. Raises `OSError`."""
        self._file.close()
        for path in (self._part, self._folder / f"{self.id}{_CONTENT}"):
            path.unlink(missing_ok=True)


class Files:
    """Keeps the files of all tenants. Its methods wait for the disk, and raise `OSError` where that fails."""

    def __init__(self, storage: Storage, bounds: FileBounds, clock: Callable[[], int]) -> None:
        self.bounds = bounds
        self._storage = storage
        self._clock = clock

    def begin(self, tenant: str) -> Upload:
        """Begins a file of a tenant. Raises `InvalidRequest` where the tenant's are large enough together."""
        folder = self._storage.files_of(tenant)
        room = self.bounds.tenant_max_bytes - _size_of(folder)
        if room <= 0:
            raise InvalidRequest(
                Reason.TOO_LARGE,
                f"your files have {self.bounds.tenant_max_bytes} bytes together, as many as may be; delete some",
                max_bytes=self.bounds.tenant_max_bytes,
            )
        return Upload(folder, fresh_id(PREFIX), min(room, self.bounds.max_bytes))

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """Returns a tenant's file. Raises `NotFound`."""
        path = self._storage.files_of(tenant) / f"{check_id(file_id, Reason.FILE_NOT_FOUND)}{_RECORD}"
        record = read_record(path, FileRecord)
        if record is None or record.expires_at <= self._clock():
            raise unknown(file_id, Reason.FILE_NOT_FOUND)
        return record

    def content(self, tenant: str, file_id: str) -> tuple[FileRecord, Path]:
        """Returns a tenant's file, and where its content lies. Raises `NotFound`."""
        return self.get(tenant, file_id), self.content_path(tenant, file_id)

    def content_path(self, tenant: str, file_id: str) -> Path:
        """Returns where the content of a file with this id lies, whether or not there is one."""
        return self._storage.files_of(tenant) / f"{file_id}{_CONTENT}"

    def all_of(self, tenant: str) -> list[FileRecord]:
        """Returns a tenant's files, the newest first."""
        now = self._clock()
        paths = self._storage.files_of(tenant).glob(f"*{_RECORD}")
        found = [record for path in paths if (record := read_record(path, FileRecord)) and record.expires_at > now]
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def publish(self, tenant: str, file_id: str, filename: str, expires_at: int) -> None:
        """Makes a file of the answers that lie in its place."""
        record = FileRecord(
            id=file_id,
            bytes=self.content_path(tenant, file_id).stat().st_size,
            created_at=self._clock(),
            expires_at=expires_at,
            filename=filename,
            purpose=OUTPUT,
        )
        write_record(self._storage.files_of(tenant) / f"{file_id}{_RECORD}", record)

    def delete(self, tenant: str, file_id: str) -> None:
        """Removes a tenant's file. Raises `NotFound`."""
        self.get(tenant, file_id)
        _remove(self._storage.files_of(tenant), file_id)

    def sweep(self) -> None:
        """Removes what has expired, of all tenants."""
        now = self._clock()
        for folder in self._storage.folders("files"):
            remove_left_overs(folder)
            for path in folder.glob(f"*{_RECORD}"):
                record = read_record(path, FileRecord)
                if record is not None and record.expires_at <= now:
                    _remove(folder, record.id)


def too_large(max_bytes: int) -> InvalidRequest:
    """Returns the error for a file of more bytes than may be."""
    return InvalidRequest(
        Reason.TOO_LARGE,
        f"the file has more than {max_bytes} bytes, as many as are left to you; send several, or delete others",
        max_bytes=max_bytes,
    )


def _remove(folder: Path, file_id: str) -> None:
    # Without its record a file is not found any more.
    for ending in (_RECORD, _CONTENT):
        (folder / f"{file_id}{ending}").unlink(missing_ok=True)


def _size_of(folder: Path) -> int:
    size = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
