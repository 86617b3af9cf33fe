"""What a model thinks, as blocks of Anthropic's API."""

import base64
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer

THOUGHT, SAID = "two and two", "Four."
SIGNATURE = base64.b64encode(hashlib.sha256(THOUGHT.encode()).digest()).decode()
ENABLED = {"type": "enabled", "budget_tokens": 12}


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, reasoning_parser="deepseek_r1")


@pytest.fixture
def thinks(frontend: FrontendServer, answer_with: Callable[[str], None]) -> None:
    answer_with(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}")


@pytest.mark.usefixtures("thinks")
async def test_thinking_is_a_block_before_the_text(post: Any) -> None:
    told = (await post(max_tokens=64, thinking={"type": "adaptive"})).json()
    assert told["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE},
        {"type": "text", "text": SAID},
    ]
    assert len(THOUGHT) < told["usage"]["output_tokens_details"]["thinking_tokens"] < told["usage"]["output_tokens"]


@pytest.mark.usefixtures("thinks")
async def test_a_stream_brings_thinking_as_it_comes_and_signs_it(events_of: Any) -> None:
    events = [event for event in await events_of(max_tokens=64) if "index" in event]
    begun, *thinking = [event for event in events if event["index"] == 0]
    assert begun["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    *deltas, signed, stop = thinking
    assert {event["delta"]["type"] for event in deltas} == {"thinking_delta"}
    assert "".join(event["delta"]["thinking"] for event in deltas) == THOUGHT
    assert len(deltas) > 1
    assert signed["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
    assert stop["type"] == "content_block_stop"
    text = [event["delta"]["text"] for event in events if event["index"] == 1 and "delta" in event]
    assert "".join(text) == SAID


@pytest.mark.usefixtures("thinks")
async def test_thinking_may_be_left_out_but_for_its_signature(post: Any, events_of: Any) -> None:
    fields = {"max_tokens": 64, "thinking": {"type": "adaptive", "display": "omitted"}}
    block = (await post(**fields)).json()["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    deltas = [event["delta"] for event in await events_of(**fields) if event.get("index") == 0 and "delta" in event]
    assert deltas == [{"type": "signature_delta", "signature": SIGNATURE}]


@pytest.mark.usefixtures("thinks")
async def test_blocks_of_thinking_may_be_sent_back(post: Any) -> None:
    thought = {"type": "thinking", "thinking": THOUGHT, "signature": "any"}
    blocks = [thought, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": SAID}]
    turns = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "and 3?"},
    ]
    answer = await post(max_tokens=64, messages=turns)
    assert answer.status_code == 200, answer.text


class TestAModelThatDoesNotThink:
    @pytest.fixture
    def config(self, config: FrontendConfig) -> FrontendConfig:
        return dataclasses.replace(config, reasoning_parser="none")

    async def test_it_answers_without_and_says_so(self, post: Any) -> None:
        named = [
            (await post(thinking=thinking)).headers.get("x-octavo-unknown-fields")
            for thinking in (ENABLED, {"type": "adaptive"}, {"type": "disabled"})
        ]
        assert named == ["thinking", "thinking", None]
