"""Serves a process's metrics to Prometheus: its own numbers, and those that every process has."""

import logging
import resource
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from socket import AF_INET6
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from octavo.runtime.telemetry import optional
from octavo.runtime.telemetry.numbers import gauge

# A scraper that takes longer to say what it wants, or to read, is let go.
_PATIENCE_S: Final = 5.0
# How long the end of the process may wait for that of its server.
_POLL_S: Final = 0.1
_KIB: Final = 1024

_log = logging.getLogger(__name__)

_exposed = CollectorRegistry()


class MetricsError(RuntimeError):
    """Says in one line why metrics cannot be served where they were to be."""


class _Process(Collector):
    """Collects the metrics that every process has, whatever it does."""

    def __init__(self, kind: str) -> None:
        self._labels = {"process": kind, "version": version("octavo")}

    def collect(self) -> Iterator[Metric]:
        yield gauge("octavo_build_info", "Always 1; the labels say what runs.", 1, self._labels)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Linux counts in KiB, others in bytes.
        peak *= _KIB if sys.platform.startswith("linux") else 1
        yield gauge("octavo_peak_memory_bytes", "The most memory that the process has had resident.", peak)
        yield optional.family()


class _Some(Collector):
    """Collects those of the process's metrics that have one of `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def describe(self) -> Iterable[Metric]:
        """Says nothing, or the metrics would be collected to be described."""
        return ()

    def collect(self) -> Iterator[Metric]:
        return (family for family in _exposed.collect() if family.name in self._names)


def expose(kind: str, *collectors: Collector) -> None:
    """Exposes the metrics of the `collectors` for this process, a `kind` (frontend, scheduler or worker), in place of
    any before."""
    global _exposed
    registry = CollectorRegistry()
    registry.register(_Process(kind))
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    _exposed = registry


def render(only: Collection[str] | None = None) -> tuple[bytes, str]:
    """Returns the metrics of this process as text, all or `only` those with these names, and the content type of the
    text.

    The collectors read their numbers in the calling thread: call this in the thread that writes the numbers, unless the
    collectors allow others.
    """
    shown = _exposed
    if only is not None:
        shown = CollectorRegistry()
        shown.register(_Some(only))
    return generate_latest(shown), CONTENT_TYPE_PLAIN_0_0_4


@contextmanager
def serve(listen: str) -> Iterator[int]:
    """Serves GET /metrics over HTTP at `listen` (host:port) inside the block, on threads of its own; yields the port.

    Raises `MetricsError` if it cannot.
    """
    server = _bound(*_split(listen), listen)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
    thread.start()
    _log.info("metrics at http://%s:%d/metrics", *server.server_address[:2])
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # One that still reads does not hold the process up when it ends.
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs an error like all else, and not to stderr as the library does. A scraper that leaves early is no
        news."""
        if not isinstance(sys.exception(), OSError) and optional.is_first_failure(optional.METRICS):
            _log.exception("metrics could not be told")


class _ServerOverIPv6(_Server):
    address_family = AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    server_version, sys_version = "octavo", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "metrics are at /metrics")
            return
        body, content_type = render()
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        optional.worked(optional.METRICS)

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing: a scrape is no news."""


def _split(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise MetricsError(f"{listen!r} is no address for metrics; use host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bound(host: str, port: int, listen: str) -> _Server:
    kind = _ServerOverIPv6 if ":" in host else _Server
    try:
        return kind((host, port), _Handler)
    except OSError as error:
        raise MetricsError(f"cannot serve metrics at {listen}: {error}; choose another --metrics-listen") from error
