"""The HTTP port of a real frontend in this process, which stores responses."""

import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler


@pytest.fixture
def config(config: FrontendConfig, roomy_model_directory: Path, tmp_path: Path) -> FrontendConfig:
    return dataclasses.replace(
        config,
        http_listen="127.0.0.1:0",
        model_directory=roomy_model_directory,
        response_store=tmp_path / "responses",
        tool_call_parser="hermes",
    )


@pytest.fixture
async def http(frontend: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{frontend.http_port}/v1"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
async def client(frontend: FrontendServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, as its users have it."""
    url = f"http://127.0.0.1:{frontend.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def ask(client: openai.AsyncOpenAI) -> Callable[..., Any]:
    async def ask(said: Any = "hello", **fields: Any) -> Any:
        return await client.responses.create(**{"input": said, "max_output_tokens": 16, **fields})

    return ask


@pytest.fixture
def answer_with(scheduler: FakeScheduler, frontend: FrontendServer) -> Callable[[str], None]:
    """Makes the scheduler answer with a text."""

    def answer(text: str) -> None:
        ids = frontend.generation.tokenizer.encode(text)
        scheduler.answer = lambda request, index: [*ids, 257][: request.sampling.max_tokens]

    return answer


@pytest.fixture
def prompt(scheduler: FakeScheduler, frontend: FrontendServer) -> Callable[[], str]:
    """The prompt of the latest request, as text."""

    def latest() -> str:
        ids = scheduler.submitted[-1].prompt_token_ids
        return frontend.generation.tokenizer.decode(ids, skip_special_tokens=False)

    return latest
