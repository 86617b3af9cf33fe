"""`octavo scheduler`: reads the flags, binds the sockets, runs the shell until a signal."""

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import click
import uvloop
import zmq

from octavo.runtime.options.common import INSECURE_METRICS, INSECURE_TCP, METRICS_LISTEN, OTLP_ENDPOINT
from octavo.runtime.options.flags import config_of, options_of
from octavo.runtime.options.option import DirectoryPath, FilePath, Option
from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.runtime.process.huge_pages import use_huge_pages
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
from octavo.runtime.transport.wakeup import Wakeup
from octavo.scheduler.cli.admin_client import default_admin_address
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.server.admin_messages import write_load
from octavo.scheduler.server.admin_service import start_admin_server
from octavo.scheduler.server.event_log import EventLogError, LogWriter, Recorder, StepFeed, read_records, recorder
from octavo.scheduler.server.event_log import replay as replay_log
from octavo.scheduler.server.health import HealthLoop, HealthServicer
from octavo.scheduler.server.kv_events import KVEventsConfig, kv_events
from octavo.scheduler.server.loop import SchedulerShell
from octavo.scheduler.server.metrics import RequestSpans, SchedulerMetrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Places:
    """Says where the scheduler listens; without a directory of keys it asks nobody for one."""

    frontend_endpoint: Annotated[
        str,
        Option(
            "--frontend-endpoint",
            "Where frontends connect.",
            default=partial(default_endpoint, "frontends"),
            shown_default="ipc in the runtime directory",
        ),
    ]
    worker_endpoint: Annotated[
        str,
        Option(
            "--worker-endpoint",
            "Where workers connect.",
            default=partial(default_endpoint, "workers"),
            shown_default="ipc in the runtime directory",
        ),
    ]
    admin_address: Annotated[
        str,
        Option(
            "--admin-address",
            "gRPC address of health and the Admin service; never public.",
            default=default_admin_address,
            shown_default="unix socket in the runtime directory",
        ),
    ]
    insecure_admin: Annotated[
        bool,
        Option("--insecure-admin", "Allow an --admin-address beyond this machine: it asks nobody for a key."),
    ]
    curve_keys: Annotated[
        Path | None,
        Option(
            "--curve-keys",
            "Directory with scheduler.secret, frontend.public and worker.public, from `octavo keys`: messages are"
            " encrypted, and nobody without keys gets in.",
            DirectoryPath(),
        ),
    ]
    insecure_tcp: Annotated[bool, INSECURE_TCP]

    def keys_for(self, peer: Peer) -> ServerKeys | None:
        return None if self.curve_keys is None else read_server_keys(self.curve_keys, peer)


@dataclass(frozen=True)
class _Records:
    """Says what the scheduler records of itself: a log if there is a file for it, metrics and traces if there is an
    address for them."""

    event_log: Annotated[
        Path | None,
        Option(
            "--event-log",
            "Write every event and plan to this file, for `octavo replay`; where it exists, to one beside it. It will"
            " hold prompts as token ids.",
            FilePath(exists=False),
        ),
    ]
    metrics_listen: Annotated[str, METRICS_LISTEN] = ""
    insecure_metrics: Annotated[bool, INSECURE_METRICS] = False
    otlp_endpoint: Annotated[str, OTLP_ENDPOINT] = ""


@click.command()
@options_of(_Places)
@options_of(SchedulerConfig)
@options_of(KVEventsConfig)
@options_of(_Records)
def scheduler(**parsed: Any) -> None:
    """Run the scheduler: it owns the queues and the block manager, and needs no GPU and no torch."""
    config = config_of(SchedulerConfig, parsed)
    places, records = config_of(_Places, parsed), config_of(_Records, parsed)
    events = config_of(KVEventsConfig, parsed)
    collect_seldom()
    with tracing.exported(records.otlp_endpoint, "octavo-scheduler"):
        # A process that wakes for each message pays a tenth less than in the loop of the standard library.
        uvloop.run(_serve(config, places, events, records))


async def _serve(config: SchedulerConfig, places: _Places, events: KVEventsConfig, records: _Records) -> None:
    spans = RequestSpans(time.monotonic)
    metrics = SchedulerMetrics(time.monotonic, spans)
    feed, servicer = StepFeed(), HealthServicer()
    with ExitStack() as held:
        with _start_errors():
            departure = held.enter_context(closing(Wakeup()))
            frontends, workers = _bind(places, records, held, departure.ring)
            published = held.enter_context(kv_events(events))
            core = Scheduler(config, secrets.randbits(64), metrics, partial(paged_memory, census=published.census))
            record = _record(records, feed, core, held)
            shell = SchedulerShell(
                core,
                frontends,
                workers,
                record,
                begin_span=spans.begin,
                departure=departure,
                after_turn=published.stream.publish if published.stream else None,
            )
            if records.metrics_listen:
                expose("scheduler", *filter(None, (metrics, published.stream)))
                held.enter_context(serve(records.metrics_listen))
            server = await start_admin_server(shell, feed, places.admin_address, servicer)
        # Before it says that it serves: a signal that comes then ends it in order.
        use_huge_pages()
        _log.info(
            "epoch %016x: frontends at %s, workers at %s", core.epoch, places.frontend_endpoint, places.worker_endpoint
        )

        def publish() -> None:
            metrics.publish(write_load(core, shell.dropped_messages))

        health_loop = HealthLoop(core, shell.now, servicer, publish if records.metrics_listen else None)
        replays = [published.replays.run()] if published.replays else []
        await _until_signal(shell.run(), health_loop.follow(), *replays)
        await server.stop(grace=1.0)


def _bind(
    places: _Places, records: _Records, held: ExitStack, on_departure: Callable[[], None]
) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """Binds the sockets of frontends and of workers; `on_departure` is called when a connection of the latter ends."""
    for endpoint in (places.frontend_endpoint, places.worker_endpoint):
        check_endpoint(endpoint, insecure_tcp=places.insecure_tcp, has_keys=places.curve_keys is not None)
    check_unguarded(places.admin_address, "the Admin service", "--insecure-admin", allowed=places.insecure_admin)
    if records.metrics_listen:
        check_metrics(records.metrics_listen, insecure=records.insecure_metrics)
    for address in (places.frontend_endpoint, places.worker_endpoint, places.admin_address):
        held.enter_context(claimed(address))
    context = held.enter_context(zmq.Context())
    frontends = held.enter_context(bind_router(context, places.frontend_endpoint, places.keys_for("frontend")))
    workers = bind_router(context, places.worker_endpoint, places.keys_for("worker"), on_departure)
    return frontends, held.enter_context(workers)


def _record(records: _Records, feed: StepFeed, core: Scheduler, held: ExitStack) -> Recorder:
    if records.event_log is None:
        return recorder(feed.append)
    return recorder(feed.append, held.enter_context(LogWriter(records.event_log, core.epoch)).write)


@contextmanager
def _start_errors() -> Iterator[None]:
    """Reports on one line what keeps the scheduler from starting. Later errors are faults and keep their traceback."""
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
