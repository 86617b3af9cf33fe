"""Runs `octavo serve`: it starts all three kinds of process on this machine, and stops them together."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cli.supervision import Child, SupervisionError, alone_with_children
from octavo.runtime.models.directory import (
    BUNDLED_MODEL,
    BUNDLED_MODELS,
    ModelDirectoryError,
    model_name,
    resolve_model,
)
from octavo.runtime.options.common import (
    API_KEYS,
    DRAFT_MODEL,
    GENERATION_CONFIG,
    LOAD_FORMAT,
    MODEL,
    MODEL_IMPL,
    NUMERICS,
    PINNED_PREFIXES,
    QUANTIZATION,
    REASONING_PARSER,
    TLS_CERTIFICATE,
    TLS_CLIENT_CA,
    TLS_KEY,
    TOOL_CALL_PARSER,
)
from octavo.runtime.options.flags import config_of, fields_of, options_of
from octavo.runtime.options.option import FilePath, OneOf, Option, Real, Whole
from octavo.runtime.telemetry.logs import say
from octavo.runtime.transport.endpoints import AddressTaken, EndpointError, claimed, runtime_directory, unless_off

_log = logging.getLogger(__name__)

_SERVICE = "octavo.v1.GenerationService"
_HTTP = "OCTAVO_HTTP_LISTEN"
_PROBE_INTERVAL_S = 0.1
# Seconds that a process has to end once asked to; a frontend has its drain time before.
_PATIENCE_S = 5.0
# Seconds that children of a killed supervisor have: the kernel ends them at once, but giving memory back takes time.
_ORPHANS_PATIENCE_S = 60.0
# Flags that callers must add where the server asks for them.
_FLAGS_FOR = {
    "OCTAVO_TLS_CERTIFICATE": "--ca-certificate CA",
    "OCTAVO_TLS_CLIENT_CA": "--client-certificate CERTIFICATE --client-key KEY",
    "OCTAVO_API_KEYS": "--api-key KEY",
}


def _found_anywhere(option: Option) -> Option:
    """Returns the option of a file so that each process finds the file, wherever it runs."""
    return replace(option, values=FilePath(absolute=True))


def _left_out(option: Option, default: str) -> Option:
    """Returns the option of another process, whose own default is `default` where it is left out here."""
    return replace(option, help=f"{option.help} Default: {default}.")


@dataclass(frozen=True, kw_only=True)
class _ServeConfig:
    """Holds the settings of the service. One that is None is left to the process that it is about."""

    model: Annotated[str, MODEL] = BUNDLED_MODEL
    load_format: Annotated[str, LOAD_FORMAT] = "auto"
    model_impl: Annotated[str | None, _left_out(MODEL_IMPL, "auto")] = None
    numerics: Annotated[str | None, _left_out(NUMERICS, "default")] = None
    quantization: Annotated[str | None, _left_out(QUANTIZATION, "none")] = None
    draft_model: Annotated[str | None, DRAFT_MODEL] = None
    listen: Annotated[str, Option("--listen", "Public gRPC address of the frontend.")] = "127.0.0.1:50051"
    http_listen: Annotated[str, Option("--http-listen", "Public HTTP address of the frontend; off: no HTTP.")] = (
        "127.0.0.1:8000"
    )
    api_keys: Annotated[Path | None, _found_anywhere(API_KEYS)] = None
    tls_certificate: Annotated[Path | None, _found_anywhere(TLS_CERTIFICATE)] = None
    tls_key: Annotated[Path | None, _found_anywhere(TLS_KEY)] = None
    tls_client_ca: Annotated[Path | None, _found_anywhere(TLS_CLIENT_CA)] = None
    workers: Annotated[int, Option("--workers", "How many workers to start.", Whole(1, 64), variable=None)] = 1
    ready_timeout: Annotated[
        float, Option("--ready-timeout", "Seconds to become ready in.", Real(at_least=1), variable=None)
    ] = 300.0
    drain_timeout: Annotated[
        float,
        Option(
            "--drain-timeout",
            "Seconds that running streams may go on after Ctrl-C or SIGTERM.",
            Real(at_least=0),
        ),
    ] = 30.0
    pinned_prefixes: Annotated[Path | None, _found_anywhere(PINNED_PREFIXES)] = None
    generation_config: Annotated[str | None, _left_out(GENERATION_CONFIG, "auto")] = None
    policy: Annotated[
        str | None,
        Option(
            "--policy",
            "How the scheduler fills a step. Default: the scheduler's own.",
            OneOf(("chunked", "paper")),
        ),
    ] = None
    preemption: Annotated[
        str | None,
        Option(
            "--preemption",
            "What becomes of the KV of a request that must give its blocks up. Default: the scheduler's own.",
            OneOf(("auto", "recompute", "swap", "measured")),
        ),
    ] = None
    tool_call_parser: Annotated[str | None, _left_out(TOOL_CALL_PARSER, "auto")] = None
    reasoning_parser: Annotated[str | None, _left_out(REASONING_PARSER, "auto")] = None


@click.command()
@options_of(_ServeConfig)
def serve(**parsed: Any) -> None:
    """Start frontend, scheduler and workers on this machine and keep them running.

    A process that dies is started again; one that keeps dying ends them all with exit status 1. Every setting of the
    single commands can be given by its environment variable, for example OCTAVO_DTYPE=float32 or OCTAVO_THREADS=2.
    """
    config = config_of(_ServeConfig, parsed)
    try:
        # Its sockets are in the runtime directory: a second service needs another one.
        place = runtime_directory()
        with (
            _claimed(place),
            alone_with_children(place / "serve-children.lock", _ORPHANS_PATIENCE_S) as inherited,
        ):
            model = _locate(config.model, config.load_format)
            draft = _locate(config.draft_model, config.load_format) if config.draft_model else None
            environment = _environment(replace(config, model=model, draft_model=draft)) | inherited
            http_listen = unless_off(config.http_listen)
            asyncio.run(
                _serve(
                    model,
                    config.listen,
                    http_listen,
                    config.workers,
                    config.ready_timeout,
                    config.drain_timeout,
                    environment,
                )
            )
    except (EndpointError, ModelDirectoryError, SupervisionError) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """Claims the directory of all sockets for this service.

    Raises `SupervisionError` if a second service holds the directory, and `EndpointError`.
    """
    with ExitStack() as held:
        try:
            held.enter_context(claimed(f"unix:{directory}/serve"))
        except AddressTaken as error:
            raise SupervisionError(
                f"another process is bound to the sockets in {directory}; stop it, or give this service a directory of"
                " its own by OCTAVO_RUNTIME_DIR, and ports of its own by --listen and --http-listen"
            ) from error
        yield


def _locate(model: str, load_format: str) -> str:
    """Returns the model's directory, or the bundled name: all processes get it, so that the hub is asked once.

    Raises `ModelDirectoryError`.
    """
    return model if model in BUNDLED_MODELS else str(resolve_model(model, load_format))


def _environment(config: _ServeConfig) -> dict[str, str]:
    """Returns the variables of all processes: those of the settings that are given, but for the HTTP address, which the
    frontend gets as a flag."""
    given = {option.envvar: getattr(config, name) for name, (_, option) in fields_of(_ServeConfig).items()}
    # For the page's live view.
    admin = os.environ.get("OCTAVO_ADMIN_ADDRESS") or f"unix:{runtime_directory()}/admin.sock"
    return {
        "OCTAVO_SCHEDULER_ADMIN": os.environ.get("OCTAVO_SCHEDULER_ADMIN") or admin,
        **{name: str(value) for name, value in given.items() if name not in (None, _HTTP) and value is not None},
    }


async def _serve(
    model: str,
    listen: str,
    http_listen: str,
    workers: int,
    ready_timeout: float,
    drain_timeout: float,
    environment: dict[str, str],
) -> None:
    began = time.monotonic()
    await _prepare(model)
    await _check_free(listen)
    _check_bindable(http_listen)
    # Not every probe of the public port has a certificate that it takes.
    probe = f"unix:{runtime_directory()}/frontend-health.sock"
    scheduler = Child("scheduler", ["scheduler"], environment)
    # Flags, for a variable cannot be empty.
    flags = ["--http-listen", http_listen, "--health-address", probe]
    frontend = Child("frontend", ["frontend", *flags], environment)
    crew = [
        Child(f"worker {n}", ["worker"], {**environment, "OCTAVO_WORKER_ID": f"{os.uname().nodename}-{n}"})
        for n in range(workers)
    ]
    children = [scheduler, frontend, *crew]
    stop = _stop_event(children)
    supervised = [asyncio.create_task(child.supervise(), name=child.name) for child in children]
    announced = asyncio.create_task(_announce(probe, _greeting(listen, http_listen, environment), began, ready_timeout))
    try:
        await _until_stopped([*supervised, announced], stop)
    finally:
        announced.cancel()
        # Streams end first, while the scheduler and the workers still run.
        await frontend.stop(drain_timeout + _PATIENCE_S)
        await asyncio.gather(*(worker.stop(_PATIENCE_S) for worker in crew))
        await scheduler.stop(_PATIENCE_S)
        for task in supervised:
            task.cancel()
        await asyncio.gather(announced, *supervised, return_exceptions=True)


async def _prepare(model: str) -> None:
    """Makes the bundled model's directory at the first start."""
    try:
        resolve_model(model)
    except ModelDirectoryError:
        await Child("prepare-model", ["prepare-model", model]).run_once()


async def _check_free(listen: str) -> None:
    """Raises `SupervisionError` if a server answers already where ours is to listen."""
    async with grpc.aio.insecure_channel(_reachable(listen)) as channel:
        if await _status(health_pb2_grpc.HealthStub(channel), "") is not None:
            raise SupervisionError(f"another server answers on {listen}; stop it or choose another --listen address")


def _check_bindable(http_listen: str) -> None:
    """Raises `SupervisionError` if something listens already where HTTP is to be served."""
    host, _, port = http_listen.rpartition(":")
    if http_listen.startswith("unix:") or not port.isdecimal():
        return
    try:
        socket.create_server(
            (host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ).close()
    except (OSError, OverflowError) as error:
        raise SupervisionError(
            f"cannot listen on {http_listen}, choose another --http-listen address: {error}"
        ) from error


def _stop_event(children: Sequence[Child]) -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets. The second kills the children."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            for child in children:
                child.kill()
        else:
            _log.info("stopping on %s; once more to stop at once", number.name)
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


async def _until_stopped(tasks: list["asyncio.Task[None]"], stop: asyncio.Event) -> None:
    """Waits for the stop event. Raises what a task raises."""
    stopped = asyncio.create_task(stop.wait())
    pending: set[asyncio.Task[object]] = {stopped, *tasks}
    while not stop.is_set():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task


async def _announce(probe: str, greeting: str, began: float, timeout: float) -> None:
    """Says when the service answers, and how to call it. Raises `SupervisionError` if it takes too long."""
    async with grpc.aio.insecure_channel(probe) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while await _status(stub, _SERVICE) != health_pb2.HealthCheckResponse.SERVING:
            if time.monotonic() - began > timeout:
                raise SupervisionError(f"not ready within {timeout:.0f} s; the log above says what is missing")
            await asyncio.sleep(_PROBE_INTERVAL_S)
    say(f"\nOctavo is ready after {time.monotonic() - began:.1f} s: {greeting}\nCtrl-C stops it.\n")


def _greeting(listen: str, http_listen: str, environment: Mapping[str, str]) -> str:
    """Says what is served where, and by which commands it is called."""
    address, http = _reachable(listen), _reachable(http_listen)
    scheme = "https" if "OCTAVO_TLS_CERTIFICATE" in environment else "http"
    program = "octavo" if shutil.which("octavo") else os.path.relpath(Path(sys.executable).with_name("octavo"))
    flags = " ".join(flag for variable, flag in _FLAGS_FOR.items() if variable in environment)
    calls = [
        f'{program} generate "The capital of France is" --server {address}',
        f"{program} chat --server {address}",
        f"{program} health {address} --service {_SERVICE}",
    ]
    where = f"{address} (gRPC)"
    if http:
        where += f" and {http if http.startswith('unix:') else f'{scheme}://{http}'} (OpenAI API and page)"
    lines = "".join(f"  {call}\n" for call in calls)
    lines += f"\nEach with {flags}.\n" if flags else ""
    return f"{model_name(resolve_model(environment['OCTAVO_MODEL']))} on {where}. Try:\n\n{lines}"


async def _status(stub: health_pb2_grpc.HealthStub, service: str) -> int | None:
    """Returns the health that the server reports of `service`; None if the server does not answer."""
    try:
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)).status)
    except grpc.aio.AioRpcError:
        return None


def _reachable(listen: str) -> str:
    return listen.replace("0.0.0.0:", "127.0.0.1:")
