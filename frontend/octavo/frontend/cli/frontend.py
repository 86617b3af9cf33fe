"""Implements `octavo frontend`: reads the flags, and runs the server until a signal."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import click
import uvloop

from octavo.frontend.access.access import ApiKeysError
from octavo.frontend.access.connections import allow_open_files
from octavo.frontend.access.tls import TlsError
from octavo.frontend.batch.storage import StorageError
from octavo.frontend.config import FrontendConfig
from octavo.frontend.scheduler.pinned_prefixes import PinnedPrefixesError
from octavo.frontend.stored.database import StoreError
from octavo.runtime.models.directory import ModelDirectoryError, model_name, resolve_model
from octavo.runtime.options.flags import config_of, options_of
from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.runtime.process.huge_pages import use_huge_pages
from octavo.runtime.telemetry import tracing
from octavo.runtime.transport.curve_keys import read_client_keys
from octavo.runtime.transport.endpoints import EndpointError, check_endpoint, claimed, unless_off
from octavo.runtime.transport.sockets import check_library

_log = logging.getLogger(__name__)
# Thresholds of the garbage collector. With two thousand requests held, a full collection stops the event loop for a
# tenth of a second, and by Python's default a burst brings several. Young objects are looked at often, few at a time.
GC_YOUNG, GC_OLDER = 2_000, 50


@click.command()
@options_of(FrontendConfig)
def frontend(**parsed: Any) -> None:
    """Run one frontend: it serves gRPC and HTTP, tokenizes, keeps the journal of running requests. Needs no torch."""
    try:
        check_library()
        config = _configure(parsed)
    except (EndpointError, ModelDirectoryError) as error:
        raise click.UsageError(str(error)) from error
    _run(config)


def _configure(parsed: Mapping[str, Any]) -> FrontendConfig:
    """Makes the configuration of what was parsed. Raises `EndpointError` and `ModelDirectoryError`."""
    keys = parsed["curve_keys"]
    _check_endpoints(parsed["scheduler_endpoints"], insecure_tcp=parsed["insecure_tcp"], has_keys=keys is not None)
    if parsed["scheduler_kv_events"]:
        _check_kv_events(len(parsed["scheduler_endpoints"]), has_api_keys=parsed["api_keys"] is not None)
    directory = resolve_model(parsed["model_directory"], parsed["load_format"])
    return config_of(
        FrontendConfig,
        parsed,
        model_directory=directory,
        served_model_name=parsed["served_model_name"] or model_name(directory),
        curve_keys=None if keys is None else read_client_keys(keys, "frontend"),
        http_listen=unless_off(parsed["http_listen"]),
        health_address=parsed["health_address"] or "",
        scheduler_admin=parsed["scheduler_admin"] or "",
    )


def _check_endpoints(endpoints: tuple[str, ...], *, insecure_tcp: bool, has_keys: bool) -> None:
    """Raises `EndpointError` for an endpoint that must not be used, or is named twice."""
    for endpoint in endpoints:
        check_endpoint(endpoint, insecure_tcp=insecure_tcp, has_keys=has_keys)
        if endpoints.count(endpoint) > 1:
            raise EndpointError(f"the scheduler at {endpoint} is named twice; name each once")


def _check_kv_events(num_schedulers: int, *, has_api_keys: bool) -> None:
    """Raises `EndpointError` where KV events must not, or cannot, be passed on."""
    if has_api_keys:
        raise EndpointError(
            "--scheduler-kv-events would show the holder of every key what all others ask; give gateways that want KV"
            " events a frontend of their own, without --api-keys"
        )
    if num_schedulers > 1:
        raise EndpointError(
            "--scheduler-kv-events tells what one scheduler's workers hold, and there are several; give gateways a"
            " frontend for each"
        )


def _run(config: FrontendConfig) -> None:
    allow_open_files(config.max_connections)
    # Should transformers be needed all the same (for a configuration that leaves out what its family implies), it
    # imports torch wherever that is installed, which costs seconds and memory for nothing.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Texts are tokenized one by one, so the library's own pool of a thread per core would be idle.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tracing.exported(config.otlp_endpoint, "octavo-frontend"):
        # A token costs a tenth less over gRPC than in the loop of the standard library.
        uvloop.run(_serve(config))


async def _serve(config: FrontendConfig) -> None:
    from octavo.frontend.scheduler.client import SchedulerRefused
    from octavo.frontend.server import FrontendServer
    from octavo.frontend.text.tokenizer import ModelTokenizer
    from octavo.frontend.text.tokenizer_files import read_tokenizer_files_apart

    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with ExitStack() as held:
        with _start_errors():
            for address in (config.listen, config.http_listen, config.health_address):
                held.enter_context(claimed(address))
            tokenizer = ModelTokenizer(read_tokenizer_files_apart(config.model_directory))
            server = FrontendServer(config, tokenizer)
        collect_seldom(GC_YOUNG, GC_OLDER)
        use_huge_pages()
        try:
            await server.serve(stopping)
        except SchedulerRefused as error:
            raise click.ClickException(f"the frontend cannot go on: {error}") from error


@contextmanager
def _start_errors() -> Iterator[None]:
    """Turns errors that keep the frontend from starting into one line. Later errors keep their traceback."""
    try:
        yield
    except EndpointError as error:
        raise click.ClickException(f"the frontend cannot start: {error}") from error
    except (ModelDirectoryError, PinnedPrefixesError, ApiKeysError, TlsError, StorageError, StoreError) as error:
        raise click.UsageError(str(error)) from error
