"""Keeps what is known of batches on the disk, so that any frontend that shares it can go on with one."""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.frontend.batch.files import PREFIX, Files
from octavo.frontend.batch.lines import LineError
from octavo.frontend.batch.storage import Storage, check_id, fresh_id, read_record, unknown, write_record
from octavo.frontend.errors import Overloaded, Reason

_MODE: Final = 0o600
_RECORD, _LOCK, _CANCELLED = "record.json", "lock", "cancelled"
INPUT: Final = "input.jsonl"
# Batches of one tenant that are not over.
MAX_OPEN: Final = 64
OVER: Final = frozenset({"completed", "failed", "expired", "cancelled"})


class Counts(msgspec.Struct, frozen=True):
    """Counts the calls of a batch: all, those that are answered, and those that have failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what is known of a batch. Times are Unix times.

    The ids of its files are there from the beginning, and `shown` once they have content. `tenant` and `trusted` are
    the caller's.
    """

    id: str
    tenant: str
    trusted: bool
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_file_id: str
    error_file_id: str
    files_expire_after_s: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = {}
    errors: tuple[LineError, ...] = ()
    counts: Counts = Counts()
    has_output: bool = False
    has_errors: bool = False

    @property
    def is_over(self) -> bool:
        """Tells whether nothing more will be answered."""
        return self.status in OVER

    def at(self, status: str, now: int, **fields: Any) -> "BatchRecord":
        """Returns the batch as it is from now on."""
        return msgspec.structs.replace(self, status=status, times={**self.times, status: now}, **fields)

    def shown(self) -> dict[str, Any]:
        """Returns OpenAI's object of the batch."""
        found = msgspec.to_builtins(self)
        errors = [{**each, "line": each["line"] or None} for each in found["errors"]]
        kept = ("id", "endpoint", "input_file_id", "completion_window", "status", "created_at", "expires_at")
        told = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "object": "batch",
            **{name: found[name] for name in kept},
            **{f"{status}_at": self.times.get(status) for status in told},
            "output_file_id": self.output_file_id if self.has_output else None,
            "error_file_id": self.error_file_id if self.has_errors else None,
            "errors": {"object": "list", "data": errors} if errors else None,
            "request_counts": found["counts"],
            "metadata": self.metadata,
        }


class Lock:
    """Is held by the one process that works on a batch; the system takes it back from one that dies."""

    def __init__(self, folder: Path) -> None:
        """Raises `BlockingIOError` where another process holds it, `OSError`."""
        self._file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def release(self) -> None:
        os.close(self._file)


class Records:
    """Keeps the batches of all tenants. Its methods wait for the disk, and raise `OSError` where that fails."""

    def __init__(self, storage: Storage, files: Files, clock: Callable[[], int]) -> None:
        self._storage = storage
        self._files = files
        self._clock = clock

    def create(self, tenant: str, input_path: Path, **fields: Any) -> BatchRecord:
        """Makes a batch. Raises `Overloaded` for a tenant that has too many."""
        num_open = sum(owner == tenant for _, owner in self._storage.open_batches())
        if num_open >= MAX_OPEN:
            raise Overloaded(
                Reason.TENANT_QUOTA, f"{num_open} batches of yours are under way; wait for one", max=MAX_OPEN
            )
        batch_id = fresh_id("batch_")
        record = BatchRecord(
            id=batch_id,
            tenant=tenant,
            output_file_id=fresh_id(PREFIX),
            error_file_id=fresh_id(PREFIX),
            **fields,
        )
        folder = self.folder(tenant, batch_id)
        folder.mkdir(0o700)
        try:
            os.link(input_path, folder / INPUT)
            write_record(folder / _RECORD, record)
            self._storage.mark_open(batch_id, tenant)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return record

    def folder(self, tenant: str, batch_id: str) -> Path:
        """Returns the folder of a batch."""
        return self._storage.batches_of(tenant) / batch_id

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Returns a tenant's batch. Raises `NotFound`."""
        folder = self.folder(tenant, check_id(batch_id, Reason.BATCH_NOT_FOUND))
        if (record := read_record(folder / _RECORD, BatchRecord)) is None:
            raise unknown(batch_id, Reason.BATCH_NOT_FOUND)
        return record

    def all_of(self, tenant: str) -> list[BatchRecord]:
        """Returns a tenant's batches, the newest first."""
        paths = self._storage.batches_of(tenant).glob(f"*/{_RECORD}")
        found = [record for path in paths if (record := read_record(path, BatchRecord))]
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def note(self, record: BatchRecord) -> None:
        """Writes what is known of a batch now."""
        write_record(self.folder(record.tenant, record.id) / _RECORD, record)
        if record.is_over:
            self._storage.mark_over(record.id)
            (self.folder(record.tenant, record.id) / INPUT).unlink(missing_ok=True)

    def open_batches(self) -> list[tuple[str, str]]:
        """Returns the ids of batches that are not over, with their tenants."""
        return list(self._storage.open_batches())

    def forget(self, batch_id: str) -> None:
        """Notes that there is no such batch any more."""
        self._storage.mark_over(batch_id)

    def ask_to_cancel(self, record: BatchRecord) -> None:
        """Leaves word for whoever works on the batch that it is to end."""
        write_record(self.folder(record.tenant, record.id) / _CANCELLED, self._clock())

    def cancelled_at(self, record: BatchRecord) -> int | None:
        """Returns when somebody asked for the end of the batch; None if nobody did."""
        return read_record(self.folder(record.tenant, record.id) / _CANCELLED, int)

    def sweep(self, after_s: int) -> None:
        """Removes batches of all tenants that were over for so long."""
        now = self._clock()
        for folder in self._storage.folders("batches"):
            for path in folder.glob(f"*/{_RECORD}"):
                record = read_record(path, BatchRecord)
                if record is not None and record.is_over and max(record.times.values()) + after_s <= now:
                    with suppress(FileNotFoundError):
                        shutil.rmtree(path.parent)
