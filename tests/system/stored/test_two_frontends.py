"""Real frontends share a store of responses, and one of them is killed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.testbed.stack import Stack

from ..conftest import StartStack

pytestmark = pytest.mark.system

ASK: dict[str, Any] = {"input": "hello", "temperature": 0, "ignore_eos": True, "allowed_token_ids": [*range(64, 90)]}


@pytest.fixture
def stack(new_stack: StartStack, tmp_path: Path) -> Stack:
    # Slow enough to be caught in the midst of an answer.
    stack = new_stack(OCTAVO_FAKE_STEP_MS="100", OCTAVO_RESPONSE_STORE=str(tmp_path / "responses"))
    stack.start_all()
    start_second(stack, 1)
    return stack


def start_second(stack: Stack, count: int) -> None:
    """Starts the other frontend, for the `count`-th time, and waits until it serves."""
    stack.start_named("frontend-1")
    stack.wait_for(lambda: stack.log("frontend-1").count("serving byte-model on") == count)


def second_frontend(stack: Stack) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(stack.directory / "http-frontend-1.sock"))
    return httpx.Client(transport=transport, base_url="http://octavo", timeout=60, trust_env=False)


def test_what_one_frontend_stores_another_goes_on_from(stack: Stack) -> None:
    with stack.http() as first, second_frontend(stack) as second:
        begun = first.post("/v1/responses", json={**ASK, "max_output_tokens": 10, "background": True}).json()
        assert begun["status"] == "queued"
        # Followed elsewhere, from its beginning to its end.
        events = list(events_of(second, begun["id"]))
        whole = second.get(f"/v1/responses/{begun['id']}").json()
        assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", whole)
        again = list(events_of(first, begun["id"], 7))
        assert again == events[8:]
        body = {**ASK, "max_output_tokens": 4, "previous_response_id": begun["id"]}
        here, there = (each.post("/v1/responses", json=body).json() for each in (first, second))
        assert here["output"][0]["content"] == there["output"][0]["content"]
        assert here["usage"]["input_tokens"] == there["usage"]["input_tokens"] > whole["usage"]["total_tokens"]
        long = second.post("/v1/responses", json={**ASK, "max_output_tokens": 1500, "background": True}).json()
        assert first.post(f"/v1/responses/{long['id']}/cancel").json()["status"] == "cancelled"
    stack.wait_idle()


def test_an_item_of_one_frontend_is_named_at_another(stack: Stack) -> None:
    question = {"type": "message", "id": "msg_of_mine", "role": "user", "content": "hello"}
    short = {**ASK, "max_output_tokens": 4}
    with stack.http() as first, second_frontend(stack) as second:
        answer = first.post("/v1/responses", json={**short, "input": [question]}).json()
        said = [question, answer["output"][0]]
        named = [{"type": "item_reference", "id": item["id"]} for item in said]
        whole, short_form = (
            each.post("/v1/responses", json={**short, "input": [*items, question]}).json()
            for each, items in ((first, said), (second, named))
        )
        assert short_form["output"][0]["content"] == whole["output"][0]["content"]
        assert short_form["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        first.delete(f"/v1/responses/{answer['id']}")
        kept = first.get(f"/v1/responses/{short_form['id']}/input_items?order=asc").json()["data"]
        assert [item["content"] for item in kept[1:2]] == [said[1]["content"]]
        told = second.post("/v1/responses", json={**short, "input": [{**named[1], "id": "msg_1_none"}]})
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_stored")


def test_a_background_response_of_a_frontend_that_is_killed_has_failed_and_says_so(stack: Stack) -> None:
    with stack.http() as first, second_frontend(stack) as second:
        body = {**ASK, "max_output_tokens": 1500, "background": True}
        begun = second.post("/v1/responses", json=body).json()
        source = events_of(first, begun["id"])
        seen = [next(source)]
        while seen[-1]["type"] != "response.output_text.delta":
            seen.append(next(source))
        stack.kill("frontend-1")
        seen += source
        assert seen[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        found = first.get(f"/v1/responses/{begun['id']}").json()
        assert (found["status"], found) == ("failed", seen[-1]["response"])
        assert "ended before the response did" in found["error"]["message"]
        told = first.post("/v1/responses", json={**ASK, "previous_response_id": begun["id"]})
        assert told.status_code == 400
        # Nor does the store suffer.
        after = first.post("/v1/responses", json={**ASK, "max_output_tokens": 4}).json()
        assert after["store"] is True
    start_second(stack, 2)
    with second_frontend(stack) as second:
        assert second.get(f"/v1/responses/{after['id']}").json() == after
    stack.wait_idle()


def events_of(http: httpx.Client, response_id: str, after: int | None = None) -> Iterator[Any]:
    tail = "" if after is None else f"&starting_after={after}"
    with http.stream("GET", f"/v1/responses/{response_id}?stream=true{tail}") as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
