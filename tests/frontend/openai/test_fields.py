"""Fields of a body mean something, ask for nothing, or are unknown, and clients learn which."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from octavo.frontend.api.body import UNKNOWN_FIELDS_HEADER, decoded, read_fields, unknown_fields_header
from octavo.frontend.errors import InvalidRequest, Unsupported
from octavo.frontend.openai.schemas import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, ChatBody, CompletionBody
from octavo.testing.fakes.fake_scheduler import FakeScheduler


def read_completion(**fields: Any) -> tuple[CompletionBody, list[str]]:
    return read_fields(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody, COMPLETION_UNSUPPORTED)


def read_chat(**fields: Any) -> tuple[ChatBody, list[str]]:
    return read_fields(json.dumps({"messages": [], **fields}).encode(), ChatBody, CHAT_UNSUPPORTED)


def test_unknown_fields_are_named_wherever_they_are() -> None:
    messages = [{"role": "user", "content": "x", "mood": 1}, {"role": "user", "content": "y"}]
    _, unknown = read_chat(messages=messages, frobnicate=1, stream_options={"include_usage": True, "x": 1})
    assert unknown == ["frobnicate", "messages.mood", "stream_options.x"]


def test_the_names_in_the_header_are_few_short_and_harmless() -> None:
    names = ["a\r\nset-cookie: x", "b" * 1000, *(f"f{i}" for i in range(1000))]
    header = unknown_fields_header(names)[UNKNOWN_FIELDS_HEADER]
    shown = header.split(", ")
    assert shown[0] == "a??set-cookie??x"
    assert shown[1] == "b" * 64
    assert len(shown) == 17
    assert shown[-1] == "..."


def test_nothing_unknown_is_no_header() -> None:
    assert unknown_fields_header([]) == {}


@pytest.mark.parametrize("name", COMPLETION_UNSUPPORTED)
def test_null_asks_for_nothing(name: str) -> None:
    assert read_completion(**{name: None})[1] == []


@pytest.mark.parametrize("name", CHAT_UNSUPPORTED)
def test_neutral_values_ask_for_nothing_and_others_are_refused(name: str) -> None:
    for neutral in CHAT_UNSUPPORTED[name]:
        assert read_chat(**{name: json.loads(neutral)})[1] == []
    with pytest.raises(Unsupported, match=name):
        read_chat(**{name: "something else"})


def test_fields_that_say_nothing_about_the_answer_are_accepted() -> None:
    fields = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    assert read_chat(**fields, parallel_tool_calls=True, service_tier="auto", store=False)[1] == []


def test_the_wrong_field_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}])
    assert caught.value.metadata["field"] == "messages[0].content[0].text"


def test_json_of_any_form_has_a_bound() -> None:
    with pytest.raises(InvalidRequest, match="at most 10"):
        decoded("tools", msgspec.Raw(b"[1,2,3,4,5,6]"), object, max_bytes=10)
    assert decoded("tools", msgspec.Raw(b"null"), object) is None


async def test_the_client_is_told_of_unknown_fields(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        body = {"prompt": "x", "max_tokens": 1, "frobnicate": 1, "stream": stream}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert response.headers["x-octavo-unknown-fields"] == "frobnicate"
