"""POST /v1/completions, through the official client."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.frontend.config import FrontendConfig
from octavo.runtime.models.directory import fingerprint
from octavo.testbed.tiny_model import VOCAB_SIZE
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.wire.steps import ModelInfo

AnswerWith = Callable[..., None]


@pytest.fixture
def ask(client: openai.AsyncOpenAI) -> Callable[..., Any]:
    async def ask(prompt: Any = "hello", **fields: Any) -> Any:
        return await client.completions.create(**{"model": "byte-model", "prompt": prompt, "seed": 7, **fields})

    return ask


async def test_an_answer_has_text_reason_and_usage(scheduler: FakeScheduler, ask: Any) -> None:
    answer = await ask()
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "byte-model", "cmpl-")
    assert answer.system_fingerprint.startswith("octavo-")
    [choice] = answer.choices
    assert len(choice.text) == 16
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 16, 21)
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_a_stream_brings_the_same_text(scheduler: FakeScheduler, ask: Any) -> None:
    whole = await ask()
    chunks = [chunk async for chunk in await ask(stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1


async def test_a_stop_string_is_the_reason(scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any) -> None:
    answer_with("one STOP two")
    choice = (await ask(stop=["STOP"])).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one ", "stop", "STOP")


async def test_the_end_of_the_text_is_no_stop_reason(
    scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any
) -> None:
    answer_with("one")
    choice = (await ask()).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one", "stop", None)


async def test_a_stop_token_is_named_by_its_id(scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any) -> None:
    answer_with("one")
    choice = (await ask(extra_body={"stop_token_ids": [257]})).choices[0]
    assert choice.stop_reason == 257


async def test_each_prompt_has_its_choices(scheduler: FakeScheduler, ask: Any) -> None:
    answer = await ask(["a", "bc"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
    alone = await ask("bc", n=2, max_tokens=4)
    assert [c.text for c in alone.choices] == [c.text for c in answer.choices[2:]]


async def test_a_stream_of_several_prompts_keeps_their_choices_apart(scheduler: FakeScheduler, ask: Any) -> None:
    scheduler.pace_s = 0.001
    whole = await ask(["a", "bc"], n=2, max_tokens=8)
    texts, reasons = dict.fromkeys(range(4), ""), []
    async for chunk in await ask(["a", "bc"], n=2, max_tokens=8, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons += [choice.index] if choice.finish_reason else []
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert sorted(reasons) == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", [[1, 2, 257], [[1, 2, 257]]])
async def test_token_ids_are_taken_as_they_are(scheduler: FakeScheduler, ask: Any, prompt: Any) -> None:
    await ask(prompt)
    assert [request.prompt_token_ids for request in scheduler.submitted] == [[1, 2, 257]]


async def test_lists_of_token_ids_are_prompts_of_their_own(scheduler: FakeScheduler, ask: Any) -> None:
    await ask([[1, 2], [3]])
    assert sorted(request.prompt_token_ids for request in scheduler.submitted) == [[1, 2], [3]]


async def test_echo_puts_the_prompt_before_each_choice(scheduler: FakeScheduler, ask: Any) -> None:
    plain, echoed = await ask(n=2), await ask(n=2, echo=True)
    assert [choice.text for choice in echoed.choices] == [f"hello{choice.text}" for choice in plain.choices]
    streamed = ["", ""]
    async for chunk in await ask(n=2, echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in echoed.choices]


async def test_echo_of_token_ids_is_their_text(scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any) -> None:
    answer_with("!")
    hello = scheduler_ids = (await ask("hi", echo=True, max_tokens=1)).choices[0].text
    assert hello == "hi!"
    scheduler_ids = scheduler.submitted[0].prompt_token_ids
    assert (await ask(scheduler_ids, echo=True, max_tokens=1)).choices[0].text == "hi!"


async def test_logprobs_have_a_token_a_value_and_a_place_each(
    scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any
) -> None:
    answer_with("ab é")
    found = (await ask(logprobs=2, max_tokens=5)).choices[0].logprobs
    assert found.tokens == ["a", "b", " ", "bytes:\\xc3", "bytes:\\xa9"]
    assert found.text_offset == [0, 1, 2, 3, 13]
    assert len(found.token_logprobs) == 5
    assert all(value < 0 for value in found.token_logprobs)
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == value
        assert 2 <= len(top) <= 3


async def test_no_alternatives_are_shown_for_logprobs_of_0(scheduler: FakeScheduler, ask: Any) -> None:
    found = (await ask(logprobs=0, max_tokens=3)).choices[0].logprobs
    assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]


async def test_streamed_logprobs_joined_are_those_of_the_whole(scheduler: FakeScheduler, ask: Any) -> None:
    whole = (await ask(logprobs=1, echo=True)).choices[0].logprobs
    tokens, values, offsets = [], [], []
    async for chunk in await ask(logprobs=1, echo=True, stream=True):
        if found := chunk.choices[0].logprobs:
            tokens += found.tokens
            values += found.token_logprobs
            offsets += found.text_offset
    assert (tokens, values, offsets) == (whole.tokens, whole.token_logprobs, whole.text_offset)


async def test_echo_with_logprobs_scores_the_prompt(scheduler: FakeScheduler, ask: Any) -> None:
    """What evaluation harnesses ask for: the prompt's own likelihood, with one token or none of an answer."""
    one = (await ask(echo=True, logprobs=1, max_tokens=1)).choices[0]
    assert one.logprobs.tokens[:5] == list("hello")
    assert one.logprobs.token_logprobs[0] is None
    assert one.logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in one.logprobs.token_logprobs[1:])
    assert len(one.logprobs.tokens) == 6
    none = await ask(echo=True, logprobs=1, max_tokens=0)
    [choice] = none.choices
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert choice.logprobs.token_logprobs == one.logprobs.token_logprobs[:-1]
    assert (none.usage.prompt_tokens, none.usage.completion_tokens) == (5, 0)


async def test_a_stream_without_an_answer_is_the_prompt(scheduler: FakeScheduler, ask: Any) -> None:
    chunks = [chunk async for chunk in await ask(echo=True, max_tokens=0, stream=True)]
    assert [(c.choices[0].text, c.choices[0].finish_reason) for c in chunks] == [("hello", None), ("", "length")]


async def test_vllms_fields_reach_the_scheduler(scheduler: FakeScheduler, ask: Any) -> None:
    extra = {
        "top_k": -1,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "priority": -5,
        "cache_salt": "mine",
        "allowed_token_ids": [9, 10],
    }
    await ask(
        temperature=0.5, top_p=0.75, presence_penalty=1, frequency_penalty=-1, logit_bias={"3": 2}, extra_body=extra
    )
    [request] = scheduler.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 0, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.logit_bias) == ([9], 2, [(3, 2.0)])
    assert sampling.allowed_token_ids == [9, 10]
    # A lower number is earlier there, a higher one here.
    assert request.priority == 5
    assert request.cache_key.salt == "mine"


async def test_a_negative_seed_is_the_unsigned_one_of_its_bits(scheduler: FakeScheduler, ask: Any) -> None:
    await ask(seed=-1)
    assert scheduler.submitted[0].sampling.seed == 2**64 - 1


async def test_special_tokens_can_be_kept_from_being_added_and_shown(
    scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any
) -> None:
    scheduler.answer = lambda request, index: [256, 257]
    extra = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert (await ask(extra_body=extra)).choices[0].text == "<|im_start|><|im_end|>"
    assert (await ask()).choices[0].text == ""


async def test_token_ids_are_returned_where_they_are_asked_for(scheduler: FakeScheduler, ask: Any) -> None:
    extra = {"return_token_ids": True}
    [choice] = (await ask(extra_body=extra)).choices
    assert choice.prompt_token_ids == scheduler.submitted[0].prompt_token_ids
    assert len(choice.token_ids) == 16
    chunks = [chunk.choices[0] async for chunk in await ask(extra_body=extra, stream=True)]
    assert chunks[0].prompt_token_ids == choice.prompt_token_ids
    assert [i for chunk in chunks[1:-1] for i in chunk.token_ids] == choice.token_ids


async def test_prompt_logprobs_are_by_token_id(scheduler: FakeScheduler, ask: Any) -> None:
    [choice] = (await ask(extra_body={"prompt_logprobs": 1})).choices
    first, *others = choice.prompt_logprobs
    assert first is None
    ids = scheduler.submitted[0].prompt_token_ids
    for token_id, found in zip(ids[1:], others, strict=True):
        assert found[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}


async def test_beam_search_is_asked_for_by_its_switch(scheduler: FakeScheduler, ask: Any) -> None:
    extra = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
    answer = await ask(n=2, best_of=4, temperature=0, extra_body=extra)
    assert len(answer.choices) == 2
    beam = scheduler.submitted[0].sampling.beam
    assert beam is not None
    assert (beam.width, beam.length_penalty, beam.early_stopping.value) == (4, 0.5, "on")


async def test_the_best_are_chosen_among_more(scheduler: FakeScheduler, ask: Any) -> None:
    answer = await ask(n=1, best_of=3)
    assert len(answer.choices) == 1
    assert scheduler.submitted[0].sampling.num_sequences == 3
    assert answer.usage.completion_tokens == 48


async def test_the_model_answers_to_its_other_names(scheduler: FakeScheduler, ask: Any) -> None:
    assert (await ask(model="default")).model == "default"


async def test_an_id_can_be_asked_for(scheduler: FakeScheduler, ask: Any) -> None:
    assert (await ask(extra_body={"request_id": "mine"})).id == "cmpl-mine"
    assert scheduler.submitted[0].request_id == "mine"


async def test_the_ids_of_a_call_are_echoed(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    given = await http.post("/v1/completions", json=body, headers={"x-request-id": "abc"})
    assert given.headers["x-request-id"] == "abc"
    assert len((await http.post("/v1/completions", json=body)).headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("recommended", "fields", "temperature"),
    [
        ({}, {}, 1.0),
        ({}, {"temperature": 0}, 0.0),
        ({}, {"use_beam_search": True, "n": 2}, 0.0),
        ({"do_sample": False}, {}, 0.0),
        ({"temperature": 0.6}, {}, 0.6),
    ],
)
async def test_what_names_no_temperature_has_the_models_or_that_of_openai(
    config: FrontendConfig,
    model_directory: Path,
    tmp_path: Path,
    recommended: dict[str, Any],
    fields: dict[str, Any],
    temperature: float,
) -> None:
    directory = shutil.copytree(model_directory, tmp_path / "byte-model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, **recommended}))
    config = dataclasses.replace(config, model_directory=directory)
    model = ModelInfo("byte-model", fingerprint(directory), "float32", VOCAB_SIZE, 512)
    async with (
        FakeScheduler(config.scheduler_endpoints[0], model).serving() as scheduler,
        running_frontend(config) as (frontend, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", trust_env=False, timeout=60) as http,
    ):
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        assert scheduler.submitted[-1].sampling.temperature == temperature
