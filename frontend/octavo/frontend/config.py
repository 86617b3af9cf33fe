"""Holds the settings of one frontend, which are read once, at start."""

from dataclasses import dataclass
from pathlib import Path

from octavo.runtime.transport.curve_keys import ClientKeys

# `auto`: sampling parameters that a request leaves out come from the model's generation_config.json; `none`: they are
# neutral.
GENERATION_CONFIGS = ("auto", "none")
# How tool calls are found in an answer: `auto` asks the model's chat template.
TOOL_PARSERS = ("auto", "hermes", "llama", "none")


@dataclass(frozen=True)
class FrontendConfig:
    """Holds the settings of one frontend. Times are in seconds.

    `listen` is a gRPC address (host:port or unix:path), `scheduler_endpoints` are ZMQ endpoints.
    """

    model_directory: Path
    served_model_name: str
    listen: str
    # One for each scheduler, all of whose workers serve this model.
    scheduler_endpoints: tuple[str, ...]
    # CURVE keys; without keys the scheduler must have none either.
    curve_keys: ClientKeys | None = None
    # How long a request survives without a scheduler, and how long a new one waits for a first worker.
    scheduler_grace_s: float = 30.0
    worker_grace_s: float = 30.0
    # How long running streams may go on after SIGTERM.
    drain_timeout_s: float = 30.0
    # Processes that tokenize, fill chat templates and compile grammars, and the longest that one task may take.
    text_processes: int = 2
    text_timeout_s: float = 10.0
    # JSON object of names and texts: prefixes that this frontend has the scheduler pin.
    pinned_prefixes: Path | None = None
    # Where the workers' weights come from, one of `octavo.runtime.models.directory.LOAD_FORMATS`. The
    # fingerprint depends on it.
    load_format: str = "auto"
    # One of `GENERATION_CONFIGS`.
    generation_config: str = "auto"
    # Where HTTP is served (host:port or unix:path); empty: nowhere.
    http_listen: str = ""
    # Names under which HTTP may be called besides those of loopback and of `http_listen`; see `AllowedHosts`.
    allowed_hosts: tuple[str, ...] = ()
    # Origins of web pages that browsers let call HTTP; see `CrossOrigin`.
    allowed_origins: tuple[str, ...] = ()
    # Where health alone is served, in the clear and without keys (host:port or unix:path); empty: nowhere.
    health_address: str = ""
    # JSON file of tenants and their keys; None: nobody is asked for one.
    api_keys: Path | None = None
    # PEM files, for gRPC and HTTP alike; with `tls_client_ca` clients must show a certificate of that authority.
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    # Bounds of all admitted requests together: their number, and their tokens of work.
    max_requests: int = 2048
    max_work_tokens: int = 8_000_000
    # The same bounds of one tenant, where the file of keys sets none; 0: no bound.
    tenant_max_requests: int = 0
    tenant_max_work_tokens: int = 0
    # Connections over HTTP, and as many over gRPC; one client may have half of them.
    max_connections: int = 4096
    # A client that has not read anything for so long is cut off.
    stall_timeout_s: float = 30.0
    # The longest that a request may take, and the longest that it is kept without a reader.
    max_request_s: float = 3600.0
    max_detach_grace_s: float = 120.0
    # The scheduler's Admin service, for the live view of the page; empty: none.
    scheduler_admin: str = ""
    # How tool calls are found in an answer, one of `TOOL_PARSERS`.
    tool_parser: str = "auto"
    # Over HTTP, objects of a JSON schema that says nothing of other properties may have some, as JSON Schema says.
    open_json_schemas: bool = False
    # The model's further names.
    model_aliases: tuple[str, ...] = ()
