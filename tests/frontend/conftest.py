"""A real frontend in this process, with a model of 258 tokens and a scheduler that makes up tokens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.frontend.text.model_defaults import read_model_defaults
from octavo.runtime.models.directory import fingerprint
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.steps import ModelInfo

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "byte-model"
    write_byte_model(directory, max_model_len=MAX_MODEL_LEN)
    return directory


@pytest.fixture(scope="session")
def roomy_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose context has room for what it is told of tools."""
    directory = tmp_path_factory.mktemp("roomy-model") / "byte-model"
    write_byte_model(directory, max_model_len=4 * MAX_MODEL_LEN)
    return directory


@pytest.fixture
def scheduler_grace_s() -> float:
    """Is long, for a busy machine may keep the fake scheduler from a word for seconds."""
    return 60.0


@pytest.fixture
def num_replicas() -> int:
    """How many workers the fake scheduler has when the frontend hears of it."""
    return 1


@pytest.fixture
def config(model_directory: Path, tmp_path: Path, scheduler_grace_s: float) -> FrontendConfig:
    return FrontendConfig(
        model_directory=model_directory,
        served_model_name="byte-model",
        listen="127.0.0.1:0",
        scheduler_endpoints=(f"ipc://{tmp_path}/frontends.sock",),
        scheduler_grace_s=scheduler_grace_s,
        worker_grace_s=60.0,
        drain_timeout_s=60.0,
        text_processes=1,
    )


@pytest.fixture
def fake_scheduler(config: FrontendConfig, num_replicas: int) -> FakeScheduler:
    model = ModelInfo(
        name="byte-model",
        fingerprint=fingerprint(config.model_directory),
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=read_model_defaults(config.model_directory).max_model_len,
    )
    scheduler = FakeScheduler(config.scheduler_endpoints[0], model)
    scheduler.replicas = num_replicas
    return scheduler


@pytest.fixture
async def scheduler(fake_scheduler: FakeScheduler) -> AsyncIterator[FakeScheduler]:
    async with fake_scheduler.serving():
        yield fake_scheduler


@pytest.fixture
async def frontend(config: FrontendConfig) -> AsyncIterator[FrontendServer]:
    async with running_frontend(config) as (server, _):
        yield server


@pytest.fixture
async def channel(frontend: FrontendServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return services.GenerationServiceStub(channel)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds; fails after four minutes."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not condition():
                await asyncio.sleep(0.005)

    return wait
