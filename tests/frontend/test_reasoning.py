"""What a model thinks is set apart over every interface alike, from a frontend's sockets on."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb

ANSWER = "<think>\nTwo and two.\n</think>\n\nFour."
THOUGHT = len("<think>\nTwo and two.\n</think>")
MESSAGES = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    object.__setattr__(config, "http_listen", "127.0.0.1:0")
    object.__setattr__(config, "reasoning_parser", "deepseek_r1")
    return config


@pytest.fixture
async def http(frontend: FrontendServer, scheduler: FakeScheduler) -> AsyncIterator[httpx.AsyncClient]:
    ids = frontend.generation.tokenizer.encode(ANSWER, continues=True)
    scheduler.answer = lambda request, index: [*ids, 257]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=60) as client:
        yield client


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_chat_has_it_under_both_names_and_counts_it(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 99})).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Four.", "Two and two.")
    assert message["reasoning_content"] == message["reasoning"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == THOUGHT
    quiet = {"messages": MESSAGES, "max_tokens": 99, "include_reasoning": False}
    message = (await http.post("/v1/chat/completions", json=quiet)).json()["choices"][0]["message"]
    assert message["content"] == "Four."
    assert "reasoning" not in message


async def test_a_stream_has_it_before_the_content(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 99, "stream": True}
    events = events_of((await http.post("/v1/chat/completions", json=body)).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Two and two."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two and two."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four."


async def test_a_response_has_an_item_of_it(http: httpx.AsyncClient) -> None:
    body = {"input": "2+2?", "max_output_tokens": 99, "stream": True}
    events = events_of((await http.post("/v1/responses", json=body)).text)
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Two and two."
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == THOUGHT
    again = {"input": [{"role": "user", "content": "2+2?"}, *response["output"], {"role": "user", "content": "Sure?"}]}
    assert (await http.post("/v1/responses", json={**again, "max_output_tokens": 99})).status_code == 200


async def test_grpc_has_a_field_of_it(http: httpx.AsyncClient, stub: Any) -> None:
    request = pb.GenerateRequest(
        chat={"messages": MESSAGES}, stopping={"max_new_tokens": 99}, response={"incremental": True}
    )
    events = [event async for event in stub.Generate(request, timeout=60)]
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.reasoning for delta in deltas) == "Two and two."
    assert "".join(delta.text for delta in deltas) == "Four."
    assert events[-1].usage.reasoning_tokens == THOUGHT


async def test_a_prompt_that_is_text_has_all_of_it_in_the_text(http: httpx.AsyncClient, stub: Any) -> None:
    request = pb.GenerateRequest(text="2+2?", stopping={"max_new_tokens": 99})
    events = [event async for event in stub.Generate(request, timeout=60)]
    assert "".join(event.delta.text for event in events) == ANSWER


async def test_a_budget_that_cannot_be_kept_is_refused(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 99, "thinking_token_budget": 4}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "its end cannot be forced" in answer.json()["error"]["message"]
