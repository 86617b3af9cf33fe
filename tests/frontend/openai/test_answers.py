"""Long answers are written off the event loop, so that other calls go on."""

import json
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import pytest

from octavo.frontend.openai.answers import AnswerFormat, WholeAnswer, encode, gathered, stream
from octavo.frontend.openai.logprobs import ChatLogprobs, CompletionLogprobs
from octavo.frontend.request.events import (
    FEW_LOGPROBS,
    Event,
    LogprobTable,
    RequestStarted,
    SequenceFinished,
    TextDelta,
)
from octavo.wire.requests import FinishReason
from octavo.wire.sampling import Logprobs


class Tokenizer:
    """Calls tokens by letters."""

    def piece(self, token_id: int) -> bytes:
        return bytes([97 + token_id])


class Choice:
    """Says in which thread it is written."""

    def begin(self, started: RequestStarted) -> bytes:
        return threading.current_thread().name.encode()

    def piece(self, piece: TextDelta) -> bytes:
        return threading.current_thread().name.encode() if len(piece.logprobs) > 1 else b""

    def end(self, finished: SequenceFinished) -> Sequence[bytes]:
        return []

    def whole(
        self, started: RequestStarted, pieces: Sequence[TextDelta], finished: SequenceFinished
    ) -> Iterator[bytes]:
        yield b'"%s"' % threading.current_thread().name.encode()


class Format(AnswerFormat):
    def choice(self, index: int) -> Choice:
        return Choice()


async def events(
    prompt_logprobs: list[Logprobs], logprobs: Sequence[Logprobs] = ()
) -> AsyncGenerator[tuple[int, Event]]:
    yield 0, RequestStarted("id", "model", [1, 2], 7, prompt_logprobs)
    if logprobs:
        yield 0, TextDelta("x", [1] * len(logprobs), logprobs)
    yield 0, SequenceFinished(FinishReason.LENGTH, None)


@pytest.mark.parametrize("scored", [False, True])
async def test_many_logprobs_of_a_prompt_are_written_off_the_event_loop(scored: bool) -> None:
    form = Format(kind="text_completion", id="id", model="model", n=1)
    logprobs = [Logprobs(-1.0, 1, [], [])] * (FEW_LOGPROBS + scored)
    streamed = b"".join([chunk async for chunk in stream(form, events(logprobs))])
    whole = await gathered(form, events(logprobs))
    assert whole.is_long is scored
    found = b"".join([part async for part in whole.written()] if whole.is_long else whole.parts)
    for written in (streamed, found):
        assert (threading.main_thread().name.encode() not in written) is scored


@pytest.mark.parametrize("many", [False, True])
async def test_many_logprobs_of_an_answer_are_written_off_the_event_loop(many: bool) -> None:
    form = Format(kind="text_completion", id="id", model="model", n=1)
    logprobs = [Logprobs(-1.0, 1, [7] * 20, [-1.0] * 20)] * (300 if many else 2)
    chunks = [chunk async for chunk in stream(form, events([], logprobs))]
    assert (threading.main_thread().name.encode() not in chunks[1]) is many
    assert (await gathered(form, events([], logprobs))).is_long is many


async def test_a_long_answer_is_written_as_it_is_read() -> None:
    part, written = b"x" * 10_000, 0

    def parts() -> Iterator[bytes]:
        nonlocal written
        for _ in range(100):
            written += len(part)
            yield part

    slices = WholeAnswer(parts(), is_long=True).written()
    first = await anext(slices)
    assert len(first) == written == 70_000
    rest = [each async for each in slices]
    assert max(map(len, rest)) == 70_000
    assert first + b"".join(rest) == part * 100


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_long_answer_is_the_same_as_a_short_one(kind: str) -> None:
    tokenizer: Any = Tokenizer()
    tokens = [5, 6, 7] * 100
    table = LogprobTable(Logprobs(-0.5 * i, 1 + i % 3, [5, 6], [-0.25, -0.75]) for i in range(len(tokens)))
    whole, cut = [table], [table[:1], table[1:130], table[130:]]
    logprobs = ChatLogprobs if kind == "chat" else CompletionLogprobs
    found = [json.loads(b"".join(logprobs(tokenizer, 2).whole(tokens, parts))) for parts in (whole, cut)]
    assert found[0] == found[1] == json.loads(encode(logprobs(tokenizer, 2).of(tokens, list(table))))
