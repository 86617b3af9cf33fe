"""Serves POST /v1/responses where responses are kept: what goes on from earlier ones, and what nobody waits for."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.responses import Response

from octavo.frontend.api.body import decoded, given, read_call
from octavo.frontend.api.endpoint import Api, IndexedEvent, fresh_id
from octavo.frontend.errors import ServiceError, bad_parameter
from octavo.frontend.http.connection import while_connected
from octavo.frontend.http.streaming import EventStream
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.response_answer import ResponseAnswer
from octavo.frontend.openai.responses import ResponsesCall, answered, prepared, whole_answer
from octavo.frontend.openai.responses_input import RESPONSES_UNSUPPORTED, Item, ResponsesBody
from octavo.frontend.stored.background import BackgroundRun
from octavo.frontend.stored.call import Call
from octavo.frontend.stored.service import StoredResponses
from octavo.frontend.stored.store import Store
from octavo.frontend.stored.values import Named, NewRecord

# Seconds that an answer which is complete waits until it is stored.
_KEEP_S: Final = 10.0


# A union is no type to a type checker.
_NAME: Final[Any] = str | Named


async def create(stored_call: Call) -> Response:
    """Answers one call."""
    api, request, stored = stored_call.api, stored_call.request, stored_call.stored
    body, unknown = await read_call(request, ResponsesBody, RESPONSES_UNSUPPORTED, api.generation.beginnings)
    conversation = _conversation_of(body)
    _check(body, conversation)
    body = msgspec.structs.replace(body, request_id=body.request_id or fresh_id())
    new = NewRecord(stored_call.kind, stored_call.tenant, f"resp_{body.request_id}", b"", given(body.input))
    new, earlier = await stored.store.call(_after_earlier, new, body, conversation)
    body = msgspec.structs.replace(body, input=msgspec.Raw(new.input))
    stored_as: dict[str, Any] = {
        "store": body.store is not False,
        "background": bool(body.background),
        "previous_response_id": body.previous_response_id,
    }
    if conversation:
        stored_as["conversation"] = {"id": conversation}
    call = prepared(api, request, body, unknown, earlier, stored_as)
    if body.store is False:
        return await answered(api, request, call)
    events = call.events(api, request)
    if body.background:
        return await _begun(api, stored, replace(new, is_background=True), call, events)
    answer = call.answer
    if body.stream:
        source = _stream(stored, new, answer, events)
        return EventStream(source, ping_s=api.ping_s, headers=call.headers, on_error=answer.fail)
    await while_connected(request, whole_answer(answer, events))
    await _keep(stored, new, answer)
    return Response(encode(answer.response), headers=call.headers, media_type="application/json")


async def _begun(
    api: Api,
    stored: StoredResponses,
    new: NewRecord,
    call: ResponsesCall,
    events: AsyncGenerator[IndexedEvent],
) -> Response:
    """Has a response computed in the background, and returns it as it begins, or its events."""
    run = BackgroundRun(call.answer, events)
    # With its first step it is admitted, or refused.
    await asyncio.sleep(0)
    if run.error:
        raise run.error
    try:
        key = await stored.store.call(Store.add, replace(new, body=encode(call.answer.response)), ended=False)
    except BaseException:
        run.stop()
        raise
    stored.add(key, run)
    if call.body.stream:
        source = stored.follow(new.tenant, new.id, key, 0)
        return EventStream(source, ping_s=api.ping_s, headers=call.headers)
    return Response(encode(call.answer.response), headers=call.headers, media_type="application/json")


async def _stream(
    stored: StoredResponses, new: NewRecord, answer: ResponseAnswer, events: AsyncGenerator[IndexedEvent]
) -> AsyncGenerator[bytes]:
    """Yields the events of a response, which is stored before the last of them is sent, or when its client leaves."""
    try:
        async with aclosing(events):
            async for _, event in events:
                yield answer.take(event)
        answer.sum_up()
        await asyncio.shield(stored.apart(_keep(stored, new, answer)))
        yield answer.finish()
    except ServiceError as error:
        if not answer.has_begun:
            answer.response["store"] = False
            raise
        answer.note_failure(error)
        await asyncio.shield(stored.apart(_keep(stored, new, answer)))
        yield answer.fail(error)
    except (GeneratorExit, asyncio.CancelledError):
        if answer.has_begun and answer.response["status"] == "in_progress":
            answer.cancel()
            stored.apart(_keep(stored, new, answer))
        raise


async def _keep(stored: StoredResponses, new: NewRecord, answer: ResponseAnswer) -> None:
    """Stores a response that has ended, which says so itself where that cannot be."""
    try:
        async with asyncio.timeout(_KEEP_S):
            await stored.store.call(Store.add, replace(new, body=encode(answer.response)), ended=True)
    except (ServiceError, TimeoutError):
        answer.response["store"] = False


def _conversation_of(body: ResponsesBody) -> str:
    """Returns the id of the conversation that a call names; empty where it names none."""
    named: Any = decoded("conversation", body.conversation, _NAME)
    return named.id if isinstance(named, Named) else named or ""


def _check(body: ResponsesBody, conversation: str) -> None:
    """Raises `InvalidRequest` for fields that exclude each other."""
    if conversation and body.previous_response_id:
        raise bad_parameter("conversation", "not alone", "previous_response_id excludes it; leave one of them out")
    if body.store is not False:
        return
    for field, is_used in (("background", body.background), ("conversation", conversation)):
        if is_used:
            raise bad_parameter(field, "used", "it needs what `store: false` forbids; leave one of them out")


def _after_earlier(
    store: Store, new: NewRecord, body: ResponsesBody, conversation: str
) -> tuple[NewRecord, Sequence[Item]]:
    """Returns the record with what it goes on from and without references, and all items that were said before.

    Raises `AlreadyExists` where its id is taken, and what `Store` raises.
    """
    if body.store is not False:
        store.check_free(new.tenant, new.id)
    new = replace(new, input=store.resolved(new.tenant, "input", new.input))
    if body.previous_response_id:
        before = store.turns_before(new.tenant, body.previous_response_id)
        new = replace(new, previous=before.key)
    elif conversation:
        before = store.conversation_before(new.tenant, conversation)
        new = replace(new, conversation=before.key)
    else:
        return new, ()
    return new, [item for text in before.items for item in msgspec.json.decode(text, type=list[Item])]
