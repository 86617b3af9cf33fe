"""Real processes: what a client expects of an answer brings several tokens with a step, and changes none."""

import json
import subprocess
import sys
from typing import Any

import pytest

from octavo.testbed.stack import token_request
from octavo.v1.generation_pb2 import Prediction, TokenIds

from .conftest import StartStack

pytestmark = pytest.mark.system

# Letters, so that the text of an answer has the answer's tokens.
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "allowed_token_ids": [*range(64, 90)],
    "cache_salt": "first",
}


def predictions(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_a_prediction_is_checked_many_tokens_at_a_time_and_counted_everywhere(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_SPECULATION="8").start_all()
    with stack.http() as http:
        whole = http.post("/v1/chat/completions", json=ASK).json()
        assert predictions(whole["usage"]) == (0, 0)
        text = whole["choices"][0]["message"]["content"]
        # Its middle is wrong, so that both are counted.
        expected = text[:30] + "#" + text[31:]
        asked = {**ASK, "prediction": {"type": "content", "content": expected}, "cache_salt": "second"}
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


def test_a_prediction_outlives_the_scheduler_that_it_came_to(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_SPECULATION="8", OCTAVO_FAKE_STEP_MS="50").start_all()
    request = token_request([7] * 9, 160)
    expected = stack.generate(request).token_ids
    predicted = token_request([7] * 9, 160, prediction=Prediction(token_ids=TokenIds(ids=expected)))
    stream = stack.stream(predicted)
    events = [next(stream)]
    while not events[-1].HasField("delta"):
        events.append(next(stream))
    stack.kill("scheduler")
    stack.start_named("scheduler")
    events += stream
    got = [token_id for event in events for token_id in event.delta.token_ids]
    assert got == expected
    usage = next(event.usage for event in events if event.HasField("usage"))
    # The new scheduler has no other text to copy the rest from: the store of the old one is gone with it.
    assert usage.accepted_prediction_tokens > 60
    stack.wait_idle()
