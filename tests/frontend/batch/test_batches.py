"""Batches of calls, through the official client."""

import asyncio
import dataclasses
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.frontend.batch.conftest import a_line, answers, begin, client_of, ended, jsonl, until, upload

from octavo.frontend.batch.lines import ENDPOINTS
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.wire.requests import RejectReason

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
KEYS = {"alice": "alices-key-of-20-letters", "bob": "bobs-key-of-20-letters"}


async def test_each_call_is_answered_as_over_http(scheduler: FakeScheduler, client: openai.AsyncOpenAI) -> None:
    lines = [a_line(f"call-{n}", prompt=f"prompt {n}", seed=n) for n in range(9)]
    batch = await begin(client, jsonl(*lines), metadata={"project": "x"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"project": "x"})
    batch = await ended(client, batch)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 9, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    found = await answers(client, batch.output_file_id)
    assert found.keys() == {line["custom_id"] for line in lines}
    for n, line in enumerate(lines):
        told = found[f"call-{n}"]
        assert (told["error"], told["response"]["status_code"]) == (None, 200)
        alone = await client.completions.create(model="byte-model", **line["body"])
        assert told["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    file = await client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, "chat.completion"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}, "response"),
    ],
)
async def test_other_endpoints_have_their_own_answers(
    endpoint: str, body: dict[str, Any], kind: str, scheduler: FakeScheduler, client: openai.AsyncOpenAI
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    batch = await ended(client, await begin(client, jsonl(line), endpoint=endpoint))
    assert (batch.status, batch.error_file_id) == ("completed", None)
    found = await answers(client, batch.output_file_id)
    assert found["a"]["response"]["body"]["object"] == kind


async def test_every_endpoint_that_a_batch_may_name_is_served(
    scheduler: FakeScheduler, frontend: FrontendServer, client: openai.AsyncOpenAI
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", trust_env=False) as http:
        for endpoint in ENDPOINTS:
            told = await http.post(endpoint, json={"nothing": "of use"})
            assert told.json()["error"]["code"] == "bad_parameter", endpoint
    with pytest.raises(openai.BadRequestError, match=f"it must be one of {', '.join(ENDPOINTS)}"):
        await begin(client, jsonl(a_line("a")), endpoint="/v1/messages")


async def test_calls_run_at_the_lowest_priority_and_few_at_once(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, eventually: Eventually
) -> None:
    scheduler.hold_after = 0
    batch = await begin(client, jsonl(*(a_line(str(n), priority=-9) for n in range(10))))
    await eventually(lambda: len(scheduler.running) == 4)
    await asyncio.sleep(0.1)
    assert len(scheduler.submitted) == 4
    assert {request.priority for request in scheduler.submitted} == {-100}
    scheduler.hold_after = 1 << 30
    batch = await ended(client, batch)
    assert batch.request_counts.completed == 10


async def test_a_call_that_fails_has_its_error_in_the_error_file(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI
) -> None:
    lines = [
        a_line("fine"),
        a_line("bad", temperature=-1),
        a_line("stream", stream=True),
        a_line("model", model="other"),
        a_line("unknown", colour="red"),
    ]
    batch = await ended(client, await begin(client, jsonl(*lines)))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 5, 2, 3)
    failed = await answers(client, batch.error_file_id)
    bad = failed["bad"]["response"]
    assert (bad["status_code"], bad["body"]["error"]["param"]) == (400, "temperature")
    assert failed["model"]["response"]["status_code"] == 404
    assert (failed["stream"]["response"], failed["stream"]["error"]["code"]) == (None, "unsupported_field")
    fine = await answers(client, batch.output_file_id)
    assert fine.keys() == {"fine", "unknown"}
    assert fine["unknown"]["response"]["headers"] == {"x-octavo-unknown-fields": "colour"}


async def test_bad_lines_are_told_by_their_numbers_and_nothing_is_run(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI
) -> None:
    content = jsonl(
        a_line("a"),
        "no JSON",
        "",
        a_line("a"),
        a_line("b", url="/v1/chat/completions"),
        {"custom_id": "c", "method": "GET", "url": "/v1/completions", "body": {}},
        {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": []},
        {"method": "POST", "url": "/v1/completions", "body": {}},
    )
    batch = await ended(client, await begin(client, content))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_url", "url"),
        (6, "invalid_request", None),
        (7, "invalid_request", None),
        (8, "invalid_request", None),
    ]
    assert scheduler.submitted == []


async def test_an_empty_file_fails(scheduler: FakeScheduler, client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await begin(client, b"\n \n"))
    assert (batch.status, batch.errors.data[0].code, batch.errors.data[0].line) == ("failed", "empty_file", None)


async def test_what_finds_no_room_is_sent_again(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, eventually: Eventually
) -> None:
    scheduler.rejection = RejectReason.QUEUE_FULL
    batch = await begin(client, jsonl(a_line("a")))
    await eventually(lambda: len(scheduler.submitted) >= 2)
    scheduler.rejection = None
    batch = await ended(client, batch)
    assert (batch.request_counts.completed, batch.error_file_id) == (1, None)


async def test_a_cancelled_batch_keeps_what_was_answered(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, eventually: Eventually
) -> None:
    scheduler.answer = lambda request, index: [104] * (4 if len(request.prompt_token_ids) == 1 else 400)
    lines = [a_line("short", prompt="a"), *(a_line(f"long-{n}", max_tokens=400) for n in range(6))]
    scheduler.hold_after = 10
    batch = await begin(client, jsonl(*lines))
    await until(client, batch, lambda found: found.request_counts.completed == 1)
    await eventually(lambda: len(scheduler.running) == 4)
    asked = await client.batches.cancel(batch.id)
    assert asked.status in ("cancelling", "finalizing", "cancelled")
    batch = await ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("cancelled", 7, 1, 6)
    assert (await answers(client, batch.output_file_id)).keys() == {"short"}
    failed = await answers(client, batch.error_file_id)
    assert {line["error"]["code"] for line in failed.values()} == {"batch_cancelled"}
    await eventually(lambda: not scheduler.running)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await client.batches.cancel(batch.id)


async def test_what_is_not_answered_within_the_window_has_expired(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI
) -> None:
    scheduler.hold_after = 0
    batch = await begin(client, jsonl(*(a_line(str(n)) for n in range(6))), completion_window="1s")
    batch = await ended(client, batch)
    assert (batch.status, batch.request_counts.failed, batch.output_file_id) == ("expired", 6, None)
    failed = await answers(client, batch.error_file_id)
    assert {line["error"]["code"] for line in failed.values()} == {"batch_expired"}


async def test_a_batch_goes_on_after_a_restart_and_answers_no_call_twice(
    config: FrontendConfig, scheduler: FakeScheduler, eventually: Eventually
) -> None:
    lines = [a_line(str(n), prompt=f"prompt {n}") for n in range(12)]
    scheduler.answer = lambda request, index: [104] * 4
    config = dataclasses.replace(config, drain_timeout_s=0.0)
    async with running_frontend(config) as (first, _), client_of(first) as client:
        batch = await begin(client, jsonl(*lines))
        await until(client, batch, lambda found: found.request_counts.completed >= 3)
        scheduler.hold_after = 0
        # Those under way get no further.
        await eventually(lambda: len(scheduler.running) == 4 or len(scheduler.submitted) == 12)
    scheduler.hold_after = 1 << 30
    num_before = len(scheduler.submitted)
    async with running_frontend(config) as (second, _), client_of(second) as client:
        batch = await ended(client, batch)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 12, 12, 0)
        found = await answers(client, batch.output_file_id)
        assert found.keys() == {line["custom_id"] for line in lines}
    again = [bytes(request.prompt_token_ids) for request in scheduler.submitted[num_before:]]
    assert len(again) <= 9
    assert len(set(again)) == len(again)


async def test_a_line_that_was_cut_off_in_the_middle_is_answered_again(
    config: FrontendConfig, scheduler: FakeScheduler, eventually: Eventually
) -> None:
    config = dataclasses.replace(config, drain_timeout_s=0.0, max_batch_requests=1)
    scheduler.hold_after = 4
    async with running_frontend(config) as (first, _), client_of(first) as client:
        lines = jsonl(a_line("a"), a_line("b", max_tokens=9))
        batch = await begin(client, lines)
        await until(client, batch, lambda found: found.request_counts.completed == 1)
    assert config.batch_directory
    outputs = [
        path for path in config.batch_directory.glob("tenants/*/files/*.data") if b"batch_req" in path.read_bytes()
    ]
    [output] = outputs
    output.write_bytes(output.read_bytes() + b'{"id": "batch_req_1", "custom_id": "b", "resp')
    scheduler.hold_after = 1 << 30
    async with running_frontend(config) as (second, _), client_of(second) as client:
        batch = await ended(client, batch)
        found = await answers(client, batch.output_file_id)
    assert found.keys() == {"a", "b"}
    assert batch.request_counts.completed == 2


async def test_frontends_share_a_directory_and_each_batch_has_one_worker(
    config: FrontendConfig, scheduler: FakeScheduler, eventually: Eventually
) -> None:
    scheduler.hold_after = 0
    async with (
        running_frontend(config) as (first, _),
        running_frontend(config) as (second, _),
        client_of(first) as one,
        client_of(second) as other,
    ):
        batch = await begin(one, jsonl(*(a_line(str(n)) for n in range(3))))
        await eventually(lambda: len(scheduler.running) == 3)
        assert (await other.batches.retrieve(batch.id)).status == "in_progress"
        assert second._batches is not None
        second._batches.runner.look()
        await asyncio.sleep(0.2)
        assert len(scheduler.submitted) == 3
        await other.batches.cancel(batch.id)
        assert first._batches is not None
        first._batches.runner.look()
        assert (await ended(other, batch)).status == "cancelled"


async def test_a_batch_outlives_its_input_file(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, eventually: Eventually
) -> None:
    scheduler.hold_after = 0
    batch = await begin(client, jsonl(*(a_line(str(n)) for n in range(6))))
    await eventually(lambda: len(scheduler.running) == 4)
    await client.files.delete(batch.input_file_id)
    scheduler.hold_after = 1 << 30
    assert (await ended(client, batch)).request_counts.completed == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        (
            {"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 0}}},
            "output_expires_after.seconds",
        ),
    ],
)
async def test_bad_parameters_are_named(
    fields: dict[str, Any], param: str, scheduler: FakeScheduler, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await begin(client, jsonl(a_line("a")), **fields)
    assert param in str(refused.value.param)


async def test_only_files_of_calls_make_batches(scheduler: FakeScheduler, client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await begin(client, jsonl(a_line("a"))))
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        await client.batches.create(
            input_file_id=batch.output_file_id, endpoint="/v1/completions", completion_window="24h"
        )


async def test_batches_are_listed_page_by_page(scheduler: FakeScheduler, client: openai.AsyncOpenAI) -> None:
    made = {(await begin(client, jsonl(a_line("a")))).id for _ in range(3)}
    page = await client.batches.list(limit=2)
    assert page.has_more
    listed = [batch.id async for batch in page]
    assert len(listed) == 3
    assert set(listed) == made
    with pytest.raises(openai.BadRequestError, match="limit"):
        await client.batches.list(limit=101)


class TestTenants:
    @pytest.fixture
    def config(self, config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
        keys = tmp_path / "keys.json"
        keys.write_text(json.dumps({"tenants": {name: {"keys": [key]} for name, key in KEYS.items()}}))
        return dataclasses.replace(config, api_keys=keys)

    async def test_what_is_anothers_is_not_there(self, scheduler: FakeScheduler, frontend: FrontendServer) -> None:
        async with client_of(frontend, KEYS["alice"]) as alice, client_of(frontend, KEYS["bob"]) as bob:
            batch = await ended(alice, await begin(alice, jsonl(a_line("a"))))
            assert batch.status == "completed"
            assert {request.tenant for request in scheduler.submitted} == {"alice"}
            for asked in (
                bob.files.retrieve(batch.input_file_id),
                bob.files.content(batch.output_file_id),
                bob.files.delete(batch.input_file_id),
                bob.batches.retrieve(batch.id),
                bob.batches.cancel(batch.id),
                bob.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    await asked
            assert [each async for each in await bob.files.list()] == []
            assert [each async for each in await bob.batches.list()] == []


async def test_nobody_else_may_read_what_is_kept(
    config: FrontendConfig, scheduler: FakeScheduler, client: openai.AsyncOpenAI, eventually: Eventually
) -> None:
    await ended(client, await begin(client, jsonl(a_line("a"))))
    directory = config.batch_directory
    assert directory is not None
    await eventually(lambda: not list(directory.glob("open/*")))
    found = list(directory.rglob("*"))
    assert len([path for path in found if path.is_file()]) >= 5
    for path in (directory, *found):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


class TestWithoutADirectory:
    @pytest.fixture
    def config(self, config: FrontendConfig) -> FrontendConfig:
        return dataclasses.replace(config, batch_directory=None)

    async def test_the_routes_say_what_is_missing(self, scheduler: FakeScheduler, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="--batch-directory"):
            await upload(client, b"{}")
        with pytest.raises(openai.NotFoundError, match="--batch-directory"):
            await client.batches.list()
