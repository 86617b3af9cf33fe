"""Which events a request's sequences become, one turn at a time."""

import pytest

from octavo.frontend.errors import Broken
from octavo.frontend.request.events import SequenceFinished, TextDelta, num_numbers
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.scheduler.journal import DeltaVerdict, Journal
from octavo.frontend.stream.answer import MAX_PIECE_NUMBERS, Answer
from octavo.frontend.text.detokenizer import Vocabulary
from octavo.testing.small.tokenizers import byte_level_tokenizer
from octavo.wire import history
from octavo.wire.requests import Delta, FinishReason
from octavo.wire.sampling import Logprobs, SamplingParams

TOKENIZER = byte_level_tokenizer()
[X, Y, DOT] = TOKENIZER.encode("xy.", add_special_tokens=False).ids


class RunningRequest:
    """An answer and the journal that it is made from; tokens of `y` are the likelier ones."""

    def __init__(self, *, num_sequences: int = 2, num_results: int | None = None, incremental: bool = True) -> None:
        ranked = num_results is not None
        sampling = SamplingParams(max_tokens=3, num_sequences=num_sequences, logprobs=0 if ranked else None)
        self.journal = Journal("r", [1], sampling, 0.0)
        request = GenerationRequest(
            [1], num_sequences=num_results or num_sequences, incremental=incremental, stop_strings=(".",)
        )
        self.answer = Answer(self.journal, request, "m", Vocabulary(TOKENIZER), frozenset())

    def get(self, index: int, *token_ids: int, reason: FinishReason | None = None) -> None:
        sequence = self.journal.sequences[index]
        logprobs = [Logprobs(-1.0 if i == X else -0.5, 1, [], []) for i in token_ids]
        delta = Delta(
            request_id="r",
            attempt=0,
            sequence_index=index,
            start_index=len(sequence.token_ids),
            previous_hash=history.extend(history.EMPTY, sequence.token_ids),
            token_ids=list(token_ids),
            finish_reason=reason,
            preemptions=0,
            swaps=0,
            cached_prompt_tokens=0,
            logprobs=logprobs if self.journal.sampling.logprobs is not None else [],
        )
        assert self.journal.accept(delta, 1.0) is DeltaVerdict.ACCEPTED

    def events(self) -> list[TextDelta | SequenceFinished]:
        """What is due of its sequences."""
        if not self.answer.has_begun:
            self.answer.advance()
        return [event for _, event in self.answer.advance() if isinstance(event, TextDelta | SequenceFinished)]

    def advance(self) -> list[tuple[int, str]]:
        """(index, text) of pieces; an end has the text "|"."""
        return [(e.index, e.text if isinstance(e, TextDelta) else "|") for e in self.events()]


def test_what_came_since_the_last_turn_comes_in_one_piece() -> None:
    running = RunningRequest()
    running.get(0, X)
    running.get(0, Y)
    running.get(1, Y)
    assert running.advance() == [(0, "xy"), (1, "y")]
    assert running.advance() == []
    running.get(1, X)
    assert running.advance() == [(1, "x")]


def test_an_end_comes_once_right_after_its_sequence() -> None:
    running = RunningRequest()
    running.get(0, X, X, X)
    running.get(1, Y)
    assert running.advance() == [(0, "xxx"), (0, "|"), (1, "y")]
    assert not running.answer.finished
    running.get(1, Y, Y)
    assert running.advance() == [(1, "yy"), (1, "|")]
    assert running.answer.finished


def test_whole_sequences_come_as_they_end() -> None:
    running = RunningRequest(incremental=False)
    running.get(0, X)
    running.get(1, Y, Y, Y)
    assert running.advance() == [(1, "yyy"), (1, "|")]
    running.get(0, X, Y)
    assert running.advance() == [(0, "xxy"), (0, "|")]


def test_the_best_come_once_all_have_ended() -> None:
    running = RunningRequest(num_sequences=3, num_results=2)
    running.get(0, X, Y, Y)
    running.get(1, X, X, X)
    running.get(2, Y, Y)
    assert running.advance() == []
    running.get(2, Y)
    assert running.advance() == [(0, "yyy"), (0, "|"), (1, "xyy"), (1, "|")]
    assert running.answer.usage().completion_tokens == 9


def test_equally_likely_ones_keep_their_order() -> None:
    running = RunningRequest(num_sequences=3, num_results=2)
    for index, token_ids in enumerate(([X, Y, Y], [Y, X, Y], [Y, Y, X])):
        running.get(index, *token_ids)
    assert running.advance() == [(0, "xyy"), (0, "|"), (1, "yxy"), (1, "|")]


def test_an_end_has_the_sum_of_its_logprobs() -> None:
    running = RunningRequest(num_sequences=2, num_results=1)
    running.get(0, Y, X, Y)
    running.get(1, X, X, X)
    assert running.events()[-1] == SequenceFinished(FinishReason.LENGTH, None, -2.0, 0)


def test_a_stop_string_ends_a_sequence_here_that_runs_there() -> None:
    running = RunningRequest()
    running.get(0, X, DOT)
    running.get(1, Y, Y, DOT)
    running.advance()
    # The other has reached its limit as well, which the scheduler sees by itself.
    assert running.answer.ended_here == [0]
    running.advance()
    assert running.answer.ended_here == []


def test_an_end_that_no_token_shows_is_a_fault() -> None:
    running = RunningRequest()
    running.get(0, X, reason=FinishReason.STOP)
    running.advance()
    assert isinstance(running.answer.fault, Broken)
    assert "after 1 tokens without a reason" in str(running.answer.fault)


def test_an_end_that_is_still_unread_is_none() -> None:
    running = RunningRequest(num_sequences=1)
    running.get(0, X, DOT, reason=FinishReason.STOP)
    running.answer.advance()
    assert running.answer.fault is None
    running.advance()
    assert running.answer.fault is None


@pytest.mark.parametrize("incremental", [False, True])
def test_many_logprobs_come_in_several_pieces(incremental: bool) -> None:
    top, count = 20, 1000
    journal = Journal("r", [1], SamplingParams(max_tokens=count, logprobs=top), 0.0)
    request = GenerationRequest([1], incremental=incremental)
    answer = Answer(journal, request, "m", Vocabulary(TOKENIZER), frozenset())
    logprobs = [Logprobs(-float(i), 1, [X] * top, [-1.0] * top) for i in range(count)]
    delta = Delta("r", 0, 0, 0, history.EMPTY, [X] * count, FinishReason.LENGTH, 0, 0, 0, logprobs)
    assert journal.accept(delta, 1.0) is DeltaVerdict.ACCEPTED
    pieces = []
    while not answer.finished:
        pieces += [event for _, event in answer.advance() if isinstance(event, TextDelta)]
    assert "".join(piece.text for piece in pieces) == "x" * count
    assert [token_id for piece in pieces for token_id in piece.token_ids] == [X] * count
    assert [entry for piece in pieces for entry in piece.logprobs] == logprobs
    assert max(num_numbers(piece.logprobs) for piece in pieces) <= MAX_PIECE_NUMBERS
