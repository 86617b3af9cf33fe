"""Constrained answers through real processes: whole, also where the worker that gave half of one is killed."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.stack import GenerateStream, Stack
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.small.constraints import conforms
from octavo.v1 import generation_pb2 as pb

pytestmark = pytest.mark.system

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 3, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = tmp_path_factory.mktemp("models") / "byte-model"
    write_byte_model(model)
    environment = {"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "4"}
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(model, Path(directory), environment) as stack,
    ):
        yield stack.start_all(workers=2)


def request(seed: int, constraint: pb.OutputConstraint) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=f"Person {seed}: ",
        sampling=pb.SamplingParams(temperature=1.0, seed=seed),
        stopping=pb.StoppingCriteria(max_new_tokens=1500),
        constraint=constraint,
    )


def begin(stream: GenerateStream) -> list[pb.GenerateResponse]:
    """The events of the first ten tokens, however many come with each, or of a few more."""
    events = [next(stream)]
    while sum(len(event.delta.token_ids) for event in events) < 10:
        events.append(next(stream))
    return events


def test_answers_conform_whichever_worker_dies(stack: Stack) -> None:
    schema = pb.OutputConstraint(json_schema=json.dumps(PERSON))
    requests = [request(seed, schema) for seed in range(6)]
    undisturbed = [each.text for each in stack.generate_all(requests)]
    streams = [stack.stream(each) for each in requests]
    beginnings = [begin(stream) for stream in streams]
    stack.kill("worker-0")
    texts = []
    for beginning, stream in zip(beginnings, streams, strict=True):
        texts.append("".join(event.delta.text for event in [*beginning, *stream] if event.HasField("delta")))
    assert texts == undisturbed
    assert all(conforms(json.loads(text), PERSON) for text in texts)
    stack.start("worker", "worker-0")
    stack.wait_for(lambda: len(stack.load().workers) == 2)


def test_a_bad_schema_is_its_clients_error_and_nobody_elses(stack: Stack) -> None:
    bad = request(1, pb.OutputConstraint(json_schema='{"type": "objekt"}'))
    with pytest.raises(grpc.RpcError) as refused:
        list(stack.stream(bad))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(refused.value) == "BAD_CONSTRAINT"
    choice = pb.OutputConstraint(choice=pb.ChoiceList(choices=["yes", "no"]))
    assert stack.generate(request(2, choice)).text in ("yes", "no")
    stack.assert_alive()
