"""What HTTP servers answer, and what becomes of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from octavo.loadgen.http_transport import HttpTransport
from octavo.loadgen.servers import AnswerRecorder, Asking, Failure, Record, Secrets, ServerAddress, TargetError
from octavo.testbed.stack import free_address
from octavo.workload.job import Job
from octavo.workload.measures import Gaps

from .conftest import ScriptedServer, reply, stream

JOB = Job(0.0, 4, 3)
TOKEN = '{"choices":[{"index":0,"text":"a"}]}'
LAST = '{"choices":[{"index":0,"text":"b","finish_reason":"length"}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}'


@pytest.fixture
async def transport(scripted: ScriptedServer) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(scripted.target, Asking(), Secrets("a-secret-key"))
    yield transport
    await transport.aclose()


async def ask(transport: HttpTransport, job: Job = JOB) -> Record:
    record = Record(job, sent_s=0.0)
    async with asyncio.timeout(60):
        await transport.prepare(job, 0)(AnswerRecorder(record, Gaps(), asyncio.get_running_loop().time))
    return record


async def test_a_stream_is_counted(scripted: ScriptedServer, transport: HttpTransport) -> None:
    scripted.replies.append(stream(TOKEN, LAST, USAGE, "[DONE]"))
    assert await transport.open() == "m"
    record = await ask(transport)
    assert (record.num_tokens, record.prompt_tokens, record.deliveries) == (3, 4, 2)
    assert (scripted.paths, scripted.bodies[0]["model"]) == (["/v1/models", "/v1/completions"], "m")
    assert scripted.headers["authorization"] == "Bearer a-secret-key"


async def test_a_server_that_reports_no_usage_is_counted_by_its_chunks(
    scripted: ScriptedServer, transport: HttpTransport
) -> None:
    scripted.replies.append(stream(TOKEN, TOKEN, LAST))
    record = await ask(transport)
    assert (record.num_tokens, record.prompt_tokens) == (3, 0)
    assert record.served().job == JOB


async def test_an_answer_that_is_no_stream_is_one_delivery(scripted: ScriptedServer, transport: HttpTransport) -> None:
    whole = '{"choices":[{"index":0,"text":"a b c","finish_reason":"length"}],' + USAGE[len('{"choices":[],') :]
    scripted.replies.append(reply(200, whole))
    record = await ask(transport)
    assert (record.num_tokens, record.deliveries) == (3, 1)
    assert record.first_token_s is not None


async def test_a_tenant_is_spoken_for(scripted: ScriptedServer, transport: HttpTransport) -> None:
    scripted.replies.append(stream(TOKEN, LAST, USAGE, "[DONE]"))
    await ask(transport, Job(0.0, 4, 3, tenant="blue"))
    assert scripted.headers["x-tenant-id"] == "blue"


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (reply(429, '{"error":{"message":"no room","code":"queue_full"}}'), "HTTP 429 queue_full", "no room"),
        (reply(500, "oh no", "text/plain"), "HTTP 500", "oh no"),
        (
            stream(TOKEN, '{"error":{"message":"it broke","code":"broken"}}', "[DONE]"),
            "error in the stream broken",
            "it",
        ),
        (stream(TOKEN), "connection lost", "before its last event"),
        (stream(USAGE.replace("3", "0"), "[DONE]"), "empty answer", "without a token"),
        (reply(200, "<html>", "text/html"), "unreadable answer", "html"),
        (b"", "connection lost", "without sending a response"),
        (b"nonsense\r\n\r\n", "connection lost", ""),
        (reply(200, TOKEN)[:-5], "connection lost", "complete message body"),
    ],
)
async def test_an_answer_that_is_none_is_a_failure_of_its_kind(
    scripted: ScriptedServer, transport: HttpTransport, answer: bytes, kind: str, detail: str
) -> None:
    scripted.replies.append(answer)
    with pytest.raises(Failure) as caught:
        await ask(transport)
    assert caught.value.kind == kind
    assert detail in caught.value.detail


async def test_nobody_there_is_told_before_the_run_and_counted_in_it() -> None:
    transport = HttpTransport(ServerAddress("http", f"http://{free_address()}"), Asking(), Secrets())
    with pytest.raises(TargetError, match=r"cannot reach http://127.0.0.1:\d+: .*is it running\?"):
        await transport.open()
    with pytest.raises(Failure, match="cannot connect"):
        await ask(transport)
    await transport.aclose()


@pytest.mark.parametrize(
    ("key", "advice"),
    [(None, "asks for an API key; set OCTAVO_API_KEY"), ("a-secret-key", "does not take this API key")],
)
async def test_a_key_that_is_missing_or_wrong_is_told_but_never_shown(
    scripted: ScriptedServer, key: str | None, advice: str
) -> None:
    scripted.models = reply(401, '{"error":{"message":"who are you?"}}')
    transport = HttpTransport(scripted.target, Asking(), Secrets(key))
    with pytest.raises(TargetError, match=advice) as caught:
        await transport.open()
    assert "a-secret-key" not in f"{caught.value}{Secrets(key)!r}"
    await transport.aclose()


@pytest.mark.parametrize("models", [reply(200, '{"data":[{"id":"m"}]}'), reply(500, "oh no")])
async def test_a_model_that_is_not_listed_is_for_the_server_to_refuse(scripted: ScriptedServer, models: bytes) -> None:
    # Some load models when they are asked for, or list none.
    scripted.models = models
    transport = HttpTransport(scripted.target, Asking(model="mine"), Secrets())
    assert await transport.open() == "mine"
    scripted.replies.append(reply(404, '{"error":{"message":"I have m","code":"model_not_found"}}'))
    with pytest.raises(Failure, match="HTTP 404 model_not_found: I have m"):
        await ask(transport)
    await transport.aclose()


@pytest.mark.parametrize(
    "answer",
    [reply(404, "{}"), *(reply(200, body) for body in ("{}", "[]", "<html>", '{"data":[1]}', '{"data":[]}'))],
)
async def test_a_server_that_lists_no_models_needs_a_name(
    scripted: ScriptedServer, transport: HttpTransport, answer: bytes
) -> None:
    scripted.models = answer
    with pytest.raises(TargetError, match=r"does not list its models; .* name one by --model"):
        await transport.open()
