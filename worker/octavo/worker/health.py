"""The worker's health: the state that its main loop shows to other threads, and the gRPC health service that reports
it."""

import contextlib
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from octavo.runtime.transport.endpoints import EndpointError

# A turn outside a step takes milliseconds; a loop that has not turned for this long hangs.
DEADLINE_S = 10.0
# Three times what a scheduler allows a step of a new shape, which may compile. By then the scheduler has given the
# worker up; this tells a supervisor to restart the process.
STEP_DEADLINE_S = 180.0


READY_SERVICE = "octavo.Worker"
_REFRESH_S = 0.05
_MAX_CONCURRENT_RPCS = 64
# sun_path holds 108 bytes with its terminator.
_MAX_SOCKET_PATH = 107
# Two workers on one address must not share its probes between them.
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1 << 16))


class Liveness:
    """Holds what the main loop reports about itself: the loop alone writes it, any thread reads it.

    Loading a model has no deadline.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_at: float | None = None
        self._owing_since: float | None = None
        self.welcomed = False
        self.draining = False

    def turn(self, *, idle: bool = True) -> None:
        """Notes that the loop is between two pieces of work and must turn again within `DEADLINE_S`; `idle` tells that
        no step is under way."""
        self._turned_at = self._clock()
        if idle:
            self._owing_since = None

    def work(self) -> None:
        """Notes that the loop begins work of unknown length, which has no deadline of its own."""
        self._turned_at = None

    def owe(self) -> None:
        """Notes that a step is launched: the oldest step under way must be done within `STEP_DEADLINE_S`."""
        if self._owing_since is None:
            self._owing_since = self._clock()

    def done(self) -> None:
        """Notes that a step is done: the deadline of the next step under way counts from now."""
        self._owing_since = self._clock()

    @property
    def alive(self) -> bool:
        now = self._clock()
        return _is_within(self._turned_at, DEADLINE_S, now) and _is_within(self._owing_since, STEP_DEADLINE_S, now)

    @property
    def ready(self) -> bool:
        """Tells whether the worker is alive, welcomed by a scheduler, and not draining."""
        return self.alive and self.welcomed and not self.draining


def _is_within(since: float | None, deadline_s: float, now: float) -> bool:
    return since is None or now - since <= deadline_s


@contextlib.contextmanager
def health_server(address: str, liveness: Liveness) -> Iterator[None]:
    """Serves grpc.health.v1 at `address` (`host:port` or `unix:/path`) inside the block.

    The service "" is SERVING while the main loop turns. `READY_SERVICE` is SERVING while, besides, a scheduler has
    welcomed the worker and the worker is not draining.

    Raises `octavo.runtime.transport.endpoints.EndpointError` if `address` cannot be bound.
    """
    socket_path = _unix_path(address)
    if socket_path is not None:
        _make_room(socket_path)
    servicer = HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2), options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CONCURRENT_RPCS)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise EndpointError(f"cannot serve health at {address}: {error}; give another --health-address") from error
    server.start()
    try:
        with _mirrored(liveness, servicer):
            yield
    finally:
        server.stop(grace=None).wait()
        if socket_path is not None:
            socket_path.unlink(missing_ok=True)


@contextlib.contextmanager
def _mirrored(liveness: Liveness, servicer: HealthServicer) -> Iterator[None]:
    """Keeps `servicer` equal to `liveness` from a separate thread, which a hung main loop cannot stop."""
    stopped = threading.Event()
    thread = threading.Thread(target=_mirror, args=(liveness, servicer, stopped), name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _mirror(liveness: Liveness, servicer: HealthServicer, stopped: threading.Event) -> None:
    said: dict[str, bool] = {}
    while True:
        for service, serving in (("", liveness.alive), (READY_SERVICE, liveness.ready)):
            if said.get(service) != serving:
                said[service] = serving
                servicer.set(service, _status(serving))
        if stopped.wait(_REFRESH_S):
            return


def _status(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    response = health_pb2.HealthCheckResponse
    return response.SERVING if serving else response.NOT_SERVING


def _unix_path(address: str) -> Path | None:
    scheme, _, path = address.partition(":")
    if scheme != "unix":
        return None
    return Path(path.removeprefix("//") if path.startswith("///") else path).absolute()


def _make_room(path: Path) -> None:
    """Makes the socket's directory, private if it is new, and removes the socket that a dead process left at `path`."""
    if len(str(path).encode()) > _MAX_SOCKET_PATH:
        raise EndpointError(f"{path} is too long for a unix socket; give a shorter --health-address or --worker-id")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_mode & 0o022:
            raise EndpointError(f"{path.parent} is writable by others; keep sockets in a directory of your own")
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise EndpointError(f"{path} is not a socket; move it away or give another --health-address")
        if _answers(path):
            raise EndpointError(f"another process serves health at {path}; give another --health-address")
        path.unlink()
    except OSError as error:
        raise EndpointError(f"cannot make a socket at {path}: {error}; give another --health-address") from error


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
