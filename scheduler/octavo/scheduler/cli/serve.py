"""`octavo scheduler`: reads the flags, binds the sockets, runs the shell until a signal."""

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
import zmq

from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.runtime.telemetry import tracing
from octavo.runtime.telemetry.metrics import expose, serve
from octavo.runtime.transport.curve_keys import Peer, ServerKeys, read_server_keys
from octavo.runtime.transport.endpoints import (
    EndpointError,
    check_endpoint,
    check_metrics,
    check_unguarded,
    claimed,
    default_endpoint,
)
from octavo.runtime.transport.sockets import bind_router
from octavo.scheduler.cli.admin_client import default_admin_address
from octavo.scheduler.cli.flags import config_flags, read_config
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.admin_service import HealthServicer, start_admin_server
from octavo.scheduler.server.event_log import EventLogError, LogWriter, Recorder, StepFeed, read_records, recorder
from octavo.scheduler.server.event_log import replay as replay_log
from octavo.scheduler.server.health import HealthLoop
from octavo.scheduler.server.loop import SchedulerShell
from octavo.scheduler.server.metrics import RequestSpans, SchedulerMetrics
from octavo.scheduler.server.poller import Wakeup

_log = logging.getLogger(__name__)


def _in_runtime_directory(name: str) -> str:
    """The default endpoint of this name. Raises `click.UsageError` if there is no place for it."""
    try:
        return default_endpoint(name)
    except EndpointError as error:
        raise click.UsageError(str(error)) from error


@click.command()
@click.option(
    "--frontend-endpoint",
    envvar="OCTAVO_FRONTEND_ENDPOINT",
    default=lambda: _in_runtime_directory("frontends"),
    show_default="ipc in the runtime directory",
    help="Where frontends connect.",
)
@click.option(
    "--worker-endpoint",
    envvar="OCTAVO_WORKER_ENDPOINT",
    default=lambda: _in_runtime_directory("workers"),
    show_default="ipc in the runtime directory",
    help="Where workers connect.",
)
@click.option(
    "--admin-address",
    envvar="OCTAVO_ADMIN_ADDRESS",
    default=default_admin_address,
    show_default="unix socket in the runtime directory",
    help="gRPC address of health and the Admin service; never public.",
)
@click.option(
    "--insecure-admin",
    envvar="OCTAVO_INSECURE_ADMIN",
    is_flag=True,
    help="Allow an --admin-address beyond this machine: it asks nobody for a key.",
)
@click.option(
    "--curve-keys",
    envvar="OCTAVO_CURVE_KEYS",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with scheduler.secret, frontend.public and worker.public, from `octavo keys`: messages are"
    " encrypted, and nobody without keys gets in.",
)
@click.option(
    "--insecure-tcp",
    envvar="OCTAVO_INSECURE_TCP",
    is_flag=True,
    help="Allow tcp:// endpoints beyond loopback: unencrypted, for networks that only Octavo's processes can reach.",
)
@config_flags
@click.option(
    "--event-log",
    envvar="OCTAVO_EVENT_LOG",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every event and plan to this file, for `octavo replay`; where it exists, to one beside it. It will hold"
    " prompts as token ids.",
)
@click.option(
    "--metrics-listen",
    envvar="OCTAVO_METRICS_LISTEN",
    default="",
    help="Where to serve Prometheus metrics, as host:port; never public. Default: nowhere.",
)
@click.option(
    "--insecure-metrics",
    envvar="OCTAVO_INSECURE_METRICS",
    is_flag=True,
    help="Allow a --metrics-listen beyond this machine: it asks nobody for a key.",
)
@click.option(
    "--otlp-endpoint",
    envvar="OCTAVO_OTLP_ENDPOINT",
    default="",
    help="OTLP collector (gRPC) to send traces to, as http://host:port. Default: no traces.",
)
def scheduler(
    frontend_endpoint: str,
    worker_endpoint: str,
    admin_address: str,
    insecure_admin: bool,
    curve_keys: Path | None,
    insecure_tcp: bool,
    event_log: Path | None,
    metrics_listen: str,
    insecure_metrics: bool,
    otlp_endpoint: str,
    **settings: Any,
) -> None:
    """Run the scheduler: it owns the queues and the block manager, and needs no GPU and no torch."""
    config = read_config(settings)
    collect_seldom()
    places = _Places(
        frontends=frontend_endpoint,
        workers=worker_endpoint,
        admin=admin_address,
        insecure_admin=insecure_admin,
        keys=curve_keys,
        insecure_tcp=insecure_tcp,
        event_log=event_log,
        metrics=metrics_listen,
        insecure_metrics=insecure_metrics,
    )
    with tracing.exported(otlp_endpoint, "octavo-scheduler"):
        asyncio.run(_serve(config, places))


@dataclass(frozen=True)
class _Places:
    """Where the scheduler listens, and writes its log if there is one; no metrics without an address, no
    keys without their directory."""

    frontends: str
    workers: str
    admin: str
    insecure_admin: bool
    keys: Path | None
    insecure_tcp: bool
    event_log: Path | None
    metrics: str
    insecure_metrics: bool

    def keys_for(self, peer: Peer) -> ServerKeys | None:
        return None if self.keys is None else read_server_keys(self.keys, peer)


async def _serve(config: SchedulerConfig, places: _Places) -> None:
    spans = RequestSpans(time.monotonic)
    metrics = SchedulerMetrics(time.monotonic, spans)
    core, feed, servicer = Scheduler(config, secrets.randbits(64), metrics), StepFeed(), HealthServicer()
    with ExitStack() as held:
        with _start_errors():
            departure = held.enter_context(closing(Wakeup()))
            frontends, workers = _bind(places, held, departure.ring)
            record = _record(places, feed, core, held)
            shell = SchedulerShell(core, frontends, workers, record, begin_span=spans.begin, departure=departure)
            if places.metrics:
                expose("scheduler", metrics)
                held.enter_context(serve(places.metrics))
            server = await start_admin_server(shell, feed, places.admin, servicer)
        _log.info("epoch %016x: frontends at %s, workers at %s", core.epoch, places.frontends, places.workers)
        health_loop = HealthLoop(shell, servicer, metrics.publish if places.metrics else None)
        await _until_signal(shell.run(), health_loop.follow())
        await server.stop(grace=1.0)


def _bind(
    places: _Places, held: ExitStack, on_departure: Callable[[], None]
) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """The sockets of frontends and of workers; `on_departure` is called when a connection of the latter ends."""
    for endpoint in (places.frontends, places.workers):
        check_endpoint(endpoint, insecure_tcp=places.insecure_tcp, has_keys=places.keys is not None)
    check_unguarded(places.admin, "the Admin service", "--insecure-admin", allowed=places.insecure_admin)
    if places.metrics:
        check_metrics(places.metrics, insecure=places.insecure_metrics)
    for address in (places.frontends, places.workers, places.admin):
        held.enter_context(claimed(address))
    context = held.enter_context(zmq.Context())
    frontends = held.enter_context(bind_router(context, places.frontends, places.keys_for("frontend")))
    workers = bind_router(context, places.workers, places.keys_for("worker"), on_departure)
    return frontends, held.enter_context(workers)


def _record(places: _Places, feed: StepFeed, core: Scheduler, held: ExitStack) -> Recorder:
    if places.event_log is None:
        return recorder(feed.append)
    return recorder(feed.append, held.enter_context(LogWriter(places.event_log, core.epoch)).write)


@contextmanager
def _start_errors() -> Iterator[None]:
    """One line for what keeps the scheduler from starting. Later errors are faults and keep their traceback."""
    try:
        yield
    except (EndpointError, zmq.ZMQError, OSError, RuntimeError) as error:
        raise click.ClickException(f"the scheduler cannot start: {error}") from error


async def _until_signal(*serving: Coroutine[None, None, None]) -> None:
    running = asyncio.gather(*serving)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        _log.info("stopping")


@click.command()
@click.argument("file", type=click.File("rb"))
def replay(file: BinaryIO) -> None:
    """Feed a scheduler's event log to a fresh core and see that it plans the same.

    Exit status 0 if every plan is equal, 1 with the first that differs otherwise.
    """
    try:
        result = replay_log(read_records(file))
    except EventLogError as error:
        raise click.ClickException(f"{file.name}: {error}") from error
    if result.difference:
        recorded, made = result.difference
        what = f"plan {result.plans + 1}, after {result.events} events, differs"
        raise click.ClickException(f"{what}\n  recorded: {recorded}\n  now:      {made}")
    click.echo(f"{result.events} events, {result.plans} plans: all equal")
