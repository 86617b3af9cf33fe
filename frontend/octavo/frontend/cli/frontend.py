"""Implements `octavo frontend`: reads the flags, and runs the server until a signal."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import uvloop

from octavo.frontend.access.access import ApiKeysError
from octavo.frontend.access.connections import allow_open_files
from octavo.frontend.access.tls import TlsError
from octavo.frontend.config import GENERATION_CONFIGS, TOOL_PARSERS, FrontendConfig
from octavo.frontend.scheduler.pinned_prefixes import PinnedPrefixesError
from octavo.runtime.models.directory import BUNDLED_MODEL, LOAD_FORMATS, ModelDirectoryError, model_name, resolve_model
from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.runtime.telemetry import tracing
from octavo.runtime.transport.curve_keys import read_client_keys
from octavo.runtime.transport.endpoints import EndpointError, check_endpoint, claimed, default_endpoint, unless_off
from octavo.runtime.transport.sockets import check_library

_log = logging.getLogger(__name__)
_SECONDS = click.FloatRange(min=0)
_COUNT = click.IntRange(min=1)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# Thresholds of the garbage collector. With two thousand requests held, a full collection stops the event loop for a
# tenth of a second, and by Python's default a burst brings several. Young objects are looked at often, few at a time.
GC_YOUNG, GC_OLDER = 2_000, 50


def _in_runtime_directory(name: str) -> str:
    """Returns the default endpoint `name`. Raises `click.UsageError` if there is no directory for it."""
    try:
        return default_endpoint(name)
    except EndpointError as error:
        raise click.UsageError(str(error)) from error


class _Several(click.types.StringParamType):
    """The type of an option with several values, which are separated by spaces or commas in a variable."""

    def __init__(self, name: str) -> None:
        self.name = name

    def split_envvar_value(self, rv: str) -> list[str]:
        return rv.replace(",", " ").split()


def _origins(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    # Imported here: `--help` of all else needs no web server.
    from octavo.frontend.http.guards import parse_origins

    try:
        return tuple(sorted(parse_origins(texts)))
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


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
    "frontend_endpoints",
    envvar="OCTAVO_FRONTEND_ENDPOINT",
    type=_Several("endpoint"),
    multiple=True,
    default=lambda: (_in_runtime_directory("frontends"),),
    show_default="ipc in the runtime directory",
    help="Where the scheduler takes frontends. Given several times, requests are spread over as many schedulers, each"
    " with workers of its own.",
)
@click.option(
    "--curve-keys",
    envvar="OCTAVO_CURVE_KEYS",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with frontend.secret and scheduler.public, from `octavo keys`: for a scheduler that has keys.",
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
    type=_FILE,
    help='JSON file {"name": "text", ...}: beginnings of prompts that stay computed, for requests to name.',
)
@click.option(
    "--http-listen",
    envvar="OCTAVO_HTTP_LISTEN",
    default="127.0.0.1:8000",
    help="Public HTTP address: the OpenAI API, metrics and the page; off: no HTTP.",
)
@click.option(
    "--allowed-hosts",
    envvar="OCTAVO_ALLOWED_HOSTS",
    type=_Several("name"),
    multiple=True,
    help="A further name under which HTTP may be called, beside loopback's and that of --http-listen: example.com,"
    " *.example.com, or * for any. Addresses need no naming.",
)
@click.option(
    "--allowed-origins",
    envvar="OCTAVO_ALLOWED_ORIGINS",
    type=_Several("origin"),
    multiple=True,
    callback=_origins,
    help="Origin of web pages that may call HTTP from their reader's browser, as https://app.example. Default: none but"
    " the server's own page.",
)
@click.option(
    "--health-address",
    help="Further address that serves gRPC health alone, in the clear: for probes that have no certificate. Default:"
    " none.",
)
@click.option(
    "--api-keys",
    envvar="OCTAVO_API_KEYS",
    type=_FILE,
    help="JSON file of tenants and their API keys; without one nobody is asked for a key.",
)
@click.option("--tls-certificate", envvar="OCTAVO_TLS_CERTIFICATE", type=_FILE, help="PEM file, for gRPC and HTTP.")
@click.option("--tls-key", envvar="OCTAVO_TLS_KEY", type=_FILE, help="PEM file of the certificate's key.")
@click.option(
    "--tls-client-ca",
    envvar="OCTAVO_TLS_CLIENT_CA",
    type=_FILE,
    help="PEM file: clients must show a certificate that one of these authorities has signed.",
)
@click.option(
    "--max-requests", envvar="OCTAVO_MAX_REQUESTS", type=_COUNT, default=2048, help="Requests that are held at once."
)
@click.option(
    "--max-work-tokens",
    envvar="OCTAVO_MAX_WORK_TOKENS",
    type=_COUNT,
    default=8_000_000,
    help="Tokens of prompts and answers that all requests held may be about to take.",
)
@click.option(
    "--tenant-max-requests",
    envvar="OCTAVO_TENANT_MAX_REQUESTS",
    type=click.IntRange(min=0),
    default=0,
    help="Requests of one tenant that are held at once; 0: no bound of its own.",
)
@click.option(
    "--tenant-max-work-tokens",
    envvar="OCTAVO_TENANT_MAX_WORK_TOKENS",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens of work of one tenant; 0: no bound of its own.",
)
@click.option(
    "--max-connections",
    envvar="OCTAVO_MAX_CONNECTIONS",
    type=click.IntRange(min=16),
    default=4096,
    help="Connections of HTTP, and of gRPC, at once; one client has half of them at most.",
)
@click.option(
    "--stall-timeout",
    envvar="OCTAVO_STALL_TIMEOUT",
    type=_SECONDS,
    default=30.0,
    help="Seconds until a client that reads nothing is cut off.",
)
@click.option(
    "--max-request-time",
    envvar="OCTAVO_MAX_REQUEST_TIME",
    type=_SECONDS,
    default=3600.0,
    help="Seconds that a request may take in all.",
)
@click.option(
    "--max-detach-grace",
    envvar="OCTAVO_MAX_DETACH_GRACE",
    type=_SECONDS,
    default=120.0,
    help="Seconds that a request is kept without a reader, at most.",
)
@click.option(
    "--text-processes",
    envvar="OCTAVO_TEXT_PROCESSES",
    type=click.IntRange(1, 64),
    default=2,
    help="Processes that tokenize, fill chat templates and compile grammars.",
)
@click.option(
    "--text-timeout",
    envvar="OCTAVO_TEXT_TIMEOUT",
    type=click.FloatRange(min=0.1),
    default=10.0,
    help="Seconds that one such task may take.",
)
@click.option(
    "--scheduler-admin",
    envvar="OCTAVO_SCHEDULER_ADMIN",
    help="Admin address of the scheduler, for the page's live view. Default: no live view.",
)
@click.option(
    "--open-json-schemas",
    envvar="OCTAVO_OPEN_JSON_SCHEMAS",
    is_flag=True,
    help="Over HTTP, let objects have properties that their JSON schema does not list unless it forbids them, as JSON"
    " Schema says. Default: they have others only where it allows them.",
)
@click.option(
    "--tool-parser",
    envvar="OCTAVO_TOOL_PARSER",
    type=click.Choice(TOOL_PARSERS),
    default="auto",
    help="How tool calls are found in an answer: in the model's own format (auto), in a given one, or never (none).",
)
@click.option(
    "--model-alias", "model_aliases", envvar="OCTAVO_MODEL_ALIASES", multiple=True, help="A further name of the model."
)
@click.option(
    "--otlp-endpoint",
    envvar="OCTAVO_OTLP_ENDPOINT",
    default="",
    help="OTLP collector (gRPC) to send traces to, as http://host:port. Default: no traces.",
)
def frontend(
    model: str,
    load_format: str,
    generation_config: str,
    served_model_name: str | None,
    listen: str,
    frontend_endpoints: tuple[str, ...],
    curve_keys: Path | None,
    insecure_tcp: bool,
    scheduler_grace: float,
    worker_grace: float,
    drain_timeout: float,
    pinned_prefixes: Path | None,
    http_listen: str,
    allowed_hosts: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    health_address: str | None,
    api_keys: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    max_requests: int,
    max_work_tokens: int,
    tenant_max_requests: int,
    tenant_max_work_tokens: int,
    max_connections: int,
    stall_timeout: float,
    max_request_time: float,
    max_detach_grace: float,
    text_processes: int,
    text_timeout: float,
    scheduler_admin: str | None,
    open_json_schemas: bool,
    tool_parser: str,
    model_aliases: tuple[str, ...],
    otlp_endpoint: str,
) -> None:
    """Run one frontend: it serves gRPC and HTTP, tokenizes, keeps the journal of running requests. Needs no torch."""
    try:
        check_library()
        _check_endpoints(frontend_endpoints, insecure_tcp=insecure_tcp, has_keys=curve_keys is not None)
        directory = resolve_model(model, load_format)
        config = FrontendConfig(
            model_directory=directory,
            served_model_name=served_model_name or model_name(directory),
            listen=listen,
            scheduler_endpoints=frontend_endpoints,
            curve_keys=None if curve_keys is None else read_client_keys(curve_keys, "frontend"),
            scheduler_grace_s=scheduler_grace,
            worker_grace_s=worker_grace,
            drain_timeout_s=drain_timeout,
            pinned_prefixes=pinned_prefixes,
            load_format=load_format,
            generation_config=generation_config,
            http_listen=unless_off(http_listen),
            allowed_hosts=allowed_hosts,
            allowed_origins=allowed_origins,
            health_address=health_address or "",
            api_keys=api_keys,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            max_requests=max_requests,
            max_work_tokens=max_work_tokens,
            tenant_max_requests=tenant_max_requests,
            tenant_max_work_tokens=tenant_max_work_tokens,
            max_connections=max_connections,
            stall_timeout_s=stall_timeout,
            max_request_s=max_request_time,
            max_detach_grace_s=max_detach_grace,
            text_processes=text_processes,
            text_timeout_s=text_timeout,
            scheduler_admin=scheduler_admin or "",
            open_json_schemas=open_json_schemas,
            tool_parser=tool_parser,
            model_aliases=model_aliases,
        )
    except (EndpointError, ModelDirectoryError) as error:
        raise click.UsageError(str(error)) from error
    _run(config, otlp_endpoint)


def _check_endpoints(endpoints: tuple[str, ...], *, insecure_tcp: bool, has_keys: bool) -> None:
    """Raises `EndpointError` for an endpoint that must not be used, or is named twice."""
    for endpoint in endpoints:
        check_endpoint(endpoint, insecure_tcp=insecure_tcp, has_keys=has_keys)
        if endpoints.count(endpoint) > 1:
            raise EndpointError(f"the scheduler at {endpoint} is named twice; name each once")


def _run(config: FrontendConfig, otlp_endpoint: str) -> None:
    allow_open_files(config.max_connections)
    # Should transformers be needed all the same (for a configuration that leaves out what its family implies), it
    # imports torch wherever that is installed, which costs seconds and memory for nothing.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Texts are tokenized one by one, so the library's own pool of a thread per core would be idle.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tracing.exported(otlp_endpoint, "octavo-frontend"):
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
    except (ModelDirectoryError, PinnedPrefixesError, ApiKeysError, TlsError) as error:
        raise click.UsageError(str(error)) from error
