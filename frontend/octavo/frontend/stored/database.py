"""Opens the SQLite file that holds responses and conversations, and tells which of the frontends that share it live.

A directory is one store, of all frontends of one machine. Each of them holds a lock there while it lives, which the
system takes from a process however that ends.
"""

import contextlib
import fcntl
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FILE: Final = "responses.sqlite"
# What a file says it is, by SQLite's own fields for that: "Octv".
_APPLICATION: Final = 0x4F637476
VERSION: Final = 1
# Seconds that a writer waits for the one before.
_BUSY_S: Final = 10.0
# `owner` is the frontend that computes a response, null once it has ended. Keys are never used again, so what goes on
# from a record has a larger key than that, and none can follow from itself. `previous` may name one that is gone.
_SCHEMA: Final = """
CREATE TABLE tenants (name TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    kind TEXT NOT NULL,
    used_at REAL NOT NULL,
    owner TEXT,
    is_background INTEGER NOT NULL,
    is_cancelled INTEGER NOT NULL DEFAULT 0,
    previous INTEGER,
    conversation INTEGER,
    num_events INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL,
    num_bytes INTEGER NOT NULL,
    UNIQUE (tenant, id)
);
CREATE INDEX records_by_use ON records (used_at);
CREATE INDEX records_of_tenants_by_use ON records (tenant, used_at);
CREATE INDEX records_by_owner ON records (owner) WHERE owner IS NOT NULL;
CREATE TABLE items (
    record INTEGER NOT NULL REFERENCES records ON DELETE CASCADE,
    place INTEGER NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (record, place),
    UNIQUE (id, record)
);
CREATE TABLE events (
    record INTEGER NOT NULL REFERENCES records ON DELETE CASCADE,
    first INTEGER NOT NULL,
    count INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (record, first)
);
CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
    INSERT INTO tenants VALUES (new.tenant, new.num_bytes)
        ON CONFLICT DO UPDATE SET num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER record_grown AFTER UPDATE OF num_bytes ON records BEGIN
    UPDATE tenants SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE name = new.tenant;
END;
CREATE TRIGGER record_removed AFTER DELETE ON records BEGIN
    UPDATE tenants SET num_bytes = num_bytes - old.num_bytes WHERE name = old.tenant;
    DELETE FROM tenants WHERE name = old.tenant AND num_bytes = 0;
END;
"""


class StoreError(Exception):
    """Says why a directory cannot hold responses, and what to do."""


def connect(directory: Path) -> sqlite3.Connection:
    """Opens the store in `directory`, which is made if it is not there, for one thread at a time. Raises
    `StoreError`."""
    _prepare(directory)
    path = directory / _FILE
    try:
        # SQLite makes its further files as readable as this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from error
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # The end of a process loses nothing then; that of the machine may lose the last commits, but nothing else.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        # What a client has deleted does not lie on in the file.
        connection.execute("PRAGMA secure_delete = ON")
        with transaction(connection):
            _make_schema(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(path, error) from error
    except StoreError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Makes one change of all changes in the block, or none of them where it raises. Raises `sqlite3.Error`."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A disk that is full has ended the transaction already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def part(connection: sqlite3.Connection) -> Iterator[None]:
    """Makes all changes in the block, which is inside of a transaction, or none of them where it raises."""
    connection.execute("SAVEPOINT part")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK TO part")
            connection.execute("RELEASE part")
        raise
    connection.execute("RELEASE part")


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise _unusable(directory, error) from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreError(
            f"{directory} must be a directory of this user with mode {0o700:o}, not {stat.S_IMODE(found.st_mode):o}:"
            f" it holds what clients have said; run `chmod 700 {directory}`, or name a directory inside it"
        )


def _make_schema(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if (application, version) == (_APPLICATION, VERSION):
        return
    if application == _APPLICATION:
        raise StoreError(
            f"{path} has version {version} of the store, and this is a frontend of version {VERSION}; name another"
            " directory"
        )
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        raise StoreError(f"{path} is a database of something else; name another directory")
    for statement in _statements(_SCHEMA):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _statements(script: str) -> Iterator[str]:
    """Yields the statements of a script; `executescript` would commit before it begins."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _unusable(path: Path, error: Exception) -> StoreError:
    return StoreError(f"cannot keep responses in {path}: {error}; name another place")


class Owner:
    """Stands for this frontend among those that share a store, by the name `name`, until it is closed."""

    def __init__(self, directory: Path) -> None:
        """Raises `StoreError` where nothing can be written."""
        self._directory = directory
        self.name = secrets.token_hex(8)
        try:
            for left in directory.glob("frontend-*.lock"):
                self._is_locked(left)
            self._lock = self._locked()
        except OSError as error:
            raise _unusable(directory, error) from error

    def lives(self, name: str) -> bool:
        """Tells whether the frontend of that name still runs. Raises `OSError`."""
        return name == self.name or self._is_locked(self._path(name))

    def _is_locked(self, path: Path) -> bool:
        """Tells whether a frontend holds that lock; removes it where none does."""
        try:
            found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            path.unlink(missing_ok=True)
            return False
        finally:
            os.close(found)

    def _locked(self) -> int:
        while True:
            made = os.open(self._path(self.name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(made, fcntl.LOCK_EX)
            # Another frontend that starts may have taken it for one that was left, and removed it.
            if os.fstat(made).st_nlink:
                return made
            os.close(made)

    def close(self) -> None:
        """Leaves the store."""
        self._path(self.name).unlink(missing_ok=True)
        os.close(self._lock)

    def _path(self, name: str) -> Path:
        return self._directory / f"frontend-{name}.lock"
