"""Events become messages of vLLM's engine protocol."""

import pytest

from octavo.frontend.request.events import (
    FEW_LOGPROBS,
    RequestStarted,
    RequestUsage,
    SequenceFinished,
    TextDelta,
)
from octavo.frontend.vllm_engine.responses import Responses
from octavo.testing.fakes.watched import Watched
from octavo.wire.requests import FinishReason
from octavo.wire.sampling import Logprobs

USAGE = RequestUsage(3, 2, 0, 0, 2, 0.0, 0.0)
PROMPT_LOGPROBS = [Logprobs(-0.5, 1, [7], [-0.5]), Logprobs(-1.0, 2, [8], [-0.25])]


def test_the_prompts_logprobs_come_with_the_first_chunk_and_the_whole_and_begin_with_none() -> None:
    responses = Responses(streams=True, logprobs=False)
    assert list(responses.of(RequestStarted("r", "m", [4, 5, 6], 0, PROMPT_LOGPROBS))) == []
    chunks = [response.chunk for token_id in (1, 2) for response in responses.of(TextDelta("x", [token_id]))]
    assert [chunk.HasField("input_logprobs") for chunk in chunks] == [True, False]
    first = chunks[0].input_logprobs
    assert list(first.token_ids) == [4, 5, 6]
    assert [token.HasField("value") for token in first.token_logprobs] == [False, True, True]
    assert [list(top.token_ids) for top in first.top_logprobs] == [[], [7], [8]]
    assert list(responses.of(SequenceFinished(FinishReason.LENGTH, None))) == []
    [whole] = responses.of(USAGE)
    assert whole.complete.input_logprobs == first
    assert (whole.complete.cached_tokens, whole.complete.prompt_tokens) == (2, 3)


def test_text_that_waits_for_its_tokens_makes_no_chunk() -> None:
    responses = Responses(streams=True, logprobs=False)
    assert list(responses.of(RequestStarted("r", "m", [4], 0, []))) == []
    assert list(responses.of(TextDelta("rest", []))) == []


@pytest.mark.parametrize("more", [0, 1])
async def test_many_logprobs_of_a_prompt_are_written_once_and_off_the_event_loop(more: int) -> None:
    logprobs = Watched([Logprobs(-0.5, 1, [7], [-0.5])] * (FEW_LOGPROBS + more))
    responses = Responses(streams=True, logprobs=False)
    started = RequestStarted("r", "m", [4] * (len(logprobs) + 1), 0, logprobs)
    for event in (started, TextDelta("x", [1]), SequenceFinished(FinishReason.LENGTH, None), USAGE):
        messages = [message async for message in responses.written(event)]
    assert len(messages[0].complete.input_logprobs.token_ids) == len(logprobs) + 1
    assert logprobs.apart == {bool(more)}
