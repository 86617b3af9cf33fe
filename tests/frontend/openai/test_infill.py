"""Filling gaps: `suffix` of POST /v1/completions, and llama.cpp's POST /infill."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.runtime.models.directory import fingerprint
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.steps import ModelInfo

TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, FILE = range(VOCAB_SIZE, VOCAB_SIZE + len(TOKENS))
CONTEXT = 512
AnswerWith = Callable[..., None]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that was trained to fill gaps."""
    directory = tmp_path_factory.mktemp("code-model") / "byte-model"
    write_byte_model(directory, max_model_len=CONTEXT)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE + len(TOKENS)}))
    return directory


@pytest.fixture
def fake_scheduler(config: FrontendConfig) -> FakeScheduler:
    model = ModelInfo(
        name="byte-model",
        fingerprint=fingerprint(config.model_directory),
        dtype="float32",
        vocab_size=VOCAB_SIZE + len(TOKENS),
        max_model_len=CONTEXT,
    )
    return FakeScheduler(config.scheduler_endpoints[0], model)


@pytest.fixture
def ids(frontend: FrontendServer) -> Callable[[str], list[int]]:
    return frontend.generation.tokenizer.encode


async def test_a_completion_with_a_suffix_fills_the_gap(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, answer_with: AnswerWith, ids: Any
) -> None:
    answer_with("middle")
    answer = await client.completions.create(model="byte-model", prompt="ab", suffix="yz", max_tokens=20)
    [request] = scheduler.submitted
    assert list(request.prompt_token_ids) == [PREFIX, *ids("ab"), SUFFIX, *ids("yz"), MIDDLE]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("middle", "stop")


async def test_each_prompt_of_a_call_has_the_suffix(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, ids: Any
) -> None:
    await client.completions.create(model="byte-model", prompt=["a", "b"], suffix="z", max_tokens=2)
    assert sorted(list(request.prompt_token_ids) for request in scheduler.submitted) == sorted(
        [PREFIX, *ids(letter), SUFFIX, *ids("z"), MIDDLE] for letter in "ab"
    )


async def test_a_filling_ends_where_another_file_would_begin(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, ids: Any
) -> None:
    scheduler.answer = lambda request, index: [*ids("x"), FILE]
    answer = await client.completions.create(model="byte-model", prompt="a", suffix="z", extra_body={"n": 1})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x", "stop")
    assert FILE in scheduler.submitted[0].sampling.stop_token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": [1, 2]}, "prompt"), ({"prompt": "a", "echo": True}, "echo")],
)
async def test_what_has_no_meaning_beside_a_suffix_is_refused(
    scheduler: FakeScheduler, client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="byte-model", suffix="z", **fields)
    assert refused.value.param == param
    assert not scheduler.submitted


async def test_infill_puts_pieces_before_the_gap_and_what_is_begun_behind_it(
    scheduler: FakeScheduler, http: httpx.AsyncClient, answer_with: AnswerWith, ids: Any
) -> None:
    answer_with("filled\n")
    body = {
        "input_prefix": "ab",
        "input_suffix": "yz",
        "prompt": "be",
        "input_extra": [{"filename": "x.py", "text": "piece"}],
        "n_predict": 20,
        "samplers": ["top_k"],
    }
    response = await http.post("/infill", json=body)
    assert response.status_code == 200, response.text
    head = [FILE, *ids("x.py\npiece"), FILE, *ids("this file\n")]
    [request] = scheduler.submitted
    assert list(request.prompt_token_ids) == [*head, PREFIX, *ids("ab"), SUFFIX, *ids("yz"), MIDDLE, *ids("be")]
    found = response.json()
    assert (found["content"], found["stop"], found["stop_type"]) == ("filled\n", True, "eos")
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (8, len(request.prompt_token_ids))
    assert found["has_new_line"] is True
    assert found["timings"]["predicted_n"] == 8
    assert response.headers["x-octavo-unknown-fields"] == "samplers"


async def test_a_stream_of_infill_brings_the_same_text(
    scheduler: FakeScheduler, http: httpx.AsyncClient, answer_with: AnswerWith
) -> None:
    answer_with("one END two")
    body = {"input_prefix": "ab", "input_suffix": "yz", "stop": ["END"]}
    whole = (await http.post("/infill", json=body)).json()
    lines = (await http.post("/infill", json={**body, "stream": True})).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == whole["content"] == "one "
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert (events[-1]["stop_type"], events[-1]["stopping_word"]) == ("word", "END")


async def test_no_tokens_of_infill_are_the_pieces_computed_ahead(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    body = {"input_extra": [{"text": "piece"}], "n_predict": 0}
    found = (await http.post("/infill", json=body)).json()
    assert (found["content"], found["tokens_predicted"], found["stop_type"]) == ("", 0, "limit")
    assert scheduler.submitted[0].sampling.max_tokens == 1


async def test_infill_names_only_the_fields_that_are_asked_for(
    scheduler: FakeScheduler, http: httpx.AsyncClient
) -> None:
    body = {"input_prefix": "a", "n_predict": 3, "response_fields": ["content", "timings/predicted_n", "no/such"]}
    found = (await http.post("/infill", json=body)).json()
    assert found.keys() == {"content", "timings/predicted_n"}
    assert found["timings/predicted_n"] == 3


async def test_infill_cuts_what_does_not_fit_the_context(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    extra = [{"text": "e" * 400}] * 40
    body = {"input_prefix": "p" * 2000, "input_suffix": "s" * 2000, "input_extra": extra, "n_predict": 32}
    response = await http.post("/infill", json=body)
    assert response.status_code == 200, response.text
    assert len(scheduler.submitted[0].prompt_token_ids) == CONTEXT - 32


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 600}, "n_predict"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"input_prefix": 7}, "input_prefix"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0]"),
    ],
)
async def test_bad_fields_of_infill_are_named(
    scheduler: FakeScheduler, http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await http.post("/infill", json={"input_prefix": "a", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not scheduler.submitted
