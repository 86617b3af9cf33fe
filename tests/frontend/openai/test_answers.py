"""Where answers are written, which for long ones matters to everybody else."""

import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from octavo.frontend.events import FEW_LOGPROBS, Event, Finished, FinishReason, Piece, Started
from octavo.frontend.openai.answers import Form, answer, stream
from octavo.wire.sampling import Logprobs


class Choice:
    """Says in which thread it is written."""

    def begin(self, started: Started) -> bytes:
        return threading.current_thread().name.encode()

    def piece(self, piece: Piece) -> bytes:
        return b""

    def end(self, finished: Finished) -> Sequence[bytes]:
        return []

    def whole(self, started: Started, piece: Piece, finished: Finished) -> dict[str, Any]:
        return {"thread": threading.current_thread().name}


async def events(prompt_logprobs: list[Logprobs]) -> AsyncGenerator[tuple[int, Event]]:
    yield 0, Started("id", "model", [1, 2], 7, prompt_logprobs)
    yield 0, Finished(FinishReason.LENGTH, None)


@pytest.mark.parametrize("scored", [False, True])
async def test_many_logprobs_of_a_prompt_are_written_off_the_event_loop(scored: bool) -> None:
    form = Form("text_completion", "id", "model", 1, lambda index: Choice())
    logprobs = [Logprobs(-1.0, 1, [], [])] * (FEW_LOGPROBS + scored)
    streamed = b"".join([chunk async for chunk in stream(form, events(logprobs))])
    for written in (streamed, await answer(form, events(logprobs))):
        assert (threading.main_thread().name.encode() not in written) is scored
