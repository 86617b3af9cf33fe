"""POST /v1/messages and its counting: answers, streams, usage, what is refused and what is only named."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from octavo.frontend.api import endpoint
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import KEYS, write_keys
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.requests import RejectReason

AnswerWith = Callable[[str], None]


async def test_an_answer_is_a_message(answer_with: AnswerWith, post: Any) -> None:
    answer_with("good day")
    answer = await post(temperature=0.5, top_p=0.9, top_k=4, metadata={"user_id": "a"})
    told = answer.json()
    assert re.fullmatch("msg_[0-9a-f]{32}", told.pop("id"))
    usage = told.pop("usage")
    assert told == {
        "type": "message",
        "role": "assistant",
        "model": "byte-model",
        "content": [{"type": "text", "text": "good day"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["output_tokens"] == len("good day") + 1
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "x-octavo-unknown-fields" not in answer.headers


async def test_sampling_is_as_it_was_asked_for(scheduler: FakeScheduler, post: Any) -> None:
    await post(temperature=0.5, top_p=0.9, top_k=4)
    sampling = scheduler.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 4, 16)


async def test_a_stream_has_the_documented_events(answer_with: AnswerWith, events_of: Any) -> None:
    answer_with("good day")
    start, begun, *deltas, stop, delta, end = await events_of()
    assert start["type"] == "message_start"
    message = start["message"]
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == (None, 0)
    assert message["usage"]["input_tokens"] == delta["usage"]["input_tokens"] > 0
    text = {"type": "text", "text": ""}
    assert begun == {"type": "content_block_start", "index": 0, "content_block": text}
    assert {each["type"] for each in deltas} == {"content_block_delta"}
    assert {each["delta"]["type"] for each in deltas} == {"text_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == "good day"
    assert len(deltas) > 1
    assert stop == {"type": "content_block_stop", "index": 0}
    assert (delta["type"], delta["delta"]) == ("message_delta", {"stop_reason": "end_turn", "stop_sequence": None})
    assert delta["usage"]["output_tokens"] == len("good day") + 1
    assert end == {"type": "message_stop"}


async def test_an_answer_without_text_has_no_block(answer_with: AnswerWith, post: Any, events_of: Any) -> None:
    answer_with("")
    assert (await post()).json()["content"] == []
    assert [event["type"] for event in await events_of()] == ["message_start", "message_delta", "message_stop"]


async def test_an_answer_tells_why_it_has_ended(answer_with: AnswerWith, post: Any) -> None:
    answer_with("good day")
    short = (await post(max_tokens=3)).json()
    assert (short["stop_reason"], short["content"][0]["text"]) == ("max_tokens", "goo")
    stopped = (await post(stop_sequences=["d d", "x"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "d d")
    assert stopped["content"][0]["text"] == "goo"


async def test_cached_tokens_are_no_input_tokens(scheduler: FakeScheduler, post: Any, events_of: Any) -> None:
    whole = (await post()).json()["usage"]
    scheduler.tamper = lambda delta: [msgspec.structs.replace(delta, cached_prompt_tokens=16)]
    marked = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": marked}], "cache_control": {"type": "ephemeral"}}
    answer = await post(**fields)
    usage = answer.json()["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (16, 0)
    assert usage["input_tokens"] == whole["input_tokens"] - 16
    events = await events_of(**fields)
    for told in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert (told["input_tokens"], told["cache_read_input_tokens"]) == (usage["input_tokens"], 16)
    # It cannot be said for how long.
    assert "x-octavo-unknown-fields" not in answer.headers
    longer = await post(cache_control={"type": "ephemeral", "ttl": "1h"})
    assert longer.headers["x-octavo-unknown-fields"] == "cache_control.ttl"


async def test_a_prompt_is_counted_as_it_is_read(post: Any) -> None:
    fields = {"system": "be kind", "max_tokens": None}
    counted = await post("/v1/messages/count_tokens", **fields)
    asked = (await post(**{**fields, "max_tokens": 4})).json()["usage"]
    assert counted.json() == {"input_tokens": asked["input_tokens"]}
    assert counted.headers["request-id"]


async def test_a_quiet_stream_pings(scheduler: FakeScheduler, events_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PING_S", 0.05)
    scheduler.hold_after = 1
    pings = [event for event in await events_of(timeout=0.6) if event["type"] == "ping"]
    assert len(pings) > 1
    assert pings[0] == {"type": "ping"}


async def test_a_stream_that_breaks_ends_with_an_error(scheduler: FakeScheduler, events_of: Any) -> None:
    scheduler.hold_after = 2
    events = await events_of(timeout=0.5)
    assert events[0]["type"] == "message_start"
    assert events[-1]["error"]["type"] == "timeout_error"
    assert "deadline" in events[-1]["error"]["message"]
    assert events[-1]["request_id"]


async def test_an_error_before_the_first_event_is_a_status(scheduler: FakeScheduler, post: Any) -> None:
    scheduler.rejection = RejectReason.QUEUE_FULL
    answer = await post(stream=True)
    assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_format_is_a_grammar(scheduler: FakeScheduler, post: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = await post(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert answer.status_code == 200
    assert scheduler.submitted[-1].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0, but it must be at least 1"),
        ({"messages": None}, "messages is missing"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages is of a wrong type"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role is 'nobody'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images cannot be looked at"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "of type 'poem' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "no plain text"),
        ({"stop_sequences": ["x"] * 9}, "stop_sequences is repeated 9 times"),
        ({"stop": "x"}, "stop is not supported"),
        ({"temperature": -1}, "temperature is -1"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is None"),
        ({"thinking": {"type": "deep"}}, "thinking.type is 'deep'"),
        ({"output_config": {"format": {"type": "poem"}}}, "of type 'poem' is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
        ({"tools": 5}, "tools is of a wrong type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "naming a tool twice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.name is 'a b'"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 129}, "a list of 129"),
        ({"tool_choice": {"type": "any"}}, "there are no tools to choose from"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
    ],
)
async def test_what_cannot_be_had_is_refused(
    scheduler: FakeScheduler, post: Any, fields: dict[str, Any], words: str
) -> None:
    answer = await post(**fields)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert words in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"]
    assert not scheduler.submitted


async def test_clients_that_would_have_the_server_keep_the_conversation_are_told_to_send_it(post: Any) -> None:
    answer = await post(thread={"type": "create"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_what_is_called_wrongly_is_told_in_anthropics_form(http: httpx.AsyncClient, post: Any) -> None:
    unknown = await post(model="claude")
    wrong = await http.get("/v1/messages")
    nowhere = await http.post("/v1/complete", json={})
    broken = await http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    large = await http.post("/v1/messages", json={"messages": "x" * (5 << 20)})
    told = [(a.status_code, a.json()["error"]["type"]) for a in (unknown, wrong, nowhere, broken, large)]
    assert told == [
        (404, "not_found_error"),
        (405, "not_found_error"),
        (404, "not_found_error"),
        (400, "invalid_request_error"),
        (413, "request_too_large"),
    ]
    # By its path alone.
    del http.headers["anthropic-version"]
    assert (await post(model="claude")).json()["type"] == "error"
    assert "type" not in (await http.post("/v1/complete", json={})).json()


async def test_fields_and_betas_that_are_not_honoured_are_named(http: httpx.AsyncClient, post: Any) -> None:
    http.headers["anthropic-beta"] = "interleaved-thinking-2025-05-14,files-api-2025-04-14"
    http.headers["x-request-id"] = "mine"
    answer = await post(wishes=3, inference_geo="eu", output_config={"effort": "high"}, service_tier="auto")
    named = answer.headers["x-octavo-unknown-fields"].split(", ")
    assert sorted(named) == [
        "anthropic-beta.files-api-2025-04-14",
        "inference_geo",
        "output_config.effort",
        "wishes",
    ]
    assert answer.headers["request-id"] == "mine"


async def test_an_older_version_of_the_api_is_refused_and_a_newer_one_named(http: httpx.AsyncClient, post: Any) -> None:
    for version in ("2023-01-01", "new"):
        http.headers["anthropic-version"] = version
        answer = await post()
        assert answer.status_code == 400
        assert "2023-06-01" in answer.json()["error"]["message"]
    for version, named in (("2026-10-21", None), ("2099-01-01", "anthropic-version")):
        http.headers["anthropic-version"] = version
        assert (await post()).headers.get("x-octavo-unknown-fields") == named


async def test_models_come_in_anthropics_form(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["byte-model", "default", "other"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "byte-model", "other")
    assert listed["data"][0] == (await http.get("/v1/models/byte-model")).json()
    assert listed["data"][0]["type"] == "model"
    first = (await http.get("/v1/models", params={"limit": 1})).json()
    assert (first["last_id"], first["has_more"]) == ("byte-model", True)
    rest = (await http.get("/v1/models", params={"after_id": "byte-model"})).json()
    assert ([model["id"] for model in rest["data"]], rest["has_more"]) == (["default", "other"], False)
    before = (await http.get("/v1/models", params={"before_id": "other", "limit": 1})).json()
    assert ([model["id"] for model in before["data"]], before["has_more"]) == (["default"], True)
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"limit": "10000"}, {"after_id": "nobody"}):
        assert (await http.get("/v1/models", params=wrong)).json()["error"]["type"] == "invalid_request_error"
    assert (await http.get("/v1/models/nobody")).status_code == 404
    del http.headers["anthropic-version"]
    assert (await http.get("/v1/models")).json()["object"] == "list"


class TestKeys:
    @pytest.fixture
    def config(self, config: FrontendConfig, tmp_path: Any) -> FrontendConfig:
        return dataclasses.replace(config, api_keys=write_keys(tmp_path / "keys.json"), tenant_max_requests=1)

    async def test_a_key_is_asked_for(self, scheduler: FakeScheduler, http: httpx.AsyncClient, post: Any) -> None:
        answer = await post()
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert answer.headers["request-id"] == answer.json()["request_id"]
        http.headers["x-api-key"] = KEYS["alice"]
        assert (await post()).status_code == 200
        del http.headers["x-api-key"]
        http.headers["authorization"] = f"Bearer {KEYS['alice']}"
        assert (await post()).status_code == 200

    async def test_a_tenant_at_its_limit_is_told_when_to_come_back(
        self, scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, post: Any
    ) -> None:
        http.headers["x-api-key"] = KEYS["alice"]
        scheduler.hold_after = 1
        body = {"model": "byte-model", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with http.stream("POST", "/v1/messages", json=body) as running:
            assert running.status_code == 200
            answer = await post()
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
