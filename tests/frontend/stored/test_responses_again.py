"""Responses that were stored: read again, gone on from, listed, removed; through the official client."""

import json
import sqlite3
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.frontend.stored.store import Store
from octavo.frontend.stored.values import Limits
from octavo.testing.fakes.fake_scheduler import FakeScheduler

AnswerWith = Callable[[str], None]
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


async def test_a_response_is_read_again_as_it_was_answered(
    answer_with: AnswerWith, client: openai.AsyncOpenAI, ask: Any
) -> None:
    answer_with("good day")
    answer = await ask(metadata={"a": "b"}, instructions="be kind")
    assert answer.model_extra["store"] is True
    again = await client.responses.retrieve(answer.id)
    assert again.to_dict() == answer.to_dict()
    assert (again.status, again.output_text) == ("completed", "good day")


async def test_a_response_goes_on_from_an_earlier_one_without_its_instructions(
    answer_with: AnswerWith, prompt: Callable[[], str], ask: Any
) -> None:
    answer_with("first")
    first = await ask("a", instructions="be kind")
    answer_with("second")
    second = await ask([{"role": "user", "content": "b"}], previous_response_id=first.id)
    await ask("c", previous_response_id=second.id, instructions="be short")
    said = [("system", "be short"), ("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*said, ("user", "c")])
    assert prompt() == f"{expected}<|im_start|>assistant\n"
    assert second.previous_response_id == first.id


async def test_a_call_of_a_function_is_answered_by_going_on(
    answer_with: AnswerWith, prompt: Callable[[], str], ask: Any
) -> None:
    answer_with(CALL)
    first = await ask("?", tools=[WEATHER], max_output_tokens=200)
    [call] = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    await ask([output], tools=[WEATHER], previous_response_id=first.id)
    assert '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>' in prompt()
    assert "<tool_response>\nsunny\n</tool_response>" in prompt()


async def test_a_stream_is_stored_before_its_last_event(
    answer_with: AnswerWith, client: openai.AsyncOpenAI, ask: Any
) -> None:
    answer_with("good day")
    async for event in await ask(stream=True):
        last = event
        if event.type == "response.completed":
            found = await client.responses.retrieve(event.response.id)
            assert found.to_dict() == event.response.to_dict()
    assert last.type == "response.completed"


async def test_the_input_is_listed_with_ids_and_parts(client: openai.AsyncOpenAI, scheduler: Any, ask: Any) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": str(place)} for place in range(3)]
    items.append({"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]})
    answer = await ask(items)
    pages = await client.responses.input_items.list(answer.id, limit=3, order="asc")
    listed = [item async for item in pages]
    assert [item.type for item in listed] == ["message"] * 3 + ["reasoning"]
    said: list[Any] = [item.to_dict() for item in listed[:3]]
    assert [item["content"][0]["text"] for item in said] == ["0", "1", "2"]
    assert (listed[3].id, len({item.id for item in listed})) == ("rs_1", 4)
    newest = await client.responses.input_items.list(answer.id)
    assert [item.id for item in newest.data] == [item.id for item in listed[::-1]]


async def test_a_response_that_is_deleted_is_gone(client: openai.AsyncOpenAI, scheduler: Any, ask: Any) -> None:
    answer = await ask()
    await client.responses.delete(answer.id)
    for attempt in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as refused:
            await attempt(answer.id)
        assert refused.value.code == "not_stored"
    with pytest.raises(openai.BadRequestError) as refused_too:
        await ask(previous_response_id=answer.id)
    assert (refused_too.value.code, refused_too.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_what_is_not_to_be_stored_is_not(client: openai.AsyncOpenAI, scheduler: Any, ask: Any) -> None:
    first = await ask()
    second = await ask(store=False, previous_response_id=first.id)
    assert second.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)


async def test_a_tenant_has_what_is_its_own(http: httpx.AsyncClient, scheduler: Any) -> None:
    mine, other = {"x-tenant-id": "me"}, {"x-tenant-id": "you"}
    body = {"input": "hello", "max_output_tokens": 2}
    answer = (await http.post("/responses", json=body, headers=mine)).json()
    path = f"/responses/{answer['id']}"
    assert (await http.get(path, headers=mine)).status_code == 200
    for method, tail in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        told = await http.request(method, path + tail, headers=other)
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_stored")
    again = {**body, "previous_response_id": answer["id"]}
    assert (await http.post("/responses", json=again, headers=other)).status_code == 400
    assert (await http.post("/responses", json=again, headers=mine)).status_code == 200


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"previous_response_id": "\ud800"}, None),
    ({"previous_response_id": "x" * 5000}, "previous_response_id"),
    ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "conversation"),
    ({"conversation": 3}, "conversation"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1", "store": False}, "conversation"),
    ({"input": [{"role": "nobody", "content": "x"}], "background": True}, "messages.role"),
    ({"max_output_tokens": 0, "background": True}, "max_output_tokens"),
    ({"request_id": "\x00"}, "request_id"),
]


async def test_what_cannot_be_had_is_refused(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    for fields, param in REFUSED:
        told = await http.post("/responses", content=json.dumps({"input": "hello", **fields}), headers=headers)
        assert told.status_code == 400, (fields, told.text)
        assert param is None or told.json()["error"]["param"] == param, fields
    assert not scheduler.submitted


async def test_an_id_that_is_stored_is_not_asked_for_twice(http: httpx.AsyncClient, scheduler: Any) -> None:
    body = {"input": "hello", "max_output_tokens": 2, "request_id": "mine"}
    assert (await http.post("/responses", json=body)).json()["id"] == "resp_mine"
    told = await http.post("/responses", json=body)
    assert (told.status_code, told.json()["error"]["code"]) == (409, "duplicate_id")
    assert (await http.post("/responses", json={**body, "store": False})).status_code == 200


async def test_a_store_that_cannot_be_written_costs_the_storing_alone(
    frontend: FrontendServer, http: httpx.AsyncClient, scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"input": "hello", "max_output_tokens": 2}
    first = (await http.post("/responses", json=body)).json()
    assert frontend._stored is not None
    connection = frontend._stored.store.store._connection
    connection.execute("PRAGMA query_only = ON")
    whole = (await http.post("/responses", json=body)).json()
    assert (whole["store"], len(whole["output"])) == (False, 1)
    lines = [line async for line in _lines(http, {**body, "stream": True})]
    assert '"store":false' in lines[-1]
    assert lines[-2] == "event: response.incomplete"
    told = await http.post("/responses", json={**body, "background": True})
    assert (told.status_code, told.json()["error"]["code"]) == (503, "storage_failed")
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    connection.execute("PRAGMA query_only = OFF")
    again = (await http.post("/responses", json={**body, "previous_response_id": first["id"]})).json()
    assert again["store"] is True


async def _lines(http: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    async with http.stream("POST", "/responses", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line and not line.startswith(":"):
                yield line


async def test_what_is_damaged_is_told_as_that(
    config: FrontendConfig, frontend: FrontendServer, http: httpx.AsyncClient, scheduler: Any
) -> None:
    answer = (await http.post("/responses", json={"input": "hello", "max_output_tokens": 2})).json()
    assert config.response_store is not None
    with sqlite3.connect(config.response_store / "responses.sqlite") as connection:
        connection.execute("UPDATE items SET body = x'ff'")
        connection.execute("UPDATE records SET body = x'7b'")
    connection.close()
    for method, path in (("GET", f"/responses/{answer['id']}/input_items"), ("POST", "/responses")):
        body: dict[str, Any] = (
            {"json": {"input": "x", "previous_response_id": answer["id"]}} if method == "POST" else {}
        )
        told = await http.request(method, path, **body)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "storage_failed")


async def test_no_room_for_a_response_costs_the_storing_alone(
    frontend: FrontendServer, http: httpx.AsyncClient, scheduler: Any
) -> None:
    assert frontend._stored is not None
    frontend._stored.store.store._limits = Limits(100, 0, 1000.0)
    body = {"input": "hello", "max_output_tokens": 2}
    assert (await http.post("/responses", json=body)).json()["store"] is False
    told = await http.post("/responses", json={**body, "background": True})
    assert (told.status_code, told.json()["error"]["code"]) == (429, "store_full")


async def test_pages_that_are_none_are_refused(http: httpx.AsyncClient, scheduler: Any) -> None:
    answer = (await http.post("/responses", json={"input": "hello", "max_output_tokens": 2})).json()
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none", f"limit={'9' * 300}"):
        told = await http.get(f"/responses/{answer['id']}/input_items?{query}")
        assert (told.status_code, told.json()["error"]["param"]) == (400, query.partition("=")[0]), query


async def test_metrics_tell_what_is_stored(
    frontend: FrontendServer, http: httpx.AsyncClient, scheduler: Any, config: FrontendConfig
) -> None:
    await http.post("/responses", json={"input": "hello", "max_output_tokens": 2})
    stored = frontend._stored
    assert stored is not None
    stored.num_records, stored.num_bytes = await stored.store.call(Store.sweep)
    text = (await http.get(str(http.base_url).replace("/v1/", "/metrics"))).text
    assert "octavo_stored_records 1.0" in text
    assert "octavo_background_responses 0.0" in text


class TestWithoutAStore:
    @pytest.fixture
    def config(self, config: FrontendConfig) -> FrontendConfig:
        object.__setattr__(config, "response_store", None)
        return config

    async def test_responses_are_answered_and_say_that_they_are_not_stored(
        self, http: httpx.AsyncClient, scheduler: Any
    ) -> None:
        answer = await http.post("/responses", json={"input": "hello", "max_output_tokens": 2, "store": True})
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        assert answer.headers["x-octavo-unknown-fields"] == "store"
        told = await http.get(f"/responses/{answer.json()['id']}")
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_stored")
        assert "--response-store" in told.json()["error"]["message"]
        assert (await http.post("/conversations", json={})).status_code == 404

    async def test_what_needs_one_is_refused(self, http: httpx.AsyncClient, scheduler: Any) -> None:
        for field in ("previous_response_id", "conversation", "background"):
            told = await http.post("/responses", json={"input": "hello", field: "x"})
            assert (told.status_code, told.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("damaged", [b"{", b'{"status": "\xff"}'])
async def test_a_response_that_is_damaged_is_told_as_such_and_can_be_deleted(
    scheduler: FakeScheduler, frontend: FrontendServer, client: openai.AsyncOpenAI, ask: Any, damaged: bytes
) -> None:
    answer, other = await ask(), await ask()
    assert frontend._stored is not None
    frontend._stored.store.store._execute("UPDATE records SET body = ? WHERE id = ?", damaged, answer.id)
    with pytest.raises(openai.InternalServerError) as told:
        await client.responses.retrieve(answer.id)
    assert told.value.code == "storage_failed"
    assert (await client.responses.retrieve(other.id)).id == other.id
    await client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)


# -- references to items -----------------------------------------------------------------------------------------------


def reference(item_id: str) -> Any:
    return {"type": "item_reference", "id": item_id}


async def test_items_are_named_by_their_ids_in_place_of_being_sent(
    answer_with: AnswerWith, client: openai.AsyncOpenAI, prompt: Callable[[], str], ask: Any
) -> None:
    answer_with('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    question = {"type": "message", "role": "user", "content": "What is the weather?", "id": "msg_of_mine"}
    first = await ask([question], tools=[tool], max_output_tokens=200)
    [call] = first.output
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer_with("It is sunny.")
    await ask([question, call.to_dict(), output], tools=[tool])
    sent = prompt()
    second = await ask([reference("msg_of_mine"), reference(call.id), output], tools=[tool])
    assert prompt() == sent
    # They are kept as what they stand for: what they name may go.
    await client.responses.delete(first.id)
    kept = [item.to_dict() async for item in await client.responses.input_items.list(second.id, order="asc")]
    assert [item["type"] for item in kept] == ["message", "function_call", "function_call_output"]
    assert kept[1] == call.to_dict()
    again = await ask([reference("msg_of_mine"), reference(call.id), output], tools=[tool], store=False)
    assert prompt() == sent
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(again.id)
    # An answer that was not stored has no items to name.
    with pytest.raises(openai.NotFoundError):
        await ask([reference(again.output[0].id)])


async def test_items_of_conversations_are_named_by_their_ids(
    answer_with: AnswerWith, client: openai.AsyncOpenAI, prompt: Callable[[], str], ask: Any
) -> None:
    answer_with("good day")
    first = await ask("hello")
    named = reference(first.output[0].id)
    conversation = await client.conversations.create(items=[named])
    listed = await client.conversations.items.create(conversation.id, items=[named])
    added: Any = listed.data[0]
    # One list has no id twice.
    assert added.id != first.output[0].id
    await ask([reference(added.id), {"role": "user", "content": "more"}])
    assert prompt().count("good day") == 1


@pytest.mark.parametrize("background", [False, True])
async def test_an_item_that_is_not_there_is_named_as_missing(
    http: httpx.AsyncClient, answer_with: AnswerWith, background: bool
) -> None:
    answer_with("good day")
    first = (await http.post("/responses", json={"input": "hello"})).json()
    there, prefix = first["output"][0]["id"], first["id"].removeprefix("resp_")
    for missing in ("msg_1", f"msg_1_{prefix}", f"rs_0_{prefix}", "", "msg_0_\ud800", "x" * 5000, there.upper()):
        body = {"input": [reference(there), reference(missing)], "background": background}
        told = await http.post("/responses", content=json.dumps(body))
        if missing == "msg_0_\ud800":
            assert told.status_code == 400, told.text
            continue
        error = told.json()["error"]
        assert (told.status_code, error["code"], error["param"]) == (404, "not_stored", "input[1].id"), missing
        assert f"no item '{missing[:128]}' of yours is stored here" in error["message"]
    told = await http.post("/responses", json={"input": [{"type": "item_reference", "id": 5}]})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "input[0].id")
    # What looks like one is none.
    for said in ("item_reference", [{"role": "user", "content": "item_reference"}]):
        assert (await http.post("/responses", json={"input": said})).status_code == 200
