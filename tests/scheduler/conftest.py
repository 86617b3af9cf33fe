from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.scheduler.server.event_log import StepFeed
from octavo.testing.cluster import Cluster, write_fake_model
from octavo.testing.operated import admin_server
from octavo.v1 import admin_pb2_grpc as services

MakeCluster = Callable[..., Cluster]
Connect = Callable[..., Awaitable[Any]]


@pytest.fixture
def make_cluster(tmp_path: Path) -> MakeCluster:
    directory = write_fake_model(tmp_path / "model")
    return lambda **config: Cluster(directory, **config)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Serves a cluster and gives a stub."""
    async with AsyncExitStack() as held:

        async def start(cluster: Cluster, feed: StepFeed | None = None) -> Any:
            address = await held.enter_async_context(admin_server(cluster, feed))
            channel = await held.enter_async_context(grpc.aio.insecure_channel(address))
            return services.AdminServiceStub(channel)

        yield start
