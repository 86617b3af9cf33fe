"""The HTTP port of a frontend among real processes."""

import json
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.testbed.stack import Stack, token_request
from octavo.v1.admin_pb2 import BlockState
from octavo.v1.generation_pb2 import Prediction, TokenIds

from .conftest import StartStack

pytestmark = pytest.mark.system

ASK = {"prompt": [f"prompt {i}" for i in range(6)], "seed": 7, "max_tokens": 60, "ignore_eos": True}

# Letters, so that the text of an answer has the answer's tokens.
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "allowed_token_ids": [*range(64, 90)],
    "cache_salt": "first",
}


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


def predictions(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_a_prediction_is_checked_many_tokens_at_a_time_and_counted_everywhere(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_SPECULATION="8").start_all()
    with stack.http() as http:
        whole = http.post("/v1/chat/completions", json=CHAT).json()
        assert predictions(whole["usage"]) == (0, 0)
        text = whole["choices"][0]["message"]["content"]
        # Its middle is wrong, so that both are counted.
        expected = text[:30] + "#" + text[31:]
        asked = {**CHAT, "prediction": {"type": "content", "content": expected}, "cache_salt": "second"}
        again = http.post("/v1/chat/completions", json=asked).json()
        assert again["choices"][0]["message"] == whole["choices"][0]["message"]
        accepted, rejected = predictions(again["usage"])
        assert accepted > 30
        assert rejected > 0
        streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "third"}
        with http.stream("POST", "/v1/chat/completions", json=streamed) as response:
            chunks = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
        in_stream = predictions(json.loads(chunks[-1])["usage"])
        assert in_stream[0] > 30
        assert in_stream[1] > 0
    answer = stack.generate(token_request([7] * 9, 50))
    ids = Prediction(token_ids=TokenIds(ids=answer.token_ids))
    again_by_ids = stack.generate(token_request([7] * 9, 50, prediction=ids, cache={"salt": "second"}))
    assert again_by_ids.token_ids == answer.token_ids
    usage = again_by_ids.usage
    assert usage.accepted_prediction_tokens == usage.accepted_tokens == usage.drafted_tokens > 30
    assert usage.rejected_prediction_tokens == 0
    [worker] = stack.load().workers
    command = [sys.executable, "-m", "octavo.cli.main", "top", "--once", "--admin-address", stack.admin_address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    row = dict(zip(shown[2].split(), shown[3].split(), strict=True))
    assert row["ACCEPTED"] == str(sum(worker.accepted_tokens))
    assert sum(worker.accepted_tokens) == accepted + in_stream[0] + answer.usage.accepted_tokens + usage.accepted_tokens
    stack.wait_idle()
