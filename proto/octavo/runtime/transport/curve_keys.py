"""Reads and writes the key files of CURVE, which encrypts and authenticates the messages between hosts.

A directory holds `<role>.secret` and `<role>.public` for each kind of process: one line each, the 32 bytes of a key as
40 characters of Z85 (ZeroMQ's RFC 32). All frontends share one pair, and all workers another.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import zmq
from zmq.utils import z85

from octavo.runtime.transport.endpoints import EndpointError

Peer = Literal["frontend", "worker"]
Role = Literal["scheduler", "frontend", "worker"]
ROLES: tuple[Role, ...] = ("scheduler", "frontend", "worker")

_Z85_LENGTH = 40
_OF_OTHERS = 0o077
_OF_STRANGERS = 0o037
_WRITABLE_BY_OTHERS = 0o022


class CurveKeysError(EndpointError):
    """Says that keys are missing, open to others or no keys, and what to do."""


@dataclass(frozen=True)
class ServerKeys:
    """Holds the keys of a ROUTER of the scheduler: its secret, and the public key `admitted`, that of the peers it
    `admits`. Keys are Z85."""

    admits: Peer
    secret: bytes = field(repr=False)
    admitted: bytes


@dataclass(frozen=True)
class ClientKeys:
    """Holds the keys of a peer of the scheduler: its own pair, and the scheduler's public key. Keys are Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    scheduler: bytes


def secret_file(role: Role) -> str:
    """Name of the file of a role's secret key."""
    return f"{role}.secret"


def public_file(role: Role) -> str:
    """Name of the file of a role's public key."""
    return f"{role}.public"


def files_of(role: Role) -> list[str]:
    """Returns the files that a process of this role reads: its own secret, and the public keys of those that it talks
    to."""
    others = [peer for peer in ROLES if peer != role] if role == "scheduler" else ["scheduler"]
    return [secret_file(role), *(f"{other}.public" for other in others)]


def read_server_keys(directory: Path, admits: Peer) -> ServerKeys:
    """Reads the keys of the scheduler's socket for `admits`. Raises `CurveKeysError`."""
    _require_curve()
    return ServerKeys(admits, _read_secret(directory, "scheduler"), _read_public(directory, admits))


def read_client_keys(directory: Path, role: Peer) -> ClientKeys:
    """Reads the keys of a frontend or a worker. Raises `CurveKeysError`."""
    _require_curve()
    secret = _read_secret(directory, role)
    return ClientKeys(zmq.curve_public(secret), secret, _read_public(directory, "scheduler"))


def key_files(directory: Path) -> list[Path]:
    """Returns the key files of all roles that exist in the directory."""
    names = [name(role) for role in ROLES for name in (secret_file, public_file)]
    return [path for path in (directory / name for name in names) if path.exists()]


def write_keys(directory: Path) -> None:
    """Makes a new pair for every role; secrets have mode 0600, and the directory 0700. Replaces what is there.

    Raises `CurveKeysError` if the directory cannot be written to, or is there and open to others.
    """
    _require_curve()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_open(directory)
        for role in ROLES:
            public, secret = zmq.curve_keypair()
            _write(directory / secret_file(role), secret, 0o600)
            _write(directory / public_file(role), public, 0o644)
    except OSError as error:
        raise CurveKeysError(f"cannot write keys to {directory}: {error}") from error


def _refuse_open(directory: Path) -> None:
    found = directory.stat()
    if found.st_uid != os.getuid():
        raise CurveKeysError(f"{directory} belongs to another user, who could replace its keys; name another directory")
    if found.st_mode & _OF_OTHERS:
        raise CurveKeysError(f"{directory} is open to others; run `chmod 700 {directory}` or name another directory")


def _write(path: Path, key: bytes, mode: int) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        # Whatever the umask.
        os.fchmod(file.fileno(), mode)
        file.write(key + b"\n")
    fresh.replace(path)


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise CurveKeysError(
            "this build of libzmq has no CURVE, so there can be no keys; install pyzmq from a wheel, which has it"
        )


def _read_secret(directory: Path, role: Role) -> bytes:
    path = directory / secret_file(role)
    with _opened(path) as file:
        found = os.fstat(file.fileno())
        if remedy := _remedy(found.st_mode, found.st_uid, os.getuid()):
            why = "it is open to others, who may have read it"
            raise CurveKeysError(f"will not use {path}: {why}; run `{remedy} {path}`, or make new keys")
        return _read(file, path)


def _remedy(mode: int, owner: int, reader: int) -> str | None:
    """Returns the command that leaves a secret to its reader alone; None if it is so."""
    if owner == reader:
        return "chmod 600" if mode & _OF_OTHERS else None
    if owner == 0:
        # Kubernetes hands a secret to a process that is not root through its group.
        return "chmod 640" if mode & _OF_STRANGERS else None
    return f"chown {reader}"


def _read_public(directory: Path, role: Role) -> bytes:
    path = directory / public_file(role)
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_mode & _WRITABLE_BY_OTHERS:
            raise CurveKeysError(f"others may write {path}, and so choose who gets in; run `chmod 644 {path}`")
        return _read(file, path)


def _opened(path: Path) -> BinaryIO:
    """Opens one file to look at and to read: a name may lead to another file the next time."""
    try:
        return path.open("rb")
    except OSError as error:
        raise CurveKeysError(
            f"no key at {path}: {error.strerror}; make keys once with `octavo keys DIR` and copy the file from there"
        ) from error


def _read(file: BinaryIO, path: Path) -> bytes:
    try:
        key = file.read().strip()
        if len(key) != _Z85_LENGTH:
            raise ValueError(f"{len(key)} characters instead of {_Z85_LENGTH}")
        z85.decode(key)
    except (OSError, ValueError, LookupError) as error:
        # Never the content: it may be a secret.
        why = error if isinstance(error, OSError) else "its text is no key in Z85"
        raise CurveKeysError(f"cannot use the key in {path}: {why}; copy it again from where it was made") from error
    return key
