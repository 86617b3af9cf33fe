"""The comparison of texts per second: what is sent, what is compared, and what is printed."""

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.bench.whole import embeddings
from octavo.bench.whole.embeddings import TextLoad, TextSpeeds, measure, to_lines
from octavo.v1 import generation_pb2 as pb

_LOAD = TextLoad("short texts", 70, 4, 16)


def vector_of(text: str) -> "array[float]":
    return array("f", [len(text), text.count("o"), 0.5])


class FakeStack:
    """Gives the vectors of texts over both interfaces, and keeps how many came in each call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.generation = self

    def http(self) -> "FakeStack":
        return self

    def close(self) -> None:
        """Does nothing."""

    def post(self, route: str, json: dict[str, Any]) -> "FakeStack":
        self.sizes.append(len(json["input"]))
        self._data = [{"embedding": base64.b64encode(vector_of(text).tobytes())} for text in json["input"]]
        return self

    def raise_for_status(self) -> None:
        """Does nothing."""

    def json(self) -> dict[str, Any]:
        return {"data": self._data}

    def Embed(self, request: pb.EmbedRequest, timeout: float) -> pb.EmbedResponse:
        self.sizes.append(len(request.inputs))
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=vector_of(each.text)) for each in request.inputs])


class FakePeer:
    """Takes a second for all texts; what it gives is off by so much."""

    def __init__(self, off: float) -> None:
        self._off = off

    def ask(self, kind: str, texts: Sequence[str]) -> dict[str, Any]:
        assert kind == "encode"
        return {"seconds": 1.0, "vectors": [[value + self._off for value in vector_of(text)] for text in texts]}


def measured(off: float) -> tuple[TextSpeeds, FakeStack]:
    stack: Any = FakeStack()
    peer: Any = FakePeer(off)
    [speeds] = measure(stack, peer, [_LOAD], rounds=3)
    return speeds, stack


def test_texts_go_32_at_a_time_and_the_first_round_does_not_count() -> None:
    speeds, stack = measured(0.0)
    assert stack.sizes == [32, 32, 6] * 2 * 4
    assert (speeds.peer, len(speeds.http), len(speeds.grpc)) == ([70.0] * 3, 3, 3)
    assert speeds.difference == 0.0


def test_vectors_that_differ_are_told() -> None:
    speeds, _ = measured(0.25)
    assert speeds.difference == pytest.approx(0.25)
    assert speeds.difference > embeddings.TOLERANCE


def test_each_round_is_compared_with_the_peer_of_its_own() -> None:
    speeds = TextSpeeds(_LOAD, peer=[10.0, 20.0, 40.0], http=[20.0, 30.0, 40.0], grpc=[30.0, 60.0, 120.0])
    assert (speeds.ratio(speeds.http), speeds.ratio(speeds.grpc)) == (1.5, 3.0)
    heads, line = to_lines([speeds])
    assert heads.split()[:3] == ["texts", "a", "second"]
    assert line.split() == ["short", "texts", "20.0", "30.0", "60.0", "1.50,", "3.00", "1.5", "0.0e+00"]


def test_a_load_is_the_same_at_each_call() -> None:
    texts = _LOAD.texts()
    assert texts == _LOAD.texts()
    assert {len(text.split()) for text in texts} <= set(range(4, 17))
