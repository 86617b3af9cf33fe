"""Serves what is asked of stored responses: /v1/responses/{id}, its events, its end."""

import asyncio
from typing import Final

from starlette.responses import Response

from octavo.frontend.errors import bad_parameter
from octavo.frontend.http.streaming import EventStream
from octavo.frontend.stored.call import Call, json, number
from octavo.frontend.stored.service import POLL_S, check_number
from octavo.frontend.stored.store import Store

# Seconds that a cancellation waits for another frontend to do it.
_CANCEL_S: Final = 10.0
_MOST: Final = 1 << 53
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False, "": False}


async def retrieve(call: Call) -> Response:
    """Answers with a response as it is now, or with the events of one that was computed in the background."""
    record, stored = await call.record(), call.stored
    run = stored.get(record.key)
    flag = call.request.query_params.get("stream", "").lower()
    if flag not in _FLAGS:
        raise bad_parameter("stream", repr(flag[:64]), "it must be true or false")
    if not _FLAGS[flag]:
        return json(run.answer.response if run else record.body)
    if not record.is_background:
        rule = "events are kept of responses with `background: true` alone; ask without stream"
        raise bad_parameter("stream", "true", rule)
    after = number(call.request, "starting_after", -1, 0, _MOST)
    if run or record.ended:
        check_number(after + 1, run.num_events if run else record.num_events)
    if call.request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return EventStream(stored.follow(call.tenant, record.id, record.key, after + 1), ping_s=call.api.ping_s)


async def cancel(call: Call) -> Response:
    """Ends a response that is computed in the background, and answers with what there is of it."""
    record = await call.record()
    if not record.is_background:
        rule = "only responses with `background: true` can be cancelled; leave its stream to end another"
        raise bad_parameter("response_id", repr(record.id[:128]), rule)
    if run := call.stored.get(record.key):
        run.stop()
        await run.over()
        return json(run.answer.response)
    if not record.ended:
        await call.stored.store.call(Store.cancel, call.tenant, record.id)
        until = asyncio.get_running_loop().time() + _CANCEL_S
        while not record.ended and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(POLL_S)
            record = await call.record()
    return json(record.body)
