"""The HTTP port of a real frontend in this process, called as Anthropic's clients call it."""

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler

Post = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0", model_aliases=("default", "other"))


@pytest.fixture
async def http(scheduler: FakeScheduler, frontend: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{frontend.http_port}"
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60) as http:
        yield http


@pytest.fixture
def post(http: httpx.AsyncClient) -> Post:
    """Asks for a message; fields may be added, and others taken away by None."""

    async def post(path: str = "/v1/messages", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        body: dict[str, Any] = {"model": "byte-model", "max_tokens": 16, "messages": messages, **fields}
        return await http.post(path, json={name: value for name, value in body.items() if value is not None})

    return post


@pytest.fixture
def events_of(post: Post) -> Callable[..., Awaitable[list[dict[str, Any]]]]:
    """Asks for a stream, and returns its events, whose names must be their types."""

    async def events_of(**fields: Any) -> list[dict[str, Any]]:
        answer = await post(stream=True, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return read_events(answer.text)

    return events_of


def read_events(text: str) -> list[dict[str, Any]]:
    """Reads server-sent events, without comments."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            [event, data] = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert event == f"event: {found[-1]['type']}"
    return found


@pytest.fixture
def answer_with(scheduler: FakeScheduler, frontend: FrontendServer) -> Callable[..., None]:
    """Makes the scheduler answer with a text."""

    def answer(text: str) -> None:
        ids = [*frontend.generation.tokenizer.encode(text), 257]
        scheduler.answer = lambda request, index: ids[: request.sampling.max_tokens]

    return answer


@pytest.fixture
def prompt(scheduler: FakeScheduler, frontend: FrontendServer) -> Callable[[], str]:
    """Returns the text of the prompt that the scheduler was given last."""

    def prompt() -> str:
        ids = scheduler.submitted[-1].prompt_token_ids
        return frontend.generation.tokenizer.decode(ids, skip_special_tokens=False)

    return prompt
