"""Chooses the addresses at which the processes meet: default ones in a private directory, or others that are safe to
use."""

import fcntl
import ipaddress
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from urllib.parse import SplitResult, urlsplit

_log = logging.getLogger(__name__)

# sun_path holds 108 bytes; the longest socket name of ours takes about 30.
_MAX_DIRECTORY_LENGTH = 70


class EndpointError(ValueError):
    """Says why an address must not or cannot be used, and what to do instead."""


class AddressTaken(EndpointError):
    """Says that another process is bound to the address."""


def runtime_directory() -> Path:
    """Returns the 0700 directory of this user's sockets, made if missing.

    The directory is `OCTAVO_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/octavo`, else `octavo-<uid>` in the temporary
    directory. Raises `EndpointError` if the directory cannot be made, belongs to somebody else or is open to others.
    """
    directory = _choose_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        what = f"cannot make {directory} for this user's sockets; set OCTAVO_RUNTIME_DIR to another place"
        raise EndpointError(f"{what}: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EndpointError(
            f"{directory} must be a directory of this user with mode 0700, because its sockets carry no password;"
            f" run `chmod 700 {directory}` or set OCTAVO_RUNTIME_DIR to another place"
        )
    if len(os.fsencode(directory)) > _MAX_DIRECTORY_LENGTH:
        raise EndpointError(f"{directory} is too long for a unix socket; set OCTAVO_RUNTIME_DIR to a shorter path")
    return directory


def _choose_directory() -> Path:
    if chosen := os.environ.get("OCTAVO_RUNTIME_DIR"):
        return Path(chosen).absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "octavo"
    return Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"


def default_endpoint(name: str) -> str:
    """Returns the `ipc://` address of the socket called `name` in the runtime directory."""
    return f"ipc://{runtime_directory()}/{name}.sock"


def endpoint_to_connect(endpoint: str) -> str:
    """Returns the ZMQ endpoint of another process; an empty one is none. Raises `EndpointError` for one to bind."""
    if "*" in endpoint:
        raise EndpointError(f"{endpoint} is an endpoint to bind; name the scheduler's host instead of *")
    if endpoint:
        check_endpoint(endpoint, insecure_tcp=False, has_keys=True)
    return endpoint


def unless_off(address: str) -> str:
    """Returns the address, or an empty one for "off", which a variable can say where it cannot be empty."""
    return "" if address == "off" else address


def require_address(address: str, name: str) -> str:
    """Returns the address; `name` is where its user wrote it. Raises `EndpointError` for an empty one, of which gRPC's
    core prints lines of its own."""
    if not address.strip():
        raise EndpointError(f"{name} is empty; write host:port or unix:path")
    return address


@contextmanager
def claimed(address: str) -> Iterator[None]:
    """Holds a unix socket's address (`ipc://path` or `unix:path`) against other processes that would bind it.

    ZMQ and gRPC both take a path over from whoever is bound to it, silently. Other addresses need no such claim.
    Raises `AddressTaken` if another process holds it, `EndpointError` if its directory cannot be written to.
    """
    path = next((address.removeprefix(prefix) for prefix in ("ipc://", "unix:") if address.startswith(prefix)), None)
    if path is None:
        yield
        return
    with _lock(address, path):
        yield


def _lock(address: str, path: str) -> TextIO:
    try:
        lock = Path(f"{path}.lock").open("w")  # noqa: SIM115 (the caller's `with` closes it)
    except OSError as error:
        raise EndpointError(f"cannot make a socket at {address}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise AddressTaken(f"another process is bound to {address}; stop it or choose another address") from error
    return lock


def check_endpoint(endpoint: str, *, insecure_tcp: bool, has_keys: bool) -> None:
    """Refuses an address that would carry unencrypted, unauthenticated messages beyond this machine.

    Raises `EndpointError` unless `endpoint` is ipc://, tcp:// on loopback, or any tcp:// where there are keys or
    `insecure_tcp` is set, which is logged.
    """
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        # A bracket of an IPv6 address is missing.
        parts = urlsplit("")
    if parts.scheme == "ipc" and (parts.netloc or parts.path):
        return
    if parts.scheme != "tcp" or not parts.hostname or not _has_port(parts):
        raise EndpointError(f"{endpoint!r} is no address; use ipc:///path or tcp://host:port")
    if has_keys or is_loopback(parts.hostname):
        return
    if not insecure_tcp:
        raise EndpointError(
            f"{endpoint} leaves this machine in the clear; give --curve-keys DIR, which `octavo keys DIR` makes, or use"
            " ipc://, a loopback address, or --insecure-tcp on a network that only Octavo's processes can reach"
        )
    _log.warning("--insecure-tcp: messages at %s travel unencrypted and unauthenticated", endpoint)


def check_unguarded(address: str, what: str, flag: str, *, allowed: bool) -> None:
    """Refuses to bind `what`, which asks nobody for a key, to an address that other machines reach.

    Raises `EndpointError` unless `address` (`host:port` or `unix:/path`) stays on this machine or is `allowed`, by
    `flag`, which is logged.
    """
    host, colon, _ = address.rpartition(":")
    # What is no address is refused by whoever is to bind it.
    if not colon or address.startswith(("unix:", "unix-abstract:")) or is_loopback(host.strip("[]")):
        return
    if not allowed:
        raise EndpointError(
            f"{what} at {address} would answer whoever reaches this machine, and ask nobody for a key; use a loopback"
            f" address, or {flag} on a network that only those can reach who may"
        )
    _log.warning("%s: %s at %s asks nobody for a key", flag, what, address)


def check_metrics(listen: str, *, insecure: bool) -> None:
    """Calls `check_unguarded` for metrics at `listen` (host:port). Raises `EndpointError`."""
    check_unguarded(listen, "metrics", "--insecure-metrics", allowed=insecure)


def _has_port(parts: SplitResult) -> bool:
    # ZMQ takes a port above 65535 for the one that is left of it modulo 65536.
    try:
        return bool(parts.port)
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Tells whether what is sent to `host`, a name or an address, stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
