"""Holds the settings of a worker, each with its option; they are checked once, at start."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from octavo.runtime.options.common import INSECURE_METRICS, METRICS_LISTEN, OTLP_ENDPOINT
from octavo.runtime.options.memory import MEMORY
from octavo.runtime.options.option import DirectoryPath, Option, Parsed, Real
from octavo.runtime.transport.curve_keys import ClientKeys
from octavo.runtime.transport.endpoints import check_endpoint, check_metrics
from octavo.wire.steps import WorkerRole
from octavo.worker.model_settings import ConfigError, ModelSettings

# Instead of an endpoint for other workers: nobody reads blocks here.
NO_PEERS = "none"
DEFAULT_KV_DISK_MEMORY = 20 << 30
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
    kv_disk: Annotated[
        Path | None,
        Option(
            "--kv-disk",
            "Directory of this user alone in which to keep KV blocks beyond the worker's life, for any worker of the"
            " same model on this machine; needs CPU memory for blocks (--swap-memory).",
            Parsed(Path, "DIRECTORY"),
        ),
    ] = None
    kv_disk_memory: Annotated[
        int,
        Option(
            "--kv-disk-memory",
            "What KV blocks may take in --kv-disk, of all workers together: bytes, or with MiB, GiB or TiB.",
            MEMORY,
            default="20GiB",
        ),
    ] = DEFAULT_KV_DISK_MEMORY
    kv_mirror: Annotated[
        bool,
        Option(
            "--kv-mirror",
            "Write what running requests fill to --kv-disk as well, so that they go on elsewhere on this machine if"
            " this worker is killed.",
        ),
    ] = False
    role: Annotated[
        WorkerRole,
        Option(
            "--role",
            "What this worker is for: prompts, after which requests move to another one; what follows them; or both.",
        ),
    ] = WorkerRole.BOTH
    peer_endpoint: Annotated[
        str,
        Option(
            "--peer-endpoint",
            "Where other workers copy KV blocks from, so that requests can move with what is computed of them:"
            " ipc:///path, tcp://host:port, or none.",
            shown_default="as the scheduler is reached",
        ),
    ] = ""
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
        if self.peer_endpoint not in ("", NO_PEERS):
            check_endpoint(self.peer_endpoint, insecure_tcp=self.insecure_tcp, has_keys=self.curve_keys is not None)
        if self.metrics_listen:
            check_metrics(self.metrics_listen, insecure=self.insecure_metrics)
        if not _WORKER_ID.fullmatch(self.worker_id):
            raise ConfigError(f"worker id {self.worker_id!r} must be 1 to 128 letters, digits, '.', '_' or '-'")
        self._check_kv_disk()
        ModelSettings.__post_init__(self)

    def _check_kv_disk(self) -> None:
        if self.kv_disk is None:
            if self.kv_mirror:
                raise ConfigError("--kv-mirror writes KV blocks to a disk; name a directory with --kv-disk")
            return
        if self.tp > 1:
            raise ConfigError("ranks that share a model keep no KV blocks on a disk yet; drop --kv-disk, or --tp")
        if (self.swap_memory if self.num_cpu_blocks is None else self.num_cpu_blocks) == 0:
            raise ConfigError(
                "KV blocks come from a disk by way of blocks in CPU memory, and there are none; give --swap-memory more"
                " than 0, or drop --kv-disk"
            )


def default_worker_id() -> str:
    """Returns `<host>-<pid>`, with what may not stand in a worker id left out of the host's name."""
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname())[:64].strip(".-")
    return f"{host or 'worker'}-{os.getpid()}"
