"""Conversations: items under a name, to which responses add their turns; through the official client."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from octavo.testing.fakes.fake_scheduler import FakeScheduler

AnswerWith = Callable[[str], None]
HELLO: Any = {"type": "message", "role": "user", "content": "hello"}


async def texts(client: openai.AsyncOpenAI, name: str) -> list[str]:
    pages = await client.conversations.items.list(name, limit=2, order="asc")
    items: list[Any] = [item.to_dict() async for item in pages]
    return [item["content"][0]["text"] for item in items]


async def test_responses_add_their_turns_to_a_conversation(
    answer_with: AnswerWith, client: openai.AsyncOpenAI, prompt: Callable[[], str], ask: Any
) -> None:
    conversation = await client.conversations.create(items=[HELLO], metadata={"a": "b"})
    answer_with("first")
    answer = await ask("more", conversation=conversation.id)
    assert answer.conversation.id == conversation.id
    answer_with("second")
    [*_, last] = [event async for event in await ask("again", conversation={"id": conversation.id}, stream=True)]
    assert last.response.conversation.id == conversation.id
    said = [("user", "hello"), ("user", "more"), ("assistant", "first"), ("user", "again")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    assert prompt() == f"{expected}<|im_start|>assistant\n"
    assert await texts(client, conversation.id) == ["hello", "more", "first", "again", "second"]


async def test_a_conversation_is_read_changed_and_removed(client: openai.AsyncOpenAI, scheduler: Any) -> None:
    made = await client.conversations.create(metadata={"a": "b"})
    assert (await client.conversations.retrieve(made.id)).to_dict() == made.to_dict()
    changed = await client.conversations.update(made.id, metadata={"c": "d"})
    assert (changed.id, changed.metadata) == (made.id, {"c": "d"})
    removed = await client.conversations.delete(made.id)
    assert (removed.deleted, removed.object) == (True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError) as refused:
        await client.conversations.retrieve(made.id)
    assert refused.value.code == "not_stored"


async def test_items_are_added_read_and_removed(client: openai.AsyncOpenAI, scheduler: Any) -> None:
    made = await client.conversations.create()
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    added = await client.conversations.items.create(made.id, items=[HELLO, call])
    assert [item.type for item in added.data] == ["message", "function_call"]
    first = await client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    assert first.to_dict() == added.data[0].to_dict()
    assert (await client.conversations.items.delete(added.last_id, conversation_id=made.id)).id == made.id
    assert await texts(client, made.id) == ["hello"]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(added.last_id, conversation_id=made.id)


async def test_a_conversation_outlives_nothing_of_another_tenant(http: httpx.AsyncClient, scheduler: Any) -> None:
    mine, other = {"x-tenant-id": "me"}, {"x-tenant-id": "you"}
    made = (await http.post("/conversations", json={"items": [HELLO]}, headers=mine)).json()
    [item] = (await http.get(f"/conversations/{made['id']}/items", headers=mine)).json()["data"]
    body: dict[str, Any] = {"items": [HELLO]}
    for method, tail in (
        *(("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("POST", "/items")),
        *(("GET", f"/items/{item['id']}"), ("DELETE", f"/items/{item['id']}")),
    ):
        sent: dict[str, Any] = {"json": body if tail == "/items" else {}} if method == "POST" else {}
        told = await http.request(method, f"/conversations/{made['id']}{tail}", headers=other, **sent)
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_stored"), (method, tail)
    asked = {"input": "x", "conversation": made["id"]}
    assert (await http.post("/responses", json=asked, headers=other)).status_code == 404
    assert (await http.get(f"/conversations/{made['id']}/items", headers=mine)).json()["data"] == [item]


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"metadata": {str(place): "" for place in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, None),
    ({"items": [HELLO] * 21}, "items"),
    ({"items": [{"role": "nobody", "content": "x"}]}, "messages.role"),
    ({"items": [{"type": "computer_call"}]}, None),
    ({"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
]


async def test_what_no_conversation_can_have_is_refused(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    for body, param in REFUSED:
        told = await http.post("/conversations", json=body)
        assert told.status_code == 400, (body, told.text)
        assert param is None or told.json()["error"]["param"] == param, body
