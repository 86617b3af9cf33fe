"""Writes events as the protocol's messages: chunks for a stream, and a complete message for each sequence."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from smg_grpc_proto import vllm_engine_pb2 as pb  # type: ignore[import-untyped]

from octavo.frontend.request.events import (
    FEW_LOGPROBS,
    Event,
    LogprobTable,
    MatchKind,
    RequestStarted,
    RequestUsage,
    SequenceFinished,
    TextDelta,
    is_long,
)
from octavo.frontend.stream.pacing import apart
from octavo.wire.requests import FinishReason
from octavo.wire.sampling import Logprobs

_REASONS: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass
class _Sequence:
    """Holds what has been generated of one sequence so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobTable = field(default_factory=LogprobTable)
    finished: SequenceFinished | None = None


@dataclass
class Responses:
    """Writes the messages of one request.

    `streams` tells whether the client wants chunks, `logprobs` whether it wants logprobs of the generated tokens.
    """

    streams: bool
    logprobs: bool
    _prompt_tokens: int = 0
    # The logprobs of the prompt's tokens, where they were asked for.
    _prompt: Any = None
    _sequences: dict[int, _Sequence] = field(default_factory=dict)
    _has_sent_prompt: bool = False

    async def written(self, event: Event) -> AsyncGenerator[Any]:
        """Yields the same as `of`, but writes long messages in a thread, so that other calls go on."""
        messages = self.of(event)
        if not self._is_long(event):
            for message in messages:
                yield message
            return
        while (message := await apart(partial(next, messages, None))) is not None:
            yield message

    def _is_long(self, event: Event) -> bool:
        return is_long(event) or (
            isinstance(event, RequestUsage)
            and any(len(each.logprobs) > FEW_LOGPROBS for each in self._sequences.values())
        )

    def of(self, event: Event) -> Iterator[Any]:
        """Yields the messages that an event brings, maybe none.

        Complete messages come with the last event, for only then the cached part of the prompt is known.
        """
        match event:
            case RequestStarted():
                self._prompt_tokens = len(event.prompt_token_ids)
                self._prompt = _input_logprobs(event)
            case TextDelta():
                yield from self._of_delta(event)
            case SequenceFinished():
                self._sequence(event.index).finished = event
            case RequestUsage():
                for index in sorted(self._sequences):
                    yield self._complete(index, self._sequences[index], event)

    def _of_delta(self, piece: TextDelta) -> Iterator[Any]:
        sequence = self._sequence(piece.index)
        sequence.token_ids += piece.token_ids
        if self.logprobs:
            sequence.logprobs.extend(piece.logprobs)
        if self.streams and piece.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=piece.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(sequence.token_ids),
                output_logprobs=self._output_logprobs(piece.token_ids, piece.logprobs),
                input_logprobs=None if self._has_sent_prompt else self._prompt,
                index=piece.index,
            )
            self._has_sent_prompt = True
            yield pb.GenerateResponse(chunk=chunk)

    def _complete(self, index: int, sequence: _Sequence, usage: RequestUsage) -> Any:
        assert sequence.finished is not None
        return pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=sequence.token_ids,
                finish_reason=_REASONS[sequence.finished.reason],
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=len(sequence.token_ids),
                cached_tokens=usage.cached_prompt_tokens,
                output_logprobs=self._output_logprobs(sequence.token_ids, sequence.logprobs),
                input_logprobs=self._prompt,
                index=index,
                **_matched(sequence.finished),
            )
        )

    def _sequence(self, index: int) -> _Sequence:
        return self._sequences.setdefault(index, _Sequence())

    def _output_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> Any:
        if not self.logprobs:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[token.logprob for token in logprobs], token_ids=token_ids, top_logprobs=map(_top, logprobs)
        )


def _input_logprobs(started: RequestStarted) -> Any:
    """Returns the logprobs of the prompt, whose first token has none."""
    logprobs = started.prompt_logprobs
    if not logprobs:
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=t.logprob) for t in logprobs)],
        token_ids=started.prompt_token_ids,
        top_logprobs=[pb.TopLogProbs(), *map(_top, logprobs)],
    )


def _top(token: Logprobs) -> Any:
    return pb.TopLogProbs(values=token.top_logprobs, token_ids=token.top_token_ids)


def _matched(finished: SequenceFinished) -> dict[str, str | int]:
    """Returns the field that names the matched stop; EOS counts as none."""
    match finished.match:
        case None:
            return {}
        case match if match.kind is MatchKind.STOP_STRING:
            return {"matched_stop_str": match.value}
        case match if match.kind is MatchKind.STOP_TOKEN:
            return {"matched_token_id": match.value}
    return {}
