"""`octavo frontend`: reads the flags and runs the server until a signal."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from octavo.frontend.config import GENERATION_CONFIGS, FrontendConfig
from octavo.frontend.pinned_prefixes import PinnedPrefixesError
from octavo.wire.endpoints import EndpointError, check_endpoint, claimed, default_endpoint
from octavo.wire.model_directory import BUNDLED_MODEL, LOAD_FORMATS, ModelDirectoryError, model_name, resolve_model

_log = logging.getLogger(__name__)
_SECONDS = click.FloatRange(min=0)


@click.command()
@click.option(
    "--model",
    envvar="OCTAVO_MODEL",
    default=BUNDLED_MODEL,
    help="Model directory, the bundled model's name, or a model of the Hugging Face hub as org/name[@revision]. The"
    " workers must be given the same one.",
)
@click.option(
    "--load-format",
    envvar="OCTAVO_LOAD_FORMAT",
    type=click.Choice(LOAD_FORMATS),
    default="auto",
    help="Where the workers' weights come from; they must be given the same.",
)
@click.option(
    "--generation-config",
    envvar="OCTAVO_GENERATION_CONFIG",
    type=click.Choice(GENERATION_CONFIGS),
    default="auto",
    help="What stands in for sampling parameters that a request leaves out: the model's generation_config.json (auto),"
    " or neutral values (none).",
)
@click.option(
    "--served-model-name",
    envvar="OCTAVO_SERVED_MODEL_NAME",
    show_default="the model's name, or its directory's",
    help="What clients call the model.",
)
@click.option("--listen", envvar="OCTAVO_LISTEN", default="127.0.0.1:50051", help="Public gRPC address.")
@click.option(
    "--frontend-endpoint",
    envvar="OCTAVO_FRONTEND_ENDPOINT",
    default=lambda: default_endpoint("frontends"),
    show_default="ipc in the runtime directory",
    help="Where the scheduler takes frontends.",
)
@click.option(
    "--insecure-tcp",
    envvar="OCTAVO_INSECURE_TCP",
    is_flag=True,
    help="Allow tcp:// endpoints beyond loopback: unencrypted, for networks that only Octavo's processes can reach.",
)
@click.option(
    "--scheduler-grace",
    envvar="OCTAVO_SCHEDULER_GRACE",
    type=_SECONDS,
    default=30.0,
    help="Seconds that requests survive without a scheduler.",
)
@click.option(
    "--worker-grace",
    envvar="OCTAVO_WORKER_GRACE",
    type=_SECONDS,
    default=30.0,
    help="Seconds that a new request waits for a first worker.",
)
@click.option(
    "--drain-timeout",
    envvar="OCTAVO_DRAIN_TIMEOUT",
    type=_SECONDS,
    default=30.0,
    help="Seconds that running streams may go on after SIGTERM.",
)
@click.option(
    "--pinned-prefixes",
    envvar="OCTAVO_PINNED_PREFIXES",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON file {"name": "text", ...}: beginnings of prompts that stay computed, for requests to name.',
)
def frontend(
    model: str,
    load_format: str,
    generation_config: str,
    served_model_name: str | None,
    listen: str,
    frontend_endpoint: str,
    insecure_tcp: bool,
    scheduler_grace: float,
    worker_grace: float,
    drain_timeout: float,
    pinned_prefixes: Path | None,
) -> None:
    """Run one frontend: it serves gRPC, tokenizes, and keeps the journal of running requests. Needs no torch."""
    try:
        check_endpoint(frontend_endpoint, insecure_tcp=insecure_tcp)
        directory = resolve_model(model, load_format)
        config = FrontendConfig(
            model_directory=directory,
            served_model_name=served_model_name or model_name(directory),
            listen=listen,
            scheduler_endpoint=frontend_endpoint,
            scheduler_grace_s=scheduler_grace,
            worker_grace_s=worker_grace,
            drain_timeout_s=drain_timeout,
            pinned_prefixes=pinned_prefixes,
            load_format=load_format,
            generation_config=generation_config,
        )
    except (EndpointError, ModelDirectoryError) as error:
        raise click.UsageError(str(error)) from error
    _run(config)


def _run(config: FrontendConfig) -> None:
    # The tokenizer's library imports torch wherever it is installed, which costs seconds and memory for nothing;
    # and where it is not, says so at every start.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Texts are tokenized one by one, so the library's own pool of a thread per core would only lie about.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asyncio.run(_serve(config))


async def _serve(config: FrontendConfig) -> None:
    from octavo.frontend.scheduler_client import SchedulerRefused
    from octavo.frontend.server import FrontendServer

    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with ExitStack() as held:
        with _start_errors():
            held.enter_context(claimed(config.listen))
            server = FrontendServer(config)
        try:
            await server.serve(stopping)
        except SchedulerRefused as error:
            raise click.ClickException(f"the frontend cannot go on: {error}") from error


@contextmanager
def _start_errors() -> Iterator[None]:
    """One line for what keeps the frontend from starting. Later errors are faults and keep their traceback."""
    try:
        yield
    except EndpointError as error:
        raise click.ClickException(f"the frontend cannot start: {error}") from error
    except (ModelDirectoryError, PinnedPrefixesError) as error:
        raise click.UsageError(str(error)) from error
