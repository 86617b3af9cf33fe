"""Large bodies are decoded off the event loop, or refused before anything is made of them."""

import json
import threading
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from octavo.frontend.api.body import MAX_TEXTS, SMALL_BODY, read_call
from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.openai.completions import read_prompts
from octavo.frontend.stream.pacing import Turns


class Body(msgspec.Struct):
    """Says in which thread it is decoded."""

    prompt: str = ""
    thread: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.current_thread().name


async def read(body: bytes) -> tuple[Body, list[str]]:
    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    return await read_call(Request({"type": "http", "headers": []}, receive), Body, {}, Turns())


@pytest.mark.parametrize(("size", "apart"), [(SMALL_BODY, False), (SMALL_BODY + 1, True)])
async def test_large_bodies_are_decoded_off_the_event_loop(size: int, apart: bool) -> None:
    body, _ = await read(json.dumps({"prompt": ""}).encode().ljust(size))
    assert (body.thread != threading.main_thread().name) is apart


@pytest.mark.parametrize("fill", [" ", " " * SMALL_BODY])
async def test_unknown_fields_are_named_and_bad_json_is_refused_whatever_the_size(fill: str) -> None:
    assert (await read(b'{"prompt": "x", "mood": 1}' + fill.encode()))[1] == ["mood"]
    with pytest.raises(InvalidRequest, match="the body is no JSON"):
        await read(b'{"prompt": ' + fill.encode())


async def test_a_body_of_countless_names_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_TEXTS} names and texts") as caught:
        await read(json.dumps(dict.fromkeys(map(str, range(MAX_TEXTS + 1)))).encode())
    assert caught.value.reason is Reason.TOO_LARGE


async def test_quotes_inside_of_a_text_are_no_texts() -> None:
    prompt = '"' * (2 * MAX_TEXTS + 10)
    body, _ = await read(json.dumps({"prompt": prompt}).encode())
    assert body.prompt == prompt


def test_token_ids_beyond_the_context_are_refused_before_they_are_made() -> None:
    """They are counted in the text, which goes for what is no id, too."""
    assert read_prompts(msgspec.Raw(b"[1, 2, 3]"), 4) == [[1, 2, 3]]
    with pytest.raises(InvalidRequest, match="the prompt has 4 tokens and the context 4"):
        read_prompts(msgspec.Raw(b"[1, 2, 3, no]"), 4)
