"""Holds the settings of a frontend, each with its option; they are read once, at start."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from octavo.runtime.models.directory import BUNDLED_MODEL
from octavo.runtime.options.common import (
    API_KEYS,
    GENERATION_CONFIG,
    INSECURE_TCP,
    LOAD_FORMAT,
    MODEL,
    OTLP_ENDPOINT,
    PINNED_PREFIXES,
    REASONING_PARSER,
    TLS_CERTIFICATE,
    TLS_CLIENT_CA,
    TLS_KEY,
    TOOL_CALL_PARSER,
)
from octavo.runtime.options.memory import MEMORY
from octavo.runtime.options.option import DirectoryPath, Option, Parsed, Real, Several, Whole
from octavo.runtime.transport.curve_keys import ClientKeys
from octavo.runtime.transport.endpoints import default_endpoint, endpoint_to_connect

_COUNT = Whole(at_least=1)
_BOUND = Whole(at_least=0)
_SECONDS = Real(at_least=0)


def _read_origins(texts: tuple[str, ...]) -> tuple[str, ...]:
    # Imported here: `--help` of all else needs no web server.
    from octavo.frontend.http.guards import parse_origins

    return tuple(sorted(parse_origins(texts)))


@dataclass(frozen=True)
class FrontendConfig:
    """Holds what one frontend needs to know. `listen` is a gRPC address (host:port or unix:path), `scheduler_endpoints`
    are ZMQ ones. Times are in seconds."""

    model_directory: Annotated[
        Path,
        replace(
            MODEL,
            help=f"{MODEL.help} The workers must be given the same one.",
            # Its directory is found later.
            values=Parsed(str, "TEXT"),
            default=BUNDLED_MODEL,
        ),
    ]
    # Where the workers' weights come from: the fingerprint tells.
    load_format: Annotated[
        str,
        replace(LOAD_FORMAT, help="Where the workers' weights come from; they must be given the same."),
    ] = field(default="auto", kw_only=True)
    generation_config: Annotated[str, GENERATION_CONFIG] = field(default="auto", kw_only=True)
    served_model_name: Annotated[
        str,
        Option(
            "--served-model-name",
            "What clients call the model.",
            shown_default="the model's name, or its directory's",
        ),
    ]
    listen: Annotated[str, Option("--listen", "Public gRPC address.", default="127.0.0.1:50051")]
    # One for each scheduler, all of whose workers serve this model.
    scheduler_endpoints: Annotated[
        tuple[str, ...],
        Option(
            "--frontend-endpoint",
            "Where the scheduler takes frontends. Given several times, requests are spread over as many schedulers,"
            " each with workers of its own.",
            Several("ENDPOINT", commas=True),
            default=lambda: (default_endpoint("frontends"),),
            shown_default="ipc in the runtime directory",
        ),
    ]
    # Without them the scheduler must have none either.
    curve_keys: Annotated[
        ClientKeys | None,
        Option(
            "--curve-keys",
            "Directory with frontend.secret and scheduler.public, from `octavo keys`: for a scheduler that has keys.",
            DirectoryPath(),
        ),
    ] = None
    insecure_tcp: Annotated[bool, INSECURE_TCP] = False
    # How long a request survives without a scheduler, and how long a new one waits for a first worker.
    scheduler_grace_s: Annotated[
        float, Option("--scheduler-grace", "Seconds that requests survive without a scheduler.", _SECONDS)
    ] = 30.0
    worker_grace_s: Annotated[
        float, Option("--worker-grace", "Seconds that a new request waits for a first worker.", _SECONDS)
    ] = 30.0
    # How long running streams may go on after SIGTERM.
    drain_timeout_s: Annotated[
        float, Option("--drain-timeout", "Seconds that running streams may go on after SIGTERM.", _SECONDS)
    ] = 30.0
    # JSON object of names and texts: prefixes that this frontend has the scheduler pin.
    pinned_prefixes: Annotated[Path | None, PINNED_PREFIXES] = None
    # Where HTTP is served (host:port or unix:path); empty: nowhere.
    http_listen: Annotated[
        str,
        Option(
            "--http-listen",
            "Public HTTP address: the OpenAI API, metrics and the page; off: no HTTP.",
            default="127.0.0.1:8000",
        ),
    ] = ""
    # Names under which HTTP may be called besides those of loopback and of `http_listen`; see `AllowedHosts`.
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "--allowed-hosts",
            "A further name under which HTTP may be called, beside loopback's and that of --http-listen: example.com,"
            " *.example.com, or * for any. Addresses need no naming.",
            Several("NAME", commas=True),
        ),
    ] = ()
    # Origins of web pages that browsers let call HTTP; see `CrossOrigin`.
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "--allowed-origins",
            "Origin of web pages that may call HTTP from their reader's browser, as https://app.example. Default: none"
            " but the server's own page.",
            Several("ORIGIN", commas=True, read=_read_origins),
        ),
    ] = ()
    # Where health alone is served, in the clear and without keys (host:port or unix:path); empty: nowhere.
    health_address: Annotated[
        str,
        Option(
            "--health-address",
            "Further address that serves gRPC health alone, in the clear: for probes that have no certificate."
            " Default: none.",
            default=None,
            variable=None,
        ),
    ] = ""
    # None: nobody is asked for a key.
    api_keys: Annotated[Path | None, API_KEYS] = None
    public_load_metrics: Annotated[
        bool,
        Option(
            "--public-load-metrics",
            "With API keys, GET /metrics without a key tells the load alone: requests that wait and run, and KV blocks."
            " For endpoint pickers, which send no key. Default: it asks for the key of a trusted tenant.",
        ),
    ] = False
    # For gRPC and HTTP alike; with `tls_client_ca` clients must show a certificate of its.
    tls_certificate: Annotated[Path | None, TLS_CERTIFICATE] = None
    tls_key: Annotated[Path | None, TLS_KEY] = None
    tls_client_ca: Annotated[Path | None, TLS_CLIENT_CA] = None
    # Bounds of all requests together, kept before anything is spent on one.
    max_requests: Annotated[int, Option("--max-requests", "Requests that are held at once.", _COUNT)] = 2048
    max_work_tokens: Annotated[
        int,
        Option(
            "--max-work-tokens",
            "Tokens of prompts and answers that all requests held may be about to take.",
            _COUNT,
        ),
    ] = 8_000_000
    # The same of one tenant, where the file of keys says nothing of it; 0: no own bound.
    tenant_max_requests: Annotated[
        int,
        Option(
            "--tenant-max-requests", "Requests of one tenant that are held at once; 0: no bound of its own.", _BOUND
        ),
    ] = 0
    tenant_max_work_tokens: Annotated[
        int, Option("--tenant-max-work-tokens", "Tokens of work of one tenant; 0: no bound of its own.", _BOUND)
    ] = 0
    max_connections: Annotated[
        int,
        Option(
            "--max-connections",
            "Connections of HTTP, and of gRPC, at once; one client has half of them at most.",
            Whole(at_least=16),
        ),
    ] = 4096
    stall_timeout_s: Annotated[
        float, Option("--stall-timeout", "Seconds until a client that reads nothing is cut off.", _SECONDS)
    ] = 30.0
    max_request_s: Annotated[
        float, Option("--max-request-time", "Seconds that a request may take in all.", _SECONDS)
    ] = 3600.0
    max_detach_grace_s: Annotated[
        float,
        Option("--max-detach-grace", "Seconds that a request is kept without a reader, at most.", _SECONDS),
    ] = 120.0
    text_processes: Annotated[
        int,
        Option("--text-processes", "Processes that tokenize, fill chat templates and compile grammars.", Whole(1, 64)),
    ] = 2
    text_timeout_s: Annotated[
        float, Option("--text-timeout", "Seconds that one such task may take.", Real(at_least=0.1))
    ] = 10.0
    # The scheduler's Admin service; empty: none.
    scheduler_admin: Annotated[
        str,
        Option(
            "--scheduler-admin",
            "Admin address of the scheduler, for the page's live view. Default: no live view.",
            default=None,
        ),
    ] = ""
    # Of the process's user alone, and for all frontends of this machine; None: responses are not kept.
    response_store: Annotated[
        Path | None,
        Option(
            "--response-store",
            "Directory of this user alone in which to keep what /v1/responses answers, and conversations, for all"
            " frontends of this machine that are given the same one. Default: nothing is kept.",
            Parsed(Path, "DIRECTORY"),
        ),
    ] = None
    response_store_memory: Annotated[
        int,
        Option(
            "--response-store-memory",
            "What may lie in --response-store: bytes, or with MiB, GiB or TiB. What is used least makes way.",
            MEMORY,
            default="8GiB",
        ),
    ] = 8 << 30
    tenant_response_store_memory: Annotated[
        int,
        Option(
            "--tenant-response-store-memory",
            "The same of one tenant; 0: no bound of its own.",
            MEMORY,
            default="1GiB",
        ),
    ] = 1 << 30
    response_expiry_s: Annotated[
        float,
        Option("--response-expiry", "Seconds that a response or a conversation is kept after its last use.", _SECONDS),
    ] = 30 * 86400.0
    enable_cache_reset: Annotated[
        bool,
        Option(
            "--enable-cache-reset",
            "Over HTTP, take POST /reset_prefix_cache: of anybody, or with API keys of trusted tenants. Default: it is"
            " not there.",
        ),
    ] = False
    # Of the only scheduler, and only for a frontend that asks nobody for a key: events hold the tokens of all prompts.
    scheduler_kv_events: Annotated[
        str,
        Option(
            "--scheduler-kv-events",
            "Where the scheduler publishes KV events, for gateways that ask for them by SubscribeKvEvents. They hold"
            " the tokens of everybody's prompts. Default: nowhere.",
            Parsed(endpoint_to_connect, "ENDPOINT"),
        ),
    ] = ""
    scheduler_kv_events_replay: Annotated[
        str,
        Option(
            "--scheduler-kv-events-replay",
            "Where the scheduler replays KV events: what the frontend has missed, and what came before a gateway."
            " Default: nowhere.",
            Parsed(endpoint_to_connect, "ENDPOINT"),
        ),
    ] = ""
    open_json_schemas: Annotated[
        bool,
        Option(
            "--open-json-schemas",
            "Over HTTP, let objects have properties that their JSON schema does not list unless it forbids them, as"
            " JSON Schema says. Default: they have others only where it allows them.",
        ),
    ] = False
    tool_call_parser: Annotated[str, TOOL_CALL_PARSER] = "auto"
    reasoning_parser: Annotated[str, REASONING_PARSER] = "auto"
    model_aliases: Annotated[
        tuple[str, ...],
        Option("--model-alias", "A further name of the model.", Several(), variable="OCTAVO_MODEL_ALIASES"),
    ] = ()
    # Its owner's alone; None: neither /v1/files nor /v1/batches. Frontends of one model may share it.
    batch_directory: Annotated[
        Path | None,
        Option(
            "--batch-directory",
            "Directory of files and batches, which /v1/files and /v1/batches take. It is made where it is not there."
            " Frontends may share it. Default: there are no such routes.",
            Parsed(Path, "DIRECTORY"),
        ),
    ] = None
    max_file_bytes: Annotated[int, Option("--max-file-bytes", "Bytes of an uploaded file, at most.", _COUNT)] = (
        200 << 20
    )
    tenant_max_file_bytes: Annotated[
        int, Option("--tenant-max-file-bytes", "Bytes of all files of one tenant, at most.", _COUNT)
    ] = 10 << 30
    file_expiry_s: Annotated[
        int, Option("--file-expiry", "Seconds after which files, and batches that are over, are removed.", _COUNT)
    ] = 30 * 86400
    max_batch_requests: Annotated[
        int, Option("--max-batch-requests", "Calls of batches that are under way at once.", Whole(1, 4096))
    ] = 32
    otlp_endpoint: Annotated[str, OTLP_ENDPOINT] = ""
