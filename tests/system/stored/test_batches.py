"""Batches among real processes, whose frontend is killed in the midst of one."""

import base64
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.frontend.cli.run_batch import run_batch
from octavo.testbed.credentials import bearer, write_keys
from octavo.testbed.stack import Stack

from ..conftest import StartStack
from ..test_embeddings import numbers, vector, write_encoder

pytestmark = pytest.mark.system

NUM_CALLS = 40
CALL = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
# More than fills some blocks, so that a prompt that begins so is found in the prefix cache.
BEGINNING = "All calls of this batch begin alike, with a text of several blocks, " * 3


def answered(stack: Stack, batch_id: str) -> int:
    with stack.http() as http:
        counts = http.get(f"/v1/batches/{batch_id}").json()["request_counts"]
    return int(counts["completed"])


def test_a_batch_outlives_its_frontend_and_answers_each_call_once(new_stack: StartStack, tmp_path: Path) -> None:
    stack = new_stack(
        OCTAVO_FAKE_STEP_MS="4", OCTAVO_BATCH_DIRECTORY=str(tmp_path / "batches"), OCTAVO_MAX_BATCH_REQUESTS="4"
    ).start_all(workers=2)
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {**CALL, "prompt": f"call {n}"}}
        for n in range(NUM_CALLS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with stack.http() as http:
        uploaded = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("calls.jsonl", content)}).json()
        body = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        batch_id = http.post("/v1/batches", json=body).json()["id"]
        # Who waits for an answer has it before the rest of the batch.
        alone = {n: http.post("/v1/completions", json=lines[n]["body"]).json() for n in (0, NUM_CALLS - 1)}
        stack.wait_for(lambda: answered(stack, batch_id) >= 3)
        assert http.get(f"/v1/batches/{batch_id}").json()["status"] == "in_progress"
    stack.kill("frontend")
    stack.kill("worker-0")
    stack.start("frontend")
    stack.wait_ready()
    stack.wait_for(lambda: answered(stack, batch_id) == NUM_CALLS)
    with stack.http() as http:
        stack.wait_for(lambda: http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        batch = http.get(f"/v1/batches/{batch_id}").json()
        assert (batch["error_file_id"], batch["request_counts"]["failed"]) == (None, 0)
        answers = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, answers)}
    assert len(answers) == len(found) == NUM_CALLS
    for n, expected in alone.items():
        assert found[str(n)]["choices"][0]["text"] == expected["choices"][0]["text"]
    stack.wait_idle()


@pytest.fixture
def embedding_stack(new_stack: StartStack, tmp_path: Path) -> Stack:
    model = write_encoder(tmp_path / "encoder")
    # Slow enough to be caught in the midst of a batch.
    environment = {"OCTAVO_FAKE_STEP_MS": "100", "OCTAVO_BATCH_DIRECTORY": str(tmp_path / "batches")}
    return new_stack(model, OCTAVO_MAX_BATCH_REQUESTS="4", **environment).start_all(workers=2)


def embedding_lines() -> list[dict[str, Any]]:
    """Calls of two texts each, every other with vectors as base64, and one that is refused."""
    forms = ("float", "base64")
    bodies = [{"input": [f"text {n}", f"more {n}"], "encoding_format": forms[n % 2]} for n in range(NUM_CALLS)]
    bodies.append({"input": []})
    return [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": body} for n, body in enumerate(bodies)
    ]


def assert_vectors(stack: Stack, answers: dict[str, Any]) -> None:
    """All answers but that of the refused call are there, and are vectors of their own texts."""
    assert answers.keys() == {str(n) for n in range(NUM_CALLS)}
    with stack.http() as http:
        for n in range(NUM_CALLS):
            vectors = [each["embedding"] for each in answers[str(n)]["data"]]
            found = [numbers(base64.b64decode(each)) if isinstance(each, str) else each for each in vectors]
            assert found == [vector(http, f"text {n}"), vector(http, f"more {n}")]


def test_a_batch_of_vectors_outlives_its_frontend(embedding_stack: Stack) -> None:
    stack = embedding_stack
    content = "\n".join(map(json.dumps, embedding_lines())).encode()
    with stack.http() as http:
        uploaded = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("calls.jsonl", content)}).json()
        body = {"input_file_id": uploaded["id"], "endpoint": "/v1/embeddings", "completion_window": "1h"}
        batch_id = http.post("/v1/batches", json=body).json()["id"]
        stack.wait_for(lambda: answered(stack, batch_id) >= 3)
        assert http.get(f"/v1/batches/{batch_id}").json()["status"] == "in_progress"
    stack.kill("frontend")
    stack.kill("worker-0")
    stack.start("frontend")
    stack.wait_ready()
    with stack.http() as http:
        stack.wait_for(lambda: http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        batch = http.get(f"/v1/batches/{batch_id}").json()
        assert batch["request_counts"] == {"total": NUM_CALLS + 1, "completed": NUM_CALLS, "failed": 1}
        contents = [
            http.get(f"/v1/files/{batch[f'{kind}_file_id']}/content").text.splitlines() for kind in ("output", "error")
        ]
    fine, [refused] = ([json.loads(line) for line in lines] for lines in contents)
    assert len(fine) == NUM_CALLS
    assert refused["response"]["body"]["error"]["param"] == "input"
    assert_vectors(stack, {line["custom_id"]: line["response"]["body"] for line in fine})
    stack.wait_idle()


def test_run_batch_goes_on_when_the_frontend_is_back(embedding_stack: Stack, tmp_path: Path) -> None:
    stack = embedding_stack
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    def start(count: int) -> None:
        stack.start_named("frontend-1", OCTAVO_HTTP_LISTEN=address)
        stack.wait_for(lambda: stack.log("frontend-1").count("serving encoder on") == count)

    start(1)
    calls, output = tmp_path / "calls.jsonl", tmp_path / "answers.jsonl"
    calls.write_text("\n".join(map(json.dumps, embedding_lines())))
    command = [str(calls), "-o", str(output), "--url", f"http://{address}", "--concurrency", "4"]
    results: list[Any] = []
    running = threading.Thread(target=lambda: results.append(CliRunner().invoke(run_batch, command)))
    running.start()
    stack.wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3)
    stack.kill("frontend-1")
    start(2)
    running.join()
    [done] = results
    assert done.exit_code == 0, done.output
    assert f"{NUM_CALLS + 1} calls: 0 were answered before, {NUM_CALLS + 1} are now, of which 1 failed" in done.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == NUM_CALLS + 1
    found = {line["custom_id"]: line["response"] for line in lines}
    assert found.pop(str(NUM_CALLS))["status_code"] == 400
    assert_vectors(stack, {custom_id: response["body"] for custom_id, response in found.items()})
    stack.wait_idle()


def test_an_answer_says_how_much_was_cached_and_why_no_more(new_stack: StartStack, tmp_path: Path) -> None:
    stack = new_stack(OCTAVO_API_KEYS=str(write_keys(tmp_path / "keys.json"))).start_all()

    def ask(end: str, tenant: str = "alice", **fields: object) -> tuple[str, dict[str, Any]]:
        headers = {"x-octavo-explain": "cache", "authorization": bearer(tenant)}
        body = {**CALL, "prompt": BEGINNING + end, "max_tokens": 4, **fields}
        with stack.http() as http:
            answer = http.post("/v1/completions", json=body, headers=headers)
        [cache] = answer.json()["cache"]
        found = sum(cache[f"{tier}_tokens"] for tier in ("device", "cpu", "disk"))
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == found
        return answer.headers["x-octavo-cached-tokens"], cache

    cached, first = ask("and end " + "here, " * 10)
    assert (cached, first["reason"]) == ("0", "unknown")
    cached, second = ask("and end " + "there, " * 10)
    assert int(cached) > 0
    differs = len((BEGINNING + "and end ").encode())
    # A token is a byte, and a token of its own may come before.
    assert (second["reason"], second["position"] in (differs, differs + 1)) == ("differs", True)
    cached, salted = ask("and end " + "here, " * 10, cache_salt="another")
    assert (cached, salted["reason"]) == ("0", "other_salt")
    # What alice has sent is nothing to bob, nor to a gateway that may speak for her.
    for other in ("bob", "gateway"):
        cached, told = ask("and end " + "there, " * 10, other)
        assert (cached, told["reason"], told["token"], told["other_token"]) == ("0", "unknown", None, None)
