"""How much of a prompt was found computed, and why not more: in usage, in headers, and on request in the answer."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import bearer, write_keys
from octavo.testing.fakes.fake_admin import FakeAdmin, fake_admin
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import admin_pb2 as pb

HEADER = "x-octavo-cached-tokens"
EXPLAIN = {"x-octavo-explain": "cache"}
TALK = [{"role": "user", "content": "hello there, who are you?"}]
STREAM_USAGE = {"stream_options": {"include_usage": True}}
# Route -> body, what is added for a stream, and where usage says it.
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (
        {"messages": TALK, "max_tokens": 4},
        STREAM_USAGE,
        ("usage", "prompt_tokens_details", "cached_tokens"),
    ),
    "/v1/completions": (
        {"prompt": "hello there", "max_tokens": 4},
        STREAM_USAGE,
        ("usage", "prompt_tokens_details", "cached_tokens"),
    ),
    "/v1/responses": (
        {"input": "hello there", "max_output_tokens": 4},
        {},
        ("response", "usage", "input_tokens_details", "cached_tokens"),
    ),
    "/v1/messages": ({"messages": TALK, "max_tokens": 4}, {}, ("usage", "cache_read_input_tokens")),
}


@pytest.fixture
async def admin() -> AsyncIterator[FakeAdmin]:
    async with fake_admin() as admin:
        yield admin


@pytest.fixture
def config(config: FrontendConfig, admin: FakeAdmin) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0", scheduler_admin=admin.address)


@pytest.fixture
async def http(frontend: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{frontend.http_port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
def scheduler(scheduler: FakeScheduler) -> FakeScheduler:
    """Finds eight tokens of each prompt computed."""
    scheduler.tamper = lambda delta: [msgspec.structs.replace(delta, cached_prompt_tokens=8)]
    return scheduler


def lookup(scheduler: FakeScheduler, request_id: str, **fields: Any) -> pb.Explanation:
    frontend_id = f"{scheduler.frontend_id:016x}"
    status = pb.RequestStatus(request_id=request_id, frontend_id=frontend_id, state=pb.REQUEST_STATE_WAITING)
    return pb.Explanation(status=status, cache=pb.CacheLookup(tokens=8, **fields))


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def at(found: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


@pytest.mark.parametrize("path", ROUTES)
async def test_usage_and_a_header_count_what_was_found(
    path: str, scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    body, more, where = ROUTES[path]
    whole = await http.post(path, json=body)
    assert at(whole.json(), where if where[0] != "response" else where[1:]) == 8
    stream = await http.post(path, json={**body, **more, "stream": True})
    assert [count for event in events_of(stream) if (count := at(event, where)) is not None][-1] == 8
    assert [answer.headers[HEADER] for answer in (whole, stream)] == ["8", "8"]


async def test_the_header_is_the_sum_of_all_prompts(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 2})
    assert answer.headers[HEADER] == "24"


async def test_what_has_no_prompt_has_no_header(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/completions", json={"prompt": "a", "temperature": -1})
    for answer in (refused, await http.get("/v1/models"), await http.post("/tokenize", json={"prompt": "a"})):
        assert HEADER not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_an_answer_says_why_no_more_was_found_where_that_is_asked(
    path: str, stream: bool, admin: FakeAdmin, scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    await http.post(path, json=ROUTES[path][0])
    differs = pb.CacheLookup.REASON_DIFFERS
    admin.explanations["mine"] = [
        lookup(scheduler, "mine", reason=differs, position=9, token=104, other_token=105),
        pb.Explanation(status=pb.RequestStatus(request_id="mine", frontend_id="another's")),
    ]
    plain = {**ROUTES[path][0], "request_id": "mine", "stream": stream, "seed": 3}
    answer = await http.post(path, json=plain, headers=EXPLAIN)
    assert answer.status_code == 200
    if stream:
        [told] = [line for line in answer.text.splitlines() if line.startswith(": cache ")]
        found = json.loads(told.removeprefix(": cache "))
        assert answer.text.index(told) < answer.text.rindex("data: ")
        assert len(events_of(answer)) == len(events_of(await http.post(path, json=plain)))
    else:
        found = answer.json()["cache"]
        assert "cache" not in (await http.post(path, json=plain)).json()
    [only] = found
    assert (only["tokens"], only["reason"], only["position"]) == (8, "differs", 9)
    assert (only["token"], only["other_token"]) == (104, 105)
    assert admin.explained == ["mine"]


async def test_each_prompt_of_a_call_has_its_own(
    admin: FakeAdmin, scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    for n in range(3):
        admin.explanations[f"mine-{n}"] = [lookup(scheduler, f"mine-{n}", position=n)]
    body = {"prompt": ["a", "b", "c"], "max_tokens": 1, "request_id": "mine"}
    answer = await http.post("/v1/completions", json=body, headers=EXPLAIN)
    assert [each["position"] for each in answer.json()["cache"]] == [0, 1, 2]


async def test_an_explanation_that_cannot_be_had_leaves_the_answer(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=EXPLAIN)
    assert len(answer.json()["choices"][0]["text"]) == 2
    assert [each["error"]["code"] for each in answer.json()["cache"]] == ["request_not_found"]


async def test_an_error_is_as_without(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        body = {"prompt": "a", "temperature": -1, "stream": stream}
        answer = await http.post("/v1/completions", json=body, headers=EXPLAIN)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def test_what_else_is_to_be_explained_is_refused(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-octavo-explain": "everything"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-octavo-explain")
    assert scheduler.submitted == []


class TestWithKeys:
    @pytest.fixture
    def config(self, config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
        return dataclasses.replace(config, api_keys=write_keys(tmp_path / "keys.json"))

    async def test_a_tenant_is_told_of_its_own_request_as_that_tenant(
        self, admin: FakeAdmin, scheduler: FakeScheduler, http: httpx.AsyncClient
    ) -> None:
        headers = {**EXPLAIN, "authorization": bearer("alice")}
        await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        assert admin.askers == ["alice"]
        # The scheduler's name of it, which no other tenant's request has.
        [request] = scheduler.submitted
        assert admin.explained == [request.request_id]


class TestWithoutAdmin:
    @pytest.fixture
    def config(self, config: FrontendConfig) -> FrontendConfig:
        return dataclasses.replace(config, scheduler_admin="")

    async def test_the_call_is_refused_before_it_runs(self, scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json={"prompt": "a"}, headers=EXPLAIN)
        assert answer.status_code == 503
        assert "--scheduler-admin" in answer.json()["error"]["message"]
        assert scheduler.submitted == []
