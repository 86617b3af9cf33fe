"""A stack whose processes run on hosts of their own, with CURVE keys."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from octavo.runtime.transport.curve_keys import write_keys
from octavo.testbed.netns import Network
from octavo.testbed.stack import Stack

CLIENT: Final = "client"
HOSTS: Final = ("scheduler", "frontend", "worker-0", "worker-1")
_FRONTENDS_PORT, _WORKERS_PORT, _GRPC_PORT = 7001, 7002, 50051


@dataclass
class NetworkStack(Stack):
    """The process of a name runs on the host of that name. Only the admin service is on a unix socket."""

    network: Network = field(kw_only=True)

    @property
    def address(self) -> str:
        return self.address_of("frontend")

    def address_of(self, frontend: str) -> str:
        return f"{self.network.address(frontend)}:{_GRPC_PORT}"

    def on(self, name: str) -> Sequence[str]:
        return self.network.on(name)


@contextmanager
def network_stack(model: Path, directory: Path, environment: dict[str, str]) -> Iterator[NetworkStack]:
    """Nothing is started yet. Only in a process started by `in_own_network`."""
    network = Network(CLIENT, HOSTS)
    keys = directory.parent / "keys"
    write_keys(keys)
    scheduler = network.address("scheduler")
    hosted = {
        "OCTAVO_FRONTEND_ENDPOINT": f"tcp://{scheduler}:{_FRONTENDS_PORT}",
        "OCTAVO_WORKER_ENDPOINT": f"tcp://{scheduler}:{_WORKERS_PORT}",
        "OCTAVO_CURVE_KEYS": str(keys),
    }
    with NetworkStack(model, directory, {**hosted, **environment}, network=network) as stack:
        yield stack
