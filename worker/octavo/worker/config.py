"""Holds the settings of a worker, each with its option; they are checked once, at start."""

import os
import re
import socket
from dataclasses import dataclass
from typing import Annotated

from octavo.runtime.options.common import INSECURE_METRICS, METRICS_LISTEN, OTLP_ENDPOINT
from octavo.runtime.options.option import DirectoryPath, Option, Real
from octavo.runtime.transport.curve_keys import ClientKeys
from octavo.runtime.transport.endpoints import check_endpoint, check_metrics
from octavo.worker.model_settings import ConfigError, ModelSettings

# It becomes part of a file name and of log lines.
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ModelSettings):
    """Says what one worker is to be.

    Raises `ConfigError` or `octavo.runtime.transport.endpoints.EndpointError` on what cannot be.
    """

    endpoint: Annotated[
        str,
        Option(
            "--worker-endpoint",
            "The scheduler's address for workers.",
            shown_default="ipc://<runtime directory>/workers.sock",
        ),
    ]
    worker_id: Annotated[
        str,
        Option(
            "--worker-id",
            "Name of this worker's place; it may outlive the process.",
            shown_default="<host>-<pid>",
        ),
    ]
    calibrate: Annotated[
        bool,
        Option(
            "--calibrate/--no-calibrate",
            "Measure at start what computing prompts, moving blocks and checking drafts cost, for the scheduler's"
            " --preemption measured and --speculation auto.",
        ),
    ] = True
    health_address: Annotated[
        str,
        Option(
            "--health-address",
            "Where to serve gRPC health: host:port or unix:/path.",
            shown_default="unix:<runtime directory>/<worker id>-health.sock",
        ),
    ]
    drain_timeout_s: Annotated[
        float,
        Option(
            "--drain-timeout",
            "Seconds after Ctrl-C or SIGTERM in which the scheduler may let requests end here, or move them.",
            Real(at_least=0),
        ),
    ] = 30.0
    curve_keys: Annotated[
        ClientKeys | None,
        Option(
            "--curve-keys",
            "Directory with worker.secret and scheduler.public, from `octavo keys`: for a scheduler that has keys.",
            DirectoryPath(),
        ),
    ] = None
    insecure_tcp: Annotated[
        bool, Option("--insecure-tcp", "Allow an unencrypted scheduler address beyond this machine.")
    ] = False
    metrics_listen: Annotated[str, METRICS_LISTEN] = ""
    insecure_metrics: Annotated[bool, INSECURE_METRICS] = False
    otlp_endpoint: Annotated[str, OTLP_ENDPOINT] = ""

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, insecure_tcp=self.insecure_tcp, has_keys=self.curve_keys is not None)
        if self.metrics_listen:
            check_metrics(self.metrics_listen, insecure=self.insecure_metrics)
        if not _WORKER_ID.fullmatch(self.worker_id):
            raise ConfigError(f"worker id {self.worker_id!r} must be 1 to 128 letters, digits, '.', '_' or '-'")
        ModelSettings.__post_init__(self)


def default_worker_id() -> str:
    """Returns `<host>-<pid>`, with what may not stand in a worker id left out of the host's name."""
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:64].strip(".-")
    return f"{host or 'worker'}-{os.getpid()}"
