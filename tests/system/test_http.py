"""The HTTP port of a frontend among real processes."""

import json
import signal
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.testbed.stack import Stack
from octavo.v1.admin_pb2 import BlockState

from .conftest import StartStack

pytestmark = pytest.mark.system

ASK = {"prompt": [f"prompt {i}" for i in range(6)], "seed": 7, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def stack(new_stack: StartStack) -> Stack:
    # Slow enough to be caught in the midst of an answer.
    return new_stack(OCTAVO_FAKE_STEP_MS="10").start_all(workers=2)


def texts_of(lines: Iterator[str]) -> dict[int, str]:
    """The text of each choice of a stream, which must end with [DONE]."""
    texts: dict[int, str] = {}
    for line in lines:
        if line == "data: [DONE]":
            return texts
        if line.startswith("data: "):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    raise AssertionError("the stream ended without [DONE]")


def test_streams_go_on_when_a_worker_is_killed(stack: Stack) -> None:
    with stack.http() as http:
        whole = http.post("/v1/completions", json=ASK).json()
        with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(lines)
            stack.kill("worker-0")
            texts = texts_of(iter([first, *lines]))
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    stack.wait_idle()


def test_a_frontend_that_stops_finishes_what_it_streams(stack: Stack) -> None:
    with stack.http() as http, http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        stack.processes["frontend"].send_signal(signal.SIGTERM)
        assert len(texts_of(iter([first, *lines]))) == 6
    assert stack.processes["frontend"].wait(60) == 0


def test_the_page_watches_the_scheduler(stack: Stack) -> None:
    body = {**ASK, "max_tokens": 1000, "stream": True}
    with stack.http() as http, http.stream("POST", "/v1/completions", json=body):
        snapshot = next(
            found for found in snapshots(http) if any(request["worker_id"] for request in found["requests"])
        )
    assert len(snapshot["load"]["workers"]) == 2
    request = next(request for request in snapshot["requests"] if request["worker_id"])
    [home] = [worker for worker in snapshot["workers"] if worker["id"] == request["worker_id"]]
    [owner] = [owner for owner in home["owners"] if owner["request_id"] == request["request_id"]]
    states = b64decode(home["states"])
    assert {states[block_id] for block_id in owner["block_ids"]} == {BlockState.Value("BLOCK_STATE_PRIVATE")}


def test_the_page_explains_a_request_and_ends_it(stack: Stack) -> None:
    body = {**ASK, "prompt": "x", "max_tokens": 2000, "stream": True, "request_id": "a page's/own"}
    with stack.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        path = "/requests/a%20page's%2Fown"
        [told] = http.get(path).json()["explanations"]
        snapshot = next(snapshots(http))
        [listed] = [each for each in snapshot["requests"] if each["request_id"] == "a page's/own"]
        assert (told["state"], listed["frontend_id"]) == ("running", told["frontend_id"])
        assert told["frontend_id"] in snapshot["frontend_ids"]
        assert http.delete(path, params={"frontend": told["frontend_id"]}).json()["aborted"]
        assert '"code":"aborted"' in "".join(lines)
        assert http.delete(path).status_code == 404


def snapshots(http: httpx.Client) -> Iterator[Any]:
    with http.stream("GET", "/live") as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_operators_see_it_come_and_go(stack: Stack) -> None:
    with stack.http() as http:
        assert [http.get(path).status_code for path in ("/livez", "/health", "/ready")] == [200, 200, 200]
        assert "octavo_" in http.get("/metrics").text
        for name in ("worker-0", "worker-1"):
            stack.kill(name)
        stack.wait_for(lambda: http.get("/ready").status_code == 503)
        assert http.get("/health").status_code == 200
