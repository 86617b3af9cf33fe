"""The HTTP port of a real frontend in this process, with a directory of files and batches."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer

Wait = Callable[..., Awaitable[Any]]


@pytest.fixture
def config(config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
    return dataclasses.replace(
        config, http_listen="127.0.0.1:0", batch_directory=tmp_path / "batches", max_batch_requests=4
    )


@pytest.fixture
async def client(frontend: FrontendServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(frontend) as client:
        yield client


def client_of(frontend: FrontendServer, key: str = "none") -> openai.AsyncOpenAI:
    """The official client, as its users have it."""
    base_url = f"http://127.0.0.1:{frontend.http_port}/v1"
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)


def a_line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hello", "max_tokens": 4, **body}}


def jsonl(*lines: dict[str, Any] | str) -> bytes:
    return b"".join((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines)


def parsed(content: bytes) -> dict[str, Any]:
    """The lines of a file of answers by their custom ids, of which no two may be equal."""
    lines = [json.loads(line) for line in content.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


async def upload(client: openai.AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("calls.jsonl", content), purpose="batch")).id


async def begin(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    """A batch of these lines."""
    fields = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=await upload(client, content), **fields)


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    """The batch once it is over."""
    return await until(client, batch, lambda found: found.status in ("completed", "failed", "expired", "cancelled"))


async def until(client: openai.AsyncOpenAI, batch: Any, holds: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(120):
        while not holds(found := await client.batches.retrieve(batch.id)):
            await asyncio.sleep(0.02)
    return found


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    return parsed((await client.files.content(file_id)).content)
