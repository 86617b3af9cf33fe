"""The service that clients are tried against: real processes, on ports of this machine, asking for a key."""

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from octavo.runtime.models.directory import model_name
from octavo.testbed.stack import Stack

from .checks import Service

KEY = "sk-clients-0123456789abcdef"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class TcpStack(Stack):
    """A stack whose frontend listens where any client can reach it."""

    grpc_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.environment = {**self.environment, "OCTAVO_HTTP_LISTEN": f"127.0.0.1:{self.http_port}"}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


@contextmanager
def running_service(model: Path, *, embeds: bool = False) -> Iterator[tuple[Service, TcpStack]]:
    """The model in float32, so that its logprobs can be compared; tool calls as Hermes writes them. One that `embeds`
    gives the means of its last states, and no text."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        keys = Path(directory) / "keys.json"
        keys.write_text(json.dumps({"tenants": {"clients": {"keys": [KEY]}}}))
        environment = {
            "OCTAVO_API_KEYS": str(keys),
            "OCTAVO_DEVICE": "cpu",
            "OCTAVO_DTYPE": "float32",
            "OCTAVO_NUM_BLOCKS": "512",
            "OCTAVO_RESPONSE_STORE": str(Path(directory) / "responses"),
            "OCTAVO_THREADS": os.environ.get("OCTAVO_THREADS", "1"),
            "OCTAVO_TOOL_CALL_PARSER": "hermes",
            "OCTAVO_POOLING": "mean" if embeds else "auto",
        }
        with TcpStack(model, Path(directory), environment) as stack:
            stack.start_all()
            yield (
                Service(f"127.0.0.1:{stack.http_port}", stack.address, model_name(model), KEY, str(model)),
                stack,
            )
