"""Server-sent events, byte by byte, and what happens to streams that do not go well."""

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest

from octavo.frontend.api import endpoint as endpoint_module
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.requests import RejectReason

ASK = {"prompt": "hello", "seed": 7, "max_tokens": 8, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "seed": 7, "max_tokens": 8, "stream": True}


async def raw(http: httpx.AsyncClient, body: Any, path: str = "/v1/completions") -> bytes:
    """All bytes of a stream."""
    response = await http.post(path, json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    return response.content


def events_of(stream: bytes) -> list[Any]:
    """The payloads of the events before [DONE], which must be the last."""
    blocks = stream.decode().split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]


async def test_every_event_is_one_line_of_data(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    events = events_of(await raw(http, ASK))
    assert {event["object"] for event in events} == {"text_completion"}
    assert all(event["choices"][0].keys() >= {"index", "text", "logprobs", "finish_reason"} for event in events)
    assert "usage" not in events[0]


async def test_chunks_of_a_chat_have_deltas(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    events = events_of(await raw(http, CHAT, "/v1/chat/completions"))
    assert events[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(event["choices"][0]["delta"].keys() == {"content"} for event in events[1:-1])
    assert events[-1]["choices"][0]["delta"] == {}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]


async def test_usage_is_null_until_it_is_known(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    events = events_of(await raw(http, {**ASK, "stream_options": {"include_usage": True}}))
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8


async def test_what_comes_together_leaves_together(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient
) -> None:
    async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "n": 8}) as response:
        # Kept, for it takes the connection with it.
        chunks = response.aiter_raw()
        first = await anext(chunks)
    # The roles of all choices, and the tokens that came with them.
    assert first.count(b'"role":"assistant"') == 8
    assert first.count(b'"content"') > 8


async def test_an_error_before_the_first_token_has_its_status(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    scheduler.rejection = RejectReason.QUEUE_FULL
    response = await http.post("/v1/completions", json=ASK)
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "queue_full"


async def test_an_error_in_the_midst_is_an_event_and_the_end(
    scheduler: FakeScheduler, frontend: FrontendServer, client: openai.AsyncOpenAI
) -> None:
    scheduler.hold_after = 2
    stream = await client.completions.create(model="byte-model", **ASK)  # type: ignore[call-overload]
    await anext(stream)
    frontend.generation.cut_off()
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "draining"


async def test_after_an_error_the_stream_is_done(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient
) -> None:
    scheduler.hold_after = 2
    async with http.stream("POST", "/v1/completions", json=ASK) as response:
        lines = response.aiter_lines()
        await anext(lines)
        frontend.generation.cut_off()
        rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "draining"
    assert rest[-1] == "data: [DONE]"


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "PING_S", 0.05)


@pytest.mark.usefixtures("quick_pings")
class TestSilence:
    async def test_a_silent_stream_says_that_it_lives(
        self, scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient
    ) -> None:
        scheduler.hold_after = 4
        async with http.stream("POST", "/v1/completions", json=ASK) as response:
            lines = response.aiter_lines()
            while await anext(lines) != ": ping":
                pass
            scheduler.hold_after = 1 << 30
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest

    async def test_a_stream_that_waits_begins_with_pings(
        self, scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient
    ) -> None:
        scheduler.hold_after = 0
        async with http.stream("POST", "/v1/completions", json=ASK) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": ping"
            scheduler.hold_after = 1 << 30
            assert "data: [DONE]" in [line async for line in lines]

    async def test_clients_skip_the_pings(
        self, scheduler: FakeScheduler, frontend: FrontendServer, client: openai.AsyncOpenAI
    ) -> None:
        scheduler.hold_after = 4
        stream = await client.completions.create(model="byte-model", **ASK)  # type: ignore[call-overload]
        text = (await anext(stream)).choices[0].text
        await asyncio.sleep(0.12)
        scheduler.hold_after = 1 << 30
        async for chunk in stream:
            text += chunk.choices[0].text
        assert len(text) == 8


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(
    scheduler: FakeScheduler, frontend: FrontendServer, url: str, eventually: Any, stream: bool
) -> None:
    scheduler.hold_after = 2
    body = {**ASK, "stream": stream, "request_id": "mine"}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: scheduler.running == {"mine"})
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: scheduler.aborted == ["mine"])
    await eventually(lambda: frontend.generation.num_running == 0)


async def test_a_client_that_leaves_ends_all_its_prompts(
    scheduler: FakeScheduler, frontend: FrontendServer, url: str, eventually: Any
) -> None:
    scheduler.hold_after = 2
    body = {**ASK, "prompt": ["a", "b", "c"]}
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        chunks = response.aiter_raw()
        await anext(chunks)
        await eventually(lambda: len(scheduler.running) == 3)
    await eventually(lambda: len(scheduler.aborted) == 3)
    assert frontend.generation.num_running == 0


async def test_one_prompt_that_fails_ends_the_others(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    scheduler.hold_after = 2
    response = await http.post("/v1/completions", json={"prompt": [[1], [300]], "max_tokens": 8})
    assert response.status_code == 400
    assert "the vocabulary ends at 257" in response.json()["error"]["message"]
    await eventually(lambda: scheduler.running == set() and frontend.generation.num_running == 0)


async def test_a_client_that_does_not_read_is_cut_off(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    """Its request ends, and is counted for that reason."""
    scheduler.answer = lambda request, index: [40] * request.sampling.max_tokens
    body = json.dumps({**ASK, "logprobs": 20, "max_tokens": 500, "n": 16}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port, limit=1 << 10)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await eventually(lambda: scheduler.submitted != [])
    await eventually(lambda: frontend.generation.num_running == 0)
    assert 'reason="SLOW_READER"' in (await http.get("/metrics")).text
    writer.transport.abort()


@pytest.fixture
def config(config: Any, request: pytest.FixtureRequest) -> Any:
    if "does_not_read" in request.node.name:
        return dataclasses.replace(config, stall_timeout_s=0.2)
    return config
