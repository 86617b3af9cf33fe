"""Holds the settings of a Dynamo worker that stands for one cell, each with its option."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Final

from octavo.client import DEFAULT_ADDRESS
from octavo.frontend.cli.server_options import Connection
from octavo.runtime.models.directory import BUNDLED_MODEL
from octavo.runtime.options.option import Option, Parsed, Real

_SCHEMES: Final = ("tcp://", "ipc://")
# Beyond draining, for Dynamo to hear of what was cut off.
_MARGIN_S: Final = 10


def _read_endpoint(endpoint: str) -> str:
    if not endpoint.startswith(_SCHEMES):
        raise ValueError(f"{endpoint!r} is no endpoint to connect to; write tcp://host:port or ipc://path")
    if "*" in endpoint:
        raise ValueError(f"{endpoint} is an endpoint to bind; name the scheduler's host instead of *")
    return endpoint


@dataclass(frozen=True)
class DynamoWorkerConfig:
    """Holds what a Dynamo worker needs to know of its cell. Times are in seconds."""

    server: str = DEFAULT_ADDRESS
    connection: Connection = field(default_factory=Connection)
    model: Annotated[
        str,
        Option(
            "--model",
            "The model that the cell serves, as its frontend was given it: Dynamo's frontend tokenizes by its files. It"
            " reads the directory at the same path on its own machine, or gets the files from this worker if"
            " DYN_SYSTEM_PORT is set; a model of the Hugging Face hub, org/name, it fetches itself.",
            Parsed(str, "TEXT"),
        ),
    ] = BUNDLED_MODEL
    kv_events: Annotated[
        str | None,
        Option(
            "--kv-events",
            "Where the cell's scheduler publishes its KV events (its --kv-events-endpoint). Default: nowhere; run"
            " Dynamo's frontend with --no-router-kv-events then.",
            Parsed(_read_endpoint, "ENDPOINT"),
        ),
    ] = None
    drain_timeout_s: Annotated[
        float,
        Option(
            "--drain-timeout",
            "Seconds that running requests may go on after SIGTERM, or after the cell takes no more; then Dynamo moves"
            " them to other workers.",
            Real(at_least=0, finite=True),
        ),
    ] = 30.0

    @property
    def shutdown_timeout_s(self) -> int:
        """Returns the seconds after which Dynamo's runtime may end the process, whatever runs."""
        return math.ceil(self.drain_timeout_s) + _MARGIN_S
