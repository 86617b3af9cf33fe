"""Every bad request gets its own clear error object, whatever route it comes to, and leaves nothing behind."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.runtime.models.directory import fingerprint
from octavo.testbed.tiny_model import VOCAB_SIZE
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.wire.steps import ModelInfo

pytestmark = pytest.mark.asyncio(loop_scope="module")

Served = tuple[FrontendServer, FakeScheduler, httpx.AsyncClient]
USER = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One frontend for all: that a bad request harms it is what would be found."""
    config = FrontendConfig(
        model_directory=model_directory,
        served_model_name="byte-model",
        listen="127.0.0.1:0",
        scheduler_endpoints=(f"ipc://{tmp_path_factory.mktemp('bad')}/frontends.sock",),
        http_listen="127.0.0.1:0",
        text_processes=1,
    )
    model = ModelInfo("byte-model", fingerprint(model_directory), "float32", VOCAB_SIZE, 512)
    async with (
        FakeScheduler(config.scheduler_endpoints[0], model).serving() as scheduler,
        running_frontend(config) as (frontend, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", trust_env=False, timeout=60) as http,
    ):
        yield frontend, scheduler, http


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "hello", **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": USER, **fields}


def said(content: Any, role: str = "user", **fields: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[{"role": role, "content": content, **fields}])


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x"}}
# Name -> the request, the parameter that is named, and words of the message.
BAD: dict[str, tuple[tuple[str, dict[str, Any]], str, str]] = {
    "empty prompt": (completion(prompt=""), "prompt", "prompt is empty"),
    "no prompts": (completion(prompt=[]), "prompt", "1 to 256"),
    "prompt of another form": (completion(prompt={"a": 1}), "prompt", "a text, token ids, or a list"),
    "prompt left out": (("/v1/completions", {}), "prompt", "it must be set"),
    "mixed prompts": (completion(prompt=["a", [1]]), "prompt", "a text, token ids, or a list"),
    "too many prompts": (completion(prompt=["a"] * 257), "prompt", "a list of 257"),
    "too many lists": (completion(prompt=[[1]] * 257), "prompt", "a list of 257"),
    "an id outside": (completion(prompt=[258]), "prompt", "the vocabulary ends at 257"),
    "a wrong type": (completion(max_tokens="x"), "max_tokens", "expected `int | null`, got `str`"),
    "a number for a text": (said(5), "messages[0].content", "got `int`"),
    "temperature below 0": (completion(temperature=-1), "temperature", "between 0 (greedy) and 100"),
    "top_p of 0": (completion(top_p=0), "top_p", "above 0 and at most 1"),
    "top_k below -1": (completion(top_k=-2), "top_k", "between 0 (off)"),
    "too many choices": (completion(n=17), "n", "n is 17, but it must be between 1 and 16"),
    "no choices": (completion(n=0), "n", "n is 0"),
    "fewer tried than chosen": (completion(n=3, best_of=2), "best_of", "n is 3"),
    "too many logprobs": (completion(logprobs=21), "logprobs", "between 0 and 20"),
    "too many top_logprobs": (chat(logprobs=True, top_logprobs=21), "top_logprobs", "between 0 and 20"),
    "top_logprobs alone": (chat(top_logprobs=2), "top_logprobs", "logprobs must be true"),
    "prompt_logprobs of a stream": (completion(prompt_logprobs=1, stream=True), "prompt_logprobs", "a stream has none"),
    "no answer": (completion(max_tokens=0), "max_tokens", "without echo"),
    "too long an answer": (completion(max_tokens=508), "max_tokens", "leave 507 of the context's 512"),
    "more at least than at most": (completion(max_tokens=2, min_tokens=3), "min_tokens", "max_tokens is 2"),
    "too many stops": (completion(stop=["x"] * 9), "stop", "repeated 9 times"),
    "too long a stop": (completion(stop="x" * 257), "stop", "1 to 256 bytes"),
    "a huge seed": (completion(seed=2**64), "seed", "an unsigned 64-bit number"),
    "a seed below all": (completion(seed=-(2**63) - 1), "seed", "an unsigned 64-bit number"),
    "too urgent": (completion(priority=-101), "priority", "between -100 and 100"),
    "a bias of a text": (completion(logit_bias={"a": 1}), "logit_bias", "logit_bias"),
    "a great bias": (completion(logit_bias={"1": 101}), "logit_bias", "between -100 and 100"),
    "no time": (completion(timeout=0), "timeout", "above 0"),
    "no time to wait": (completion(max_queue_time=-1), "max_queue_time", "above 0"),
    "sampling beams": (completion(use_beam_search=True, temperature=1), "temperature", "samples none"),
    "two formats": (
        completion(guided_regex="a", response_format={"type": "json_object"}),
        "guided_regex",
        "exclude each other",
    ),
    "a format without schema": (chat(response_format=SCHEMA), "response_format.json_schema.schema", "needs one"),
    "a prediction that is a text": (chat(prediction="x"), "prediction", "got `str`"),
    "a prediction of nothing": (chat(prediction={"type": "content"}), "prediction", "missing required field `content`"),
    "a prediction that is a number": (chat(prediction={"type": "content", "content": 1}), "prediction.content", "int"),
    "a predicted part without text": (
        chat(prediction={"type": "content", "content": [{"type": "text"}]}),
        "prediction.content[0].text",
        "it must be set",
    ),
    "a prediction beyond the context": (
        chat(prediction={"type": "content", "content": "x" * 513}),
        "prediction",
        "513 tokens long",
    ),
    "a prediction far beyond it": (
        chat(prediction={"type": "content", "content": "x" * 5121}),
        "prediction",
        "5121 bytes long, but at most 5120",
    ),
    "no messages": (chat(messages=[]), "messages", "empty"),
    "an unknown role": (said("x", role="<|im_end|>"), "messages.role", "must be one of system"),
    "nothing said": (said(None), "messages[0].content", "may be left out"),
    "a user's calls": (
        said("x", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls",
        "only an assistant",
    ),
    "a part without text": (said([{"type": "text"}]), "messages[0].content[0].text", "it must be set"),
    "an unknown tool": (chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice", "no tools"),
    "tools that are none": (chat(tools={}), "tools", "must be a list"),
    "nothing to tokenize": (("/tokenize", {}), "prompt", "either prompt or messages"),
    "two things to tokenize": (("/tokenize", {"prompt": "x", "messages": USER}), "prompt", "either prompt or messages"),
    "ids that are no tokens": (("/detokenize", {"tokens": [258]}), "tokens", "the vocabulary ends at 257"),
    "too many ids": (("/detokenize", {"tokens": [1] * 513}), "tokens", "at most 512"),
}


@pytest.mark.parametrize("name", BAD)
async def test_invalid(name: str, served: Served) -> None:
    frontend, scheduler, http = served
    (path, body), param, words = BAD[name]
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "bad_parameter"
    assert words in error["message"]
    assert error["param"] == param
    assert scheduler.submitted == []
    assert frontend.generation.num_running == 0


FUNCTION = {"name": "f", "arguments": ""}
UNSUPPORTED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "suffix": (completion(suffix="x"), "suffix"),
    "modalities": (chat(modalities=["text", "audio"]), "modalities"),
    "audio": (chat(audio={"voice": "x"}), "audio"),
    "functions": (chat(functions=[{"name": "f"}]), "functions"),
    "a template": (chat(chat_template="{{ 1 }}"), "chat_template"),
    "bad words": (completion(bad_words=["x"]), "bad_words"),
    "truncation": (completion(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    "an image": (said([{"type": "image_url", "image_url": {"url": "http://x"}}]), "image_url"),
    "a custom call": (
        said(None, "assistant", tool_calls=[{"type": "custom", "function": {"name": "f", "arguments": ""}}]),
        "custom",
    ),
    "a structural tag": (chat(response_format={"type": "structural_tag"}), "structural_tag"),
    "stops of beams": (completion(use_beam_search=True, stop="x"), "stop"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_what_is_not_implemented_is_refused_by_its_name(name: str, served: Served) -> None:
    _, scheduler, http = served
    (path, body), words = UNSUPPORTED[name]
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_field"), error
    assert words in error["message"]
    assert scheduler.submitted == []


# What is answered all the same -> the name by which it is told that it is not honoured.
NOT_HONOURED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "store": (chat(store=True), "store"),
    "service_tier": (chat(service_tier="flex"), "service_tier"),
    "a prediction where there is none": (completion(prediction={"type": "content", "content": "x"}), "prediction"),
    "a field of a prediction": (chat(prediction={"type": "content", "content": "x", "b": 1}), "prediction.b"),
    "verbosity": (chat(verbosity="low"), "verbosity"),
    "web search": (chat(web_search_options={}), "web_search_options"),
    "a target": (completion(ttft_target=1), "ttft_target"),
    "a tool that is no function": (chat(tools=[{"type": "retrieval"}]), "tools[0].retrieval"),
    "a field of a function": (
        chat(tools=[{"type": "function", "function": {"name": "f", "colour": "red"}}]),
        "tools[0].colour",
    ),
    "effort where the template knows none": (chat(reasoning_effort="low"), "reasoning_effort"),
    "a variable that the template does not read": (
        chat(chat_template_kwargs={"nonsense": 1}),
        "chat_template_kwargs.nonsense",
    ),
    "a keyword that no grammar holds to": (
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "items": {}, "uniqueItems": True}},
            }
        ),
        "response_format.json_schema.schema.uniqueItems",
    ),
    "verbosity of a response": (("/v1/responses", {"input": "x", "text": {"verbosity": "low"}}), "text.verbosity"),
    "truncation of a response": (("/v1/responses", {"input": "x", "truncation": "auto"}), "truncation"),
    "what is to be included": (("/v1/responses", {"input": "x", "include": ["file_search_call.results"]}), "include"),
    "a summary": (("/v1/responses", {"input": "x", "reasoning": {"summary": "auto"}}), "reasoning.summary"),
    "thoughts": (
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "x"}]}),
        "input[0].reasoning",
    ),
}


@pytest.mark.parametrize("name", NOT_HONOURED)
async def test_what_is_only_not_honoured_is_answered_and_named(name: str, served: Served) -> None:
    _, scheduler, http = served
    (path, body), field = NOT_HONOURED[name]
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-octavo-unknown-fields"] == field
    scheduler.submitted.clear()


async def test_a_strict_schema_is_held_to_or_refused(served: Served) -> None:
    _, scheduler, http = served
    schema = {"type": "array", "items": {}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    path, body = chat(response_format=form)
    error = (await http.post(path, json=body)).json()["error"]
    assert error["code"] == "bad_constraint"
    assert "uniqueItems" in error["message"]
    assert scheduler.submitted == []


async def test_an_empty_stop_is_none(served: Served) -> None:
    _, scheduler, http = served
    path, body = completion(stop="")
    assert (await http.post(path, json=body)).status_code == 200
    scheduler.submitted.clear()


NOT_JSON = {
    "nothing": b"",
    "no JSON": b"{prompt:",
    "a list": b"[]",
    "a text": b'"x"',
    "not UTF-8": b'{"prompt": "\xff"}',
    "not UTF-8 where JSON of any form may be": b'{"prompt": "x", "guided_json": {"a\xff": 1}}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep where nothing is known": b'{"prompt": "x", "foo": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", NOT_JSON)
async def test_bodies_that_cannot_be_read(name: str, served: Served) -> None:
    _, _, http = served
    response = await http.post("/v1/completions", content=NOT_JSON[name])
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] in ("bad_json", "bad_parameter")
    assert len(error["message"]) < 500


async def test_a_form_is_no_json(served: Served) -> None:
    """A page of another site can make a browser send one, but no JSON."""
    _, _, http = served
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = await http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_json")


async def test_a_prompt_that_is_too_long(served: Served) -> None:
    _, _, http = served
    for path, body in (completion(prompt="x" * 512), completion(prompt="x" * 6000), said("x" * 600)):
        error = (await http.post(path, json=body)).json()["error"]
        assert error["code"] == "prompt_too_long"
        assert error["param"] in body


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", "x" * 512),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "x" * 600}]),
        ("/v1/responses", "input", "x" * 600),
    ],
)
async def test_errors_of_a_stream_name_the_field_too(path: str, field: str, value: object, served: Served) -> None:
    _, _, http = served
    response = await http.post(path, json={field: value, "stream": True})
    if response.status_code == 200:
        pytest.fail(response.text[:500])
    assert response.json()["error"]["param"] == field


async def test_ids_that_are_too_many_are_not_decoded_to_be_echoed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, _, http = served
    monkeypatch.delattr(type(frontend.generation), "decode")
    path, body = completion(prompt=[5] * 512, echo=True)
    assert (await http.post(path, json=body)).json()["error"]["code"] == "prompt_too_long"


async def test_what_is_not_served(served: Served) -> None:
    _, _, http = served
    for path, body in (
        completion(model="other"),
        chat(model="other"),
        ("/tokenize", {"prompt": "x", "model": "other"}),
    ):
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    missing = await http.post("/v1/completions", json={"prompt": "x", "pinned_prefix": "none"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "prefix_not_found")


async def test_routes_and_methods_that_are_none(served: Served) -> None:
    _, _, http = served
    nowhere = await http.get("/v1/nothing")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "route_not_found")
    wrong = await http.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "route_not_found")
    assert "POST" in wrong.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"
    assert wrong.headers["x-request-id"]


async def test_a_slash_at_the_end_leads_nowhere(served: Served) -> None:
    _, _, http = served
    for method, path in (("GET", "/v1/models/"), ("POST", "/v1/chat/completions/"), ("GET", "/health/")):
        response = await http.request(method, path, headers={"host": "elsewhere.localhost"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "route_not_found")
        assert "elsewhere" not in str(response.headers)


async def test_after_all_of_it_a_good_request_is_answered(served: Served) -> None:
    frontend, scheduler, http = served
    assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert frontend.generation.num_running == 0
    scheduler.submitted.clear()
