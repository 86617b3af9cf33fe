"""What one frontend needs to be told; read once, at start."""

from dataclasses import dataclass
from pathlib import Path

# Whether the model's generation_config.json says what stands in for what a request leaves out.
GENERATION_CONFIGS = ("auto", "none")


@dataclass(frozen=True)
class FrontendConfig:
    """`listen` is a gRPC address (host:port or unix:path), `scheduler_endpoint` a ZMQ one. Times are in seconds."""

    model_directory: Path
    served_model_name: str
    listen: str
    scheduler_endpoint: str
    # How long a request survives without a scheduler, and how long a new one waits for a first worker.
    scheduler_grace_s: float = 30.0
    worker_grace_s: float = 30.0
    # How long running streams may go on after SIGTERM.
    drain_timeout_s: float = 30.0
    # Tokenizing releases the GIL, so two threads serve two cores; more would take cores from the workers.
    tokenizer_threads: int = 2
    # JSON object of names and texts: prefixes that this frontend has the scheduler pin.
    pinned_prefixes: Path | None = None
    # Where the workers' weights come from, one of `octavo.wire.model_directory.LOAD_FORMATS`: the fingerprint tells.
    load_format: str = "auto"
    # One of `GENERATION_CONFIGS`.
    generation_config: str = "auto"
