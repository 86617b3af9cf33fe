"""The HTTP port of a real frontend in this process."""

import dataclasses
from collections.abc import AsyncIterator, Callable

import httpx
import openai
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0", model_aliases=("default",))


@pytest.fixture
def url(frontend: FrontendServer) -> str:
    return f"http://127.0.0.1:{frontend.http_port}"


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, as its users have it."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def answer_with(scheduler: FakeScheduler, frontend: FrontendServer) -> Callable[..., None]:
    """Makes the scheduler answer with texts: one for each sequence, the last for all further ones."""

    def answer(*texts: str) -> None:
        ids = [frontend.generation.tokenizer.encode(text) for text in texts]
        scheduler.answer = lambda request, index: [*ids[min(index, len(ids) - 1)], 257][: request.sampling.max_tokens]

    return answer
