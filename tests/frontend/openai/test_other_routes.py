"""The routes that generate nothing."""

from typing import Any

import httpx
import openai

from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import lose_patience

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_models_are_listed_under_all_their_names(scheduler: FakeScheduler, client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["byte-model", "default"]
    assert {(model.object, model.owned_by, model.root) for model in models} == {("model", "octavo", "byte-model")}  # type: ignore[attr-defined]
    assert (await client.models.retrieve("default")).max_model_len == 512  # type: ignore[attr-defined]


async def test_a_model_that_is_not_served(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    response = await http.get("/v1/models/org/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "'org/other'" in response.json()["error"]["message"]


async def test_texts_become_tokens_and_texts_again(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    found = (await http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
    assert (found["count"], found["max_model_len"]) == (3, 512)
    assert found["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    text = (await http.post("/detokenize", json={"tokens": [*found["tokens"], 257]})).json()
    assert text == {"prompt": "aé<|im_end|>"}


async def test_chats_become_tokens(scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient) -> None:
    found = (await http.post("/tokenize", json={"messages": MESSAGES})).json()
    text = frontend.generation.tokenizer.decode(found["tokens"], skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_special_tokens_of_a_chat_are_its_templates(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    response = await http.post("/tokenize", json={"messages": MESSAGES, "add_special_tokens": True})
    assert response.json()["error"]["code"] == "unsupported_field"


async def test_it_lives_and_is_ready_when_there_are_workers(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    async def statuses() -> list[int]:
        return [(await http.get(path)).status_code for path in ("/livez", "/health", "/ready")]

    await eventually(lambda: frontend.generation.ready)
    assert await statuses() == [200, 200, 200]
    await scheduler.set_replicas(0)
    await eventually(lambda: not frontend.generation.ready)
    assert await statuses() == [200, 200, 503]


async def test_it_is_not_healthy_without_a_scheduler(
    frontend: FrontendServer, http: httpx.AsyncClient, eventually: Any
) -> None:
    assert (await http.get("/health")).status_code == 200
    lose_patience(frontend, 0.01)
    await eventually(lambda: not frontend.generation.makes_progress)
    assert (await http.get("/health")).status_code == 503
    assert (await http.get("/livez")).status_code == 200


async def test_a_draining_frontend_is_not_ready(
    scheduler: FakeScheduler, frontend: FrontendServer, http: httpx.AsyncClient
) -> None:
    frontend.generation.draining = True
    assert (await http.get("/ready")).status_code == 503


async def test_metrics_are_prometheus_text(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE " in response.text


async def test_version_and_load(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json()["version"]
    assert (await http.get("/load")).json() == {"server_load": 0}
