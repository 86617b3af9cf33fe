"""Responses that were stored: read again, gone on from, listed, removed; through the official client."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from octavo.testing.fakes.fake_scheduler import FakeScheduler

AnswerWith = Callable[[str], None]


async def test_a_response_is_read_again_as_it_was_answered(
    answer_with: AnswerWith, client: openai.AsyncOpenAI, ask: Any
) -> None:
    answer_with("good day")
    answer = await ask(metadata={"a": "b"}, instructions="be kind")
    assert answer.model_extra["store"] is True
    again = await client.responses.retrieve(answer.id)
    assert again.to_dict() == answer.to_dict()
    assert (again.status, again.output_text) == ("completed", "good day")


async def test_a_response_goes_on_from_an_earlier_one_without_its_instructions(
    answer_with: AnswerWith, prompt: Callable[[], str], ask: Any
) -> None:
    answer_with("first")
    first = await ask("a", instructions="be kind")
    answer_with("second")
    second = await ask([{"role": "user", "content": "b"}], previous_response_id=first.id)
    await ask("c", previous_response_id=second.id, instructions="be short")
    said = [("system", "be short"), ("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*said, ("user", "c")])
    assert prompt() == f"{expected}<|im_start|>assistant\n"
    assert second.previous_response_id == first.id
