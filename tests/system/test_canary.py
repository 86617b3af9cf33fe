"""Nothing of a prompt, an answer or a key is in the log of any process, however much they log."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from octavo.testbed.stack import Stack, collect
from octavo.v1 import generation_pb2

pytestmark = pytest.mark.system

WORD = "Zebrafinch"
KEY = f"sk-{WORD}-0123456789"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def stack(byte_model: Path) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        keys = Path(name) / "keys.json"
        keys.write_text(json.dumps({"tenants": {"alice": {"keys": [KEY], "trusted": True}}}))
        environment = {"OCTAVO_DEVICE": "fake", "OCTAVO_LOG_LEVEL": "debug", "OCTAVO_API_KEYS": str(keys)}
        with Stack(byte_model, Path(name), environment) as stack:
            yield stack.start_all()


def request(**fields: object) -> generation_pb2.GenerateRequest:
    stopping = generation_pb2.StoppingCriteria(max_new_tokens=30, ignore_eos=True)
    return generation_pb2.GenerateRequest(text=WORD * 5, stopping=stopping, **fields)  # type: ignore[arg-type]


def test_no_process_logs_what_clients_say_and_hear(stack: Stack) -> None:
    metadata = (("authorization", HEADERS["authorization"]),)
    answer = collect(stack.generation.Generate(request(), metadata=metadata, timeout=60))
    for bad, sent in ((request(model=WORD), metadata), (request(), (("authorization", f"Bearer {WORD}"),))):
        with pytest.raises(grpc.RpcError):
            collect(stack.generation.Generate(bad, metadata=sent, timeout=60))
    left = stack.generation.Generate(request(), metadata=metadata, timeout=60)
    next(left)
    left.cancel()
    with stack.http() as http:
        body = {"prompt": WORD, "max_tokens": 5}
        assert http.post("/v1/completions", json=body, headers=HEADERS).status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 401
        assert http.post("/v1/completions", content=f'{{"{WORD}"', headers=HEADERS).status_code == 400
        metrics = http.get("/metrics", headers=HEADERS)
        assert metrics.status_code == 200
    stack.wait_idle()
    stack.assert_alive()
    assert len(answer.token_ids) == 30
    ids = ", ".join(map(str, answer.token_ids[:10]))
    for name in stack.processes:
        for needle in (WORD, ids, ids.replace(" ", ""), answer.text[:10]):
            assert needle not in stack.log(name), name
    assert WORD not in metrics.text
