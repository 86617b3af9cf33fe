"""Vectors, scores and classes through real processes, whose workers compute a fake encoder."""

import base64
import json
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.worker.fake.encoder import FAKE_OUTPUTS, expected_output

from .conftest import StartStack


def write_encoder(directory: Path, architecture: str = "BertModel", **files: Any) -> Path:
    write_byte_model(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "bert", "architectures": [architecture], **files.pop("config", {})}
    (directory / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = {"prompts": {"query": "ask: ", "document": "doc: "}}
    return write_encoder(tmp_path_factory.mktemp("models") / "encoder", config_sentence_transformers=prompts)


def started(new_stack: StartStack, model: Path, workers: int = 1, **environment: str) -> Stack:
    stack = new_stack(model, **environment)
    stack.start_all(workers)
    return stack


def numbers(values: bytes) -> list[float]:
    return array("f", values).tolist()


def token_ids(http: httpx.Client, text: str) -> list[int]:
    found = http.post("/tokenize", json={"prompt": text})
    found.raise_for_status()
    ids: list[int] = found.json()["tokens"]
    return ids


def vector(http: httpx.Client, text: str) -> list[float]:
    return numbers(expected_output(token_ids(http, text)))


def unit(values: Sequence[float]) -> list[float]:
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_vectors_over_http_and_grpc(new_stack: StartStack, encoder: Path) -> None:
    stack = started(new_stack, encoder)
    with stack.http() as http:
        texts = ["one", "another text", "x" * 100]
        wanted = [vector(http, text) for text in texts]
        # OpenAI's client asks for base64 unless told otherwise.
        unix_socket: Any = http
        client = openai.OpenAI(base_url="http://octavo/v1", api_key="none", http_client=unix_socket)
        answer = client.embeddings.create(model=encoder.name, input=texts)
        assert [each.embedding for each in answer.data] == wanted
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(len(token_ids(http, text)) for text in texts)
        floats = client.embeddings.create(model=encoder.name, input=texts[1], encoding_format="float")
        assert [each.embedding for each in floats.data] == wanted[1:2]
        by_ids = client.embeddings.create(model=encoder.name, input=[token_ids(http, text) for text in texts])
        assert [each.embedding for each in by_ids.data] == wanted
        one = client.embeddings.create(model=encoder.name, input=token_ids(http, texts[0]), dimensions=3)
        assert one.data[0].embedding == pytest.approx(unit(wanted[0][:3]), abs=1e-6)
        raw = http.post("/v1/embeddings", json={"input": "one", "encoding_format": "base64"}).json()
        assert numbers(base64.b64decode(raw["data"][0]["embedding"])) == wanted[0]
        prompted = http.post("/v1/embeddings", json={"input": "one", "prompt_name": "query"}).json()
        assert prompted["data"][0]["embedding"] == vector(http, "ask: one")

        _refuses(http)
        _scores(http)
    with grpc.insecure_channel(stack.address) as channel:
        service = services.GenerationServiceStub(channel)
        inputs = [pb.EmbedInput(text=text) for text in texts]
        found = service.Embed(pb.EmbedRequest(inputs=inputs))
        assert [list(each.values) for each in found.embeddings] == wanted
        with pytest.raises(grpc.RpcError, match="dimensions"):
            service.Embed(pb.EmbedRequest(inputs=inputs, dimensions=FAKE_OUTPUTS + 1))
        with pytest.raises(grpc.RpcError, match="2048"):
            service.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="t")] * 2049))
    stack.wait_idle()
    stack.assert_alive()


def _refuses(http: httpx.Client) -> None:
    for body, code in (
        ({"input": []}, "bad_parameter"),
        ({"input": ""}, "bad_parameter"),
        ({"input": ["fine", ""]}, "bad_parameter"),
        ({"input": [[]]}, "bad_parameter"),
        ({"input": ["t"] * 2049}, "bad_parameter"),
        ({"input": [1 << 30]}, "bad_parameter"),
        ({"input": [-1]}, "bad_parameter"),
        ({"input": ["text", [1, 2]]}, "bad_parameter"),
        ({"input": [[1, 2], "text"]}, "bad_parameter"),
        ({"input": [1, "text"]}, "bad_parameter"),
        ({"input": [1.5]}, "bad_parameter"),
        ({"input": "t", "truncate_prompt_tokens": 0}, "bad_parameter"),
        ({"input": "t", "truncate_prompt_tokens": -2}, "bad_parameter"),
        ({"input": "t", "dimensions": 0}, "bad_parameter"),
        ({"input": {"text": "t"}}, "bad_parameter"),
        ({"input": "t", "dimensions": FAKE_OUTPUTS + 1}, "bad_parameter"),
        ({"input": "t", "encoding_format": "int8"}, "bad_parameter"),
        ({"input": "t", "prompt_name": "nothing"}, "bad_parameter"),
        ({"input": "t", "messages": [{"role": "user", "content": "t"}]}, "unsupported_field"),
        ({"input": [7] * 4000}, "prompt_too_long"),
        ({"input": "long " * 4000}, "prompt_too_long"),
    ):
        assert error_of(http.post("/v1/embeddings", json=body)) == (400, code), body
    assert error_of(http.post("/v1/completions", json={"prompt": "t"})) == (400, "wrong_task")
    assert error_of(http.post("/classify", json={"input": "t"})) == (400, "wrong_task")
    many = http.post("/rerank", json={"query": "q", "documents": ["d"] * 10_000})
    assert error_of(many) == (400, "bad_parameter")
    assert "1 to 2048; send more in several calls" in many.json()["error"]["message"]
    assert error_of(http.post("/rerank", json={"query": "q", "documents": []})) == (400, "bad_parameter")
    assert error_of(http.post("/rerank", json={"query": "q", "documents": ["d", ""]})) == (400, "bad_parameter")
    cut = http.post("/v1/embeddings", json={"input": "long " * 600, "truncate_prompt_tokens": 9}).json()
    assert cut["usage"]["prompt_tokens"] == 9


def _scores(http: httpx.Client) -> None:
    """Cosines of vectors, for a model that makes those; with its own prompts before the two sides."""
    documents = ["red", "green", "blue", "yellow"]
    query = unit(vector(http, "ask: colour"))
    wanted = [sum(a * b for a, b in zip(query, unit(vector(http, f"doc: {each}")), strict=True)) for each in documents]
    scores = http.post("/score", json={"text_1": "colour", "text_2": documents}).json()
    assert [each["score"] for each in scores["data"]] == pytest.approx(wanted, abs=1e-6)
    order = sorted(range(4), key=lambda index: -wanted[index])
    ranked = http.post("/v1/rerank", json={"query": "colour", "documents": documents, "top_n": 2}).json()
    assert [each["index"] for each in ranked["results"]] == order[:2]
    assert ranked["results"][0]["document"] == {"text": documents[order[0]]}
    bare = http.post(
        "/v2/rerank", json={"query": "colour", "documents": [{"text": "red"}], "return_documents": False}
    ).json()
    assert "document" not in bare["results"][0]


def test_a_killed_worker_in_the_middle_of_a_batch_costs_no_vector(new_stack: StartStack, encoder: Path) -> None:
    stack = started(new_stack, encoder, 2, OCTAVO_FAKE_STEP_MS="20", OCTAVO_MAX_NUM_SEQS="4")
    with stack.http() as http:
        texts = [f"text number {number}" for number in range(400)]
        answers: list[Any] = []

        def ask() -> None:
            answers.append(http.post("/v1/embeddings", json={"input": texts}, timeout=300).json())

        asking = threading.Thread(target=ask)
        asking.start()
        stack.wait_for(lambda: all(worker.steps > 5 for worker in stack.load().workers))
        stack.kill("worker-0")
        asking.join()
        found = [each["embedding"] for each in answers[0]["data"]]
        assert found == [vector(http, text) for text in texts]
    stack.wait_idle()


def test_a_cross_encoder_scores_pairs(new_stack: StartStack, tmp_path: Path) -> None:
    model = write_encoder(
        tmp_path / "cross-encoder",
        "BertForSequenceClassification",
        config={"id2label": {"0": "relevant"}, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
    )
    stack = started(new_stack, model)
    with stack.http() as http:
        documents = ["red", "green", "blue"]
        border = len(token_ids(http, "colour"))
        pairs = [token_ids(http, f"colour{each}") for each in documents]
        wanted = [numbers(expected_output(pair, border, 1))[0] for pair in pairs]
        ranked = http.post("/rerank", json={"query": "colour", "documents": documents}).json()
        found = {each["index"]: each["relevance_score"] for each in ranked["results"]}
        assert [found[index] for index in range(3)] == wanted
        assert [each["index"] for each in ranked["results"]] == sorted(range(3), key=lambda index: -wanted[index])
        classes = http.post("/classify", json={"input": "red"}).json()["data"][0]
        assert (classes["label"], classes["num_classes"]) == ("relevant", 1)
        assert error_of(http.post("/v1/embeddings", json={"input": "t"})) == (400, "wrong_task")
    stack.assert_alive()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_decoder_makes_vectors_where_it_is_asked_to(new_stack: StartStack, tmp_path: Path, pooling: str) -> None:
    """In chunks, on two workers, of which one dies; and it generates nothing then."""
    model = tmp_path / "decoder"
    write_byte_model(model)
    environment = {"OCTAVO_POOLING": pooling, "OCTAVO_FAKE_STEP_MS": "10", "OCTAVO_MAX_NUM_BATCHED_TOKENS": "32"}
    stack = started(new_stack, model, 2, **environment)
    with stack.http() as http:
        texts = [f"the same beginning of every text, and then number {number}" for number in range(60)]
        answers: list[Any] = []

        def ask() -> None:
            answers.append(http.post("/v1/embeddings", json={"input": texts}, timeout=300).json())

        asking = threading.Thread(target=ask)
        asking.start()
        stack.wait_for(lambda: all(worker.steps > 3 for worker in stack.load().workers))
        stack.kill("worker-0")
        asking.join()
        assert [each["embedding"] for each in answers[0]["data"]] == [vector(http, text) for text in texts]
        # A mean is of all states, which a prefix cache does not keep.
        again = http.post("/v1/embeddings", json={"input": texts[:2]})
        assert again.json()["data"] == answers[0]["data"][:2]
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == (pooling == "last")
        assert again.headers["x-octavo-cached-tokens"] == str(cached)
        assert error_of(http.post("/v1/completions", json={"prompt": "t"})) == (400, "wrong_task")
        assert "/v1/embeddings" in http.post("/v1/completions", json={"prompt": "t"}).json()["error"]["message"]
    stack.wait_idle()


def test_a_model_that_generates_gives_no_outputs_of_texts(new_stack: StartStack, tmp_path: Path) -> None:
    model = tmp_path / "decoder"
    write_byte_model(model)
    stack = started(new_stack, model)
    pair = {"text_1": "a", "text_2": "b"}
    with stack.http() as http:
        for route, body in (
            ("/v1/embeddings", {"input": "t"}),
            ("/classify", {"input": "t"}),
            ("/score", pair),
            ("/rerank", {"query": "q", "documents": ["d"]}),
        ):
            answer = http.post(route, json=body)
            assert error_of(answer) == (400, "wrong_task")
            assert "use /v1/completions or /v1/chat/completions" in answer.json()["error"]["message"]
    with grpc.insecure_channel(stack.address) as channel:
        service = services.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="cannot embed"):
            service.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="t")]))
    stack.assert_alive()
