"""Responses that nobody waits for: from their queue to their end, followed, cancelled, and left by their frontend."""

import asyncio
import dataclasses
import json
import secrets
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.openai.response_answer import ResponseAnswer
from octavo.frontend.request.events import SequenceFinished
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend

AnswerWith = Callable[[str], None]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
TEXT = "good day to all of you"


@pytest.fixture
async def other(config: FrontendConfig, frontend: FrontendServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of another frontend with the same store."""
    async with running_frontend(config) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            yield client


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(120):
        while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return found


async def test_a_response_goes_on_without_its_client(
    answer_with: AnswerWith, client: openai.AsyncOpenAI, other: openai.AsyncOpenAI, ask: Any
) -> None:
    answer_with(TEXT)
    begun = await ask(background=True, max_output_tokens=100)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    found = await ended(client, begun.id)
    assert (found.status, found.output_text) == ("completed", TEXT)
    assert (await ended(other, begun.id)).to_dict() == found.to_dict()
    # And an answer at one frontend is gone on from at another.
    after = await other.responses.create(input="more", previous_response_id=begun.id, max_output_tokens=4)
    assert after.usage
    assert found.usage
    assert after.usage.input_tokens > found.usage.input_tokens


async def test_a_stream_is_taken_up_again_at_any_event_and_anywhere(
    scheduler: FakeScheduler,
    answer_with: AnswerWith,
    client: openai.AsyncOpenAI,
    other: openai.AsyncOpenAI,
    ask: Any,
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 5
    seen, response_id = [], ""
    async for event in await ask(background=True, stream=True, max_output_tokens=100):
        seen.append(event)
        response_id = response_id or event.response.id
        if event.type == "response.output_text.delta":
            break
    kinds = [event.type.removeprefix("response.") for event in seen]
    assert kinds == [*("created", "queued", "in_progress", "output_item.added", "content_part.added"), kinds[-1]]
    followers = [
        asyncio.create_task(_rest(each, response_id, seen[-1].sequence_number)) for each in (client, other, client)
    ]
    await asyncio.sleep(0)
    scheduler.hold_after = 1 << 30
    rests = [await each for each in followers]
    assert rests[0] == rests[1] == rests[2]
    whole = [*[event.to_dict() for event in seen], *rests[0]]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    # Once more, from the store alone.
    await ended(client, response_id)
    for number in (-1, 0, 3, len(whole) - 2, len(whole) - 1):
        assert await _rest(other, response_id, number) == whole[number + 1 :]


async def test_a_response_without_a_stream_is_followed_while_it_grows(
    scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any, other: openai.AsyncOpenAI
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 5
    begun = await ask(background=True, max_output_tokens=100)
    said = ""
    async for event in await other.responses.retrieve(begun.id, stream=True):
        if event.type == "response.output_text.delta":
            said += event.delta
            # Not before there was something of it.
            scheduler.hold_after = 1 << 30
    assert said == TEXT


async def _rest(client: openai.AsyncOpenAI, response_id: str, number: int) -> list[Any]:
    after = {"starting_after": number} if number >= 0 else {}
    stream = await client.responses.retrieve(response_id, stream=True, **after)  # type: ignore[call-overload]
    return [event.to_dict() async for event in stream]


async def test_who_waits_for_events_that_never_come_is_told_so(
    scheduler: FakeScheduler,
    answer_with: AnswerWith,
    other: openai.AsyncOpenAI,
    ask: Any,
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 5
    begun = await ask(background=True, max_output_tokens=100)
    # Another frontend may have sent them, and not written them yet.
    following = asyncio.create_task(_rest(other, begun.id, 500))
    await asyncio.sleep(0)
    scheduler.hold_after = 1 << 30
    with pytest.raises(openai.BadRequestError, match="start after one that was received"):
        await following


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_a_response_is_cancelled_at_any_frontend(
    scheduler: FakeScheduler,
    answer_with: AnswerWith,
    client: openai.AsyncOpenAI,
    other: openai.AsyncOpenAI,
    ask: Any,
    eventually: Eventually,
    frontend: FrontendServer,
    where: str,
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 5
    begun = await ask(background=True, max_output_tokens=100)
    await eventually(lambda: bool(scheduler.submitted))
    following = asyncio.create_task(_rest(other, begun.id, -1))
    by = client if where == "here" else other
    found = await by.responses.cancel(begun.id)
    assert found.status == "cancelled"
    await eventually(lambda: frontend.generation.num_running == 0)
    events = await following
    assert events[-1]["type"] == "response.cancelled"
    assert (await by.responses.cancel(begun.id)).to_dict() == events[-1]["response"]
    with pytest.raises(openai.BadRequestError, match="which is cancelled"):
        await ask(previous_response_id=begun.id)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_a_response_that_is_deleted_is_computed_no_further(
    scheduler: FakeScheduler,
    client: openai.AsyncOpenAI,
    other: openai.AsyncOpenAI,
    ask: Any,
    eventually: Eventually,
    frontend: FrontendServer,
    where: str,
) -> None:
    scheduler.hold_after = 2
    begun = await ask(background=True)
    await eventually(lambda: bool(scheduler.submitted))
    with pytest.raises(openai.BadRequestError, match="wait for its end"):
        await ask(previous_response_id=begun.id)
    await (client if where == "here" else other).responses.delete(begun.id)
    await eventually(lambda: frontend.generation.num_running == 0)
    assert frontend._stored is not None
    await eventually(lambda: frontend._stored.num_running == 0)  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_a_response_that_fails_says_why(scheduler: FakeScheduler, client: openai.AsyncOpenAI, ask: Any) -> None:
    begun = await ask("x" * 3000, background=True)
    found = await ended(client, begun.id)
    assert (found.status, found.error.code) == ("failed", "server_error")
    assert "tokens" in found.error.message
    with pytest.raises(openai.BadRequestError, match="which is failed"):
        await ask(previous_response_id=begun.id)


async def test_only_background_responses_are_cancelled_or_followed(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, ask: Any
) -> None:
    answer = await ask()
    with pytest.raises(openai.BadRequestError, match="only responses with `background: true`"):
        await client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="events are kept of responses with"):
        await client.responses.retrieve(answer.id, stream=True)


async def test_events_that_there_are_not_are_refused(
    scheduler: FakeScheduler, http: httpx.AsyncClient, client: openai.AsyncOpenAI, ask: Any
) -> None:
    begun = await ask(background=True)
    await ended(client, begun.id)
    for query, code in (
        ("stream=true&starting_after=99", "attach_offset_gone"),
        ("stream=true&starting_after=x", "bad_parameter"),
        ("stream=true&starting_after=-1", "bad_parameter"),
        ("stream=yes", "bad_parameter"),
    ):
        told = await http.get(f"/responses/{begun.id}?{query}")
        assert (told.status_code, told.json()["error"]["code"]) == (400, code), query


async def test_a_client_that_leaves_a_stream_leaves_what_there_is_as_cancelled(
    scheduler: FakeScheduler, answer_with: AnswerWith, http: httpx.AsyncClient, eventually: Eventually
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 5
    body = {"input": "hello", "stream": True, "request_id": "left", "max_output_tokens": 100}
    async with http.stream("POST", "/responses", json=body) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                break
    async with asyncio.timeout(120):
        while (found := await http.get("/responses/resp_left")).status_code == 404:
            await asyncio.sleep(0.02)
    response_found = found.json()
    assert response_found["status"] == "cancelled"
    [message] = response_found["output"]
    assert TEXT.startswith(message["content"][0]["text"])


async def test_a_stream_that_breaks_is_stored_as_failed(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    scheduler.hold_after = 2
    body = {"input": "hello", "stream": True, "timeout": 0.5, "request_id": "late"}
    last = (await http.post("/responses", json=body)).text.strip().splitlines()[-1]
    response = json.loads(last.removeprefix("data: "))["response"]
    assert (response["status"], response["store"]) == ("failed", True)
    assert (await http.get("/responses/resp_late")).json() == response


async def test_a_frontend_that_stops_ends_what_outlasts_its_drain_as_failed(
    config: FrontendConfig, scheduler: FakeScheduler, frontend: FrontendServer, client: openai.AsyncOpenAI
) -> None:
    scheduler.hold_after = 2
    impatient = dataclasses.replace(config, drain_timeout_s=0.0)
    async with running_frontend(impatient) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=60) as leaving:
            begun = await leaving.responses.create(input="hello", background=True)
    found = await client.responses.retrieve(begun.id)
    assert found.status == "failed"
    assert "shut down" in found.error.message  # type: ignore[union-attr]


async def test_what_cannot_be_written_is_tried_again(
    frontend: FrontendServer,
    answer_with: AnswerWith,
    client: openai.AsyncOpenAI,
    ask: Any,
    scheduler: FakeScheduler,
    other: openai.AsyncOpenAI,
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 2
    begun = await ask(background=True, max_output_tokens=100)
    assert frontend._stored is not None
    connection = frontend._stored.store.store._connection
    connection.execute("PRAGMA query_only = ON")
    scheduler.hold_after = 1 << 30
    # Here it is known how it has ended, which is nowhere yet.
    found = await ended(client, begun.id)
    assert found.status == "completed"
    connection.execute("PRAGMA query_only = OFF")
    assert (await ended(other, begun.id)).to_dict() == found.to_dict()


def fill(connection: sqlite3.Connection) -> None:
    """Takes all the room that there is inside the file."""
    while True:
        connection.execute("INSERT INTO filler VALUES (zeroblob(1000))")


async def test_what_a_full_disk_has_no_room_for_is_written_once_there_is(
    frontend: FrontendServer,
    answer_with: AnswerWith,
    client: openai.AsyncOpenAI,
    ask: Any,
    scheduler: FakeScheduler,
    other: openai.AsyncOpenAI,
    eventually: Eventually,
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 2
    # More than fits into what is left of a page, compressed too.
    metadata = {str(n): secrets.token_hex(256) for n in range(16)}
    begun = [await ask(background=True, max_output_tokens=100, metadata=metadata) for _ in range(2)]
    assert frontend._stored is not None
    connection = frontend._stored.store.store._connection
    connection.execute("CREATE TABLE filler (body)")
    # It grows no more.
    connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        fill(connection)
    with pytest.raises(openai.InternalServerError, match="cannot be read or written now"):
        await ask(background=True, metadata=metadata)
    following = asyncio.create_task(_rest(client, begun[0].id, -1))
    scheduler.hold_after = 1 << 30
    # Who reads here reads on, and learns of the end.
    events = await following
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    assert (await other.responses.retrieve(begun[0].id)).status in ("queued", "in_progress")
    connection.execute("PRAGMA max_page_count = 100000")
    for each in begun:
        assert (await ended(other, each.id)).output_text == TEXT
    assert await _rest(other, begun[0].id, -1) == events
    await eventually(lambda: frontend._stored.num_running == 0)  # type: ignore[union-attr]


async def test_a_response_that_the_store_refuses_fails_alone(
    frontend: FrontendServer,
    answer_with: AnswerWith,
    client: openai.AsyncOpenAI,
    ask: Any,
    scheduler: FakeScheduler,
    other: openai.AsyncOpenAI,
    eventually: Eventually,
) -> None:
    answer_with(TEXT)
    scheduler.hold_after = 5
    bad, good = [await ask(background=True, max_output_tokens=100) for _ in range(2)]
    streams = [await each.responses.retrieve(bad.id, stream=True) for each in (client, other)]
    for stream in streams:
        assert (await anext(stream)).type == "response.created"
    assert frontend._stored is not None
    connection = frontend._stored.store.store._connection
    connection.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON events WHEN new.record ="
        f" (SELECT key FROM records WHERE id = '{bad.id}') BEGIN SELECT raise(ABORT, 'refused'); END"
    )
    scheduler.hold_after = 8
    await eventually(lambda: frontend.generation.num_running == 1)
    connection.execute("DROP TRIGGER refuse")
    here, _ = [[event.type async for event in stream] for stream in streams]
    # Not even that could be written for the other.
    assert here[-1] == "response.failed"
    for each in (client, other):
        found = await ended(each, bad.id)
        assert (found.status, found.error.code) == ("failed", "server_error")
        assert "could not be stored" in found.error.message
    with pytest.raises(openai.BadRequestError, match="which is failed"):
        await ask(previous_response_id=bad.id)
    scheduler.hold_after = 1 << 30
    for each in (client, other):
        assert (await ended(each, good.id)).output_text == TEXT
    await eventually(lambda: frontend._stored.num_running == 0)  # type: ignore[union-attr]


async def test_an_answer_that_cannot_be_encoded_fails_alone(
    answer_with: AnswerWith,
    client: openai.AsyncOpenAI,
    other: openai.AsyncOpenAI,
    ask: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_with(TEXT)
    take = ResponseAnswer.take

    def take_what_is_no_text(answer: ResponseAnswer, event: Any) -> bytes:
        if answer.response["metadata"] and isinstance(event, SequenceFinished):
            answer.response["output"].append({"text": "\ud800"})
        return take(answer, event)

    monkeypatch.setattr(ResponseAnswer, "take", take_what_is_no_text)
    bad = await ask(background=True, max_output_tokens=100, metadata={"is": "bad"})
    good = await ask(background=True, max_output_tokens=100)
    for each in (client, other):
        found = await ended(each, bad.id)
        assert (found.status, found.output) == ("failed", [])
        assert (await ended(each, good.id)).output_text == TEXT
