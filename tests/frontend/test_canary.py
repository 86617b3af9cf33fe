"""Nothing of a prompt, an answer or a key is ever logged or counted by, however calls end."""

import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import log_failure
from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb

# Looked for in the clear, and as the ids of its bytes' tokens.
WORD = "Zebrafinch"
KEY = f"sk-{WORD}-0123456789"
BEARER = f"Bearer {KEY}"
WRONG = f"Bearer sk-{WORD}-wrong"


@pytest.fixture
def config(config: FrontendConfig, tmp_path: Path) -> FrontendConfig:
    (tmp_path / "keys.json").write_text(json.dumps({"tenants": {"alice": {"keys": [KEY], "max_requests": 1}}}))
    return dataclasses.replace(config, api_keys=tmp_path / "keys.json", http_listen="127.0.0.1:0")


@pytest.fixture
async def http(frontend: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{frontend.http_port}"
    async with httpx.AsyncClient(base_url=url, headers={"authorization": BEARER}, trust_env=False, timeout=60) as http:
        yield http


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "octavo")
    # The client's own library, in the same process.
    caplog.set_level(logging.WARNING, "httpx")
    return caplog


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": f"{WORD} prompt", "stopping": {"max_new_tokens": 20}, **fields})


GRPC: dict[str, tuple[pb.GenerateRequest, str]] = {
    "answered": (request(), BEARER),
    "wrong key": (request(), WRONG),
    "no bearer": (request(), KEY),
    "bad parameter": (request(sampling={"temperature": -1}), BEARER),
    "bad role": (pb.GenerateRequest(chat={"messages": [{"role": WORD, "content": WORD}]}), BEARER),
    "bad template variables": (
        pb.GenerateRequest(
            chat={"messages": [{"role": "user", "content": WORD}], "template_variables_json": f'{{"{WORD}": 1'}
        ),
        BEARER,
    ),
    "bad grammar": (request(constraint={"grammar": f"{WORD}\nstart: ("}), BEARER),
    "bad expression": (request(constraint={"regex": f"({WORD}"}), BEARER),
    "bad schema": (request(constraint={"json_schema": f'{{"type": "{WORD}"}}'}), BEARER),
    "other tenant": (request(scheduling={"tenant": f"{WORD}\nx"}), BEARER),
    "other model": (request(model=WORD), BEARER),
    "no such prefix": (request(cache={"pinned_prefix": WORD}), BEARER),
    "unknown field": (pb.GenerateRequest.FromString(b"\xa2\x06\x0a" + WORD.encode()), BEARER),
    "too long": (request(text=WORD * 1000), BEARER),
    "stop string": (request(stopping={"stop_strings": [WORD], "max_new_tokens": 20}), BEARER),
}
HTTP: dict[str, tuple[str, bytes, dict[str, str]]] = {
    path + " " + name: (path, body, headers)
    for path, prompt in {
        "/v1/completions": f'"prompt": "{WORD}"',
        "/v1/chat/completions": f'"messages": [{{"role": "user", "content": "{WORD}"}}]',
        "/v1/responses": f'"input": "{WORD}"',
        "/tokenize": f'"prompt": "{WORD}"',
    }.items()
    for name, body, headers in (
        ("answered", f"{{{prompt}}}".encode(), {}),
        ("streamed", f'{{{prompt}, "stream": true}}'.encode(), {}),
        ("wrong key", f"{{{prompt}}}".encode(), {"authorization": WRONG}),
        ("bad JSON", f'{{{prompt}, "x": {WORD}'.encode(), {}),
        ("bad type", f'{{{prompt}, "temperature": "{WORD}", "model": 5}}'.encode(), {}),
        ("bad value", f'{{{prompt}, "response_format": {{"type": "{WORD}"}}}}'.encode(), {}),
        ("bad UTF-8", f'{{{prompt}, "y": "'.encode() + b'\xff"}', {}),
        ("unknown field", f'{{{prompt}, "{WORD}": 1}}'.encode(), {}),
        ("odd headers", f"{{{prompt}}}".encode(), {"x-request-id": WORD, "traceparent": WORD}),
    )
} | {"unknown path": (f"/v1/{WORD}%0Ax?key={KEY}", b"{}", {})}


async def over_grpc(stub: Any, message: pb.GenerateRequest, authorization: str) -> grpc.StatusCode:
    try:
        await collect(stub.Generate(message, metadata=(("authorization", authorization),), timeout=60))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def needles(frontend: FrontendServer) -> list[str]:
    ids = frontend.generation.tokenizer.encode(WORD)
    return [WORD.lower(), ", ".join(map(str, ids)), ",".join(map(str, ids))]


def check(logged: pytest.LogCaptureFixture, frontend: FrontendServer, metrics: str) -> None:
    text = (logged.text + metrics).lower()
    assert [line for line in text.splitlines() for needle in needles(frontend) if needle in line] == []
    # Lines of their own are tracebacks' alone.
    assert [record for record in logged.records if "\n" in record.getMessage()] == []


def answers_with_canaries(scheduler: FakeScheduler, frontend: FrontendServer) -> None:
    ids = frontend.generation.tokenizer.encode(WORD * 3)
    scheduler.answer = lambda request, index: [*ids, 257]


async def test_calls_that_end_well_and_badly(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, http: httpx.AsyncClient, logged: Any
) -> None:
    answers_with_canaries(scheduler, frontend)
    codes = {name: await over_grpc(stub, *call) for name, call in GRPC.items()}
    assert codes["answered"] is grpc.StatusCode.OK
    assert codes["wrong key"] is grpc.StatusCode.UNAUTHENTICATED
    statuses = {name: (await http.post(p, content=b, headers=h)).status_code for name, (p, b, h) in HTTP.items()}
    assert statuses["/v1/completions answered"] == statuses["/v1/chat/completions streamed"] == 200
    assert statuses["/v1/chat/completions wrong key"] == 401
    assert max(statuses.values()) < 500
    assert grpc.StatusCode.INTERNAL not in codes.values()
    check(logged, frontend, (await http.get("/metrics")).text)


async def test_calls_that_are_refused_and_left(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, http: httpx.AsyncClient, logged: Any, eventually: Any
) -> None:
    answers_with_canaries(scheduler, frontend)
    scheduler.hold_after = 3
    held = stub.Generate(request(), metadata=(("authorization", BEARER),))
    await eventually(lambda: bool(scheduler.running))
    assert await over_grpc(stub, request(), BEARER) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await http.post("/v1/completions", json={"prompt": WORD})).status_code == 429
    held.cancel()
    await eventually(lambda: not scheduler.running)
    async with http.stream("POST", "/v1/completions", json={"prompt": WORD, "stream": True}) as answer:
        assert answer.status_code == 200
        # Kept, for it takes the connection with it.
        chunks = answer.aiter_bytes()
        await anext(chunks)
    await eventually(lambda: not frontend.generation.num_running)
    check(logged, frontend, (await http.get("/metrics")).text)


async def test_faults_of_ours(
    scheduler: FakeScheduler,
    frontend: FrontendServer,
    stub: Any,
    http: httpx.AsyncClient,
    logged: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **settings: Any) -> Any:
        try:
            raise KeyError(WORD)
        except KeyError as error:
            raise RuntimeError(f"cannot take {WORD}") from error

    monkeypatch.setattr("octavo.frontend.text.pool.TextPool.encode", fail)
    monkeypatch.setattr("octavo.frontend.text.pool.TextPool.decode", fail)
    assert await over_grpc(stub, request(), BEARER) is grpc.StatusCode.INTERNAL
    for path, body in {
        "/v1/completions": {"prompt": WORD},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": WORD}], "stream": True},
        "/tokenize": {"prompt": WORD},
    }.items():
        answer = await http.post(path, json=body)
        assert "the server failed on this request; its log says why" in answer.text
    assert "RuntimeError" in logged.text, "the log says why"
    assert "in fail" in logged.text, "the log says where"
    check(logged, frontend, (await http.get("/metrics")).text)


def test_a_fault_is_logged_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        try:
            raise ValueError(WORD)
        except ValueError as error:
            raise UnicodeDecodeError("utf-8", WORD.encode(), 0, 1, WORD) from error

    try:
        fail()
    except UnicodeDecodeError:
        log_failure(logging.getLogger("octavo.test"), "it failed")
    assert caplog.messages == ["it failed"]
    assert "ValueError" in caplog.text
    assert "direct cause" in caplog.text
    assert "UnicodeDecodeError" in caplog.text
    assert WORD not in caplog.text
