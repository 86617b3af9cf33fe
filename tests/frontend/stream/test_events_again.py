"""The events of a request, and the same again for whoever reads it anew, however its tokens came."""

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.errors import Broken
from octavo.frontend.request.events import (
    Emitted,
    RequestNotice,
    RequestStarted,
    RequestUsage,
    SequenceFinished,
    TextDelta,
)
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.scheduler.journal import DeltaVerdict, Journal
from octavo.frontend.stream.answer import MAX_PIECE_TOKENS, Answer
from octavo.frontend.text.detokenizer import Vocabulary
from octavo.testing.fakes.fake_answers import made_up
from octavo.testing.small.tokenizers import byte_level_tokenizer
from octavo.wire import history
from octavo.wire.requests import Delta, FinishReason, NoticeKind
from octavo.wire.sampling import MAX_PARALLEL, BeamSearch, EarlyStopping, SamplingParams

TOKENIZER = byte_level_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
TEXTS = ["x", "y.", " 日本", "🙂", "stop", "é"]


@dataclass
class Request:
    """A request whose tokens the test brings."""

    sampling: SamplingParams
    num_results: int
    incremental: bool = True
    stop_strings: tuple[str, ...] = ()
    attempt: int = 0
    notices: list[RequestNotice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Journal("r", [1, 2], self.sampling, 0.0)
        asked = GenerationRequest(
            [1, 2], num_sequences=self.num_results, incremental=self.incremental, stop_strings=self.stop_strings
        )
        self.answer = Answer(self.journal, asked, "m", VOCABULARY, frozenset())

    def advance(self) -> list[Emitted]:
        notices, self.notices = self.notices, []
        return self.answer.advance(notices)

    def get(self, index: int, token_ids: list[int], reason: FinishReason | None = None) -> DeltaVerdict:
        """Tokens of a sequence, as they continue it."""
        sequence, sampling = self.journal.sequences[index], self.sampling
        done = len(sequence.token_ids) + len(token_ids) == sampling.max_tokens
        logprobs = [] if sampling.logprobs is None else [made_up(i, sampling.logprobs) for i in token_ids]
        delta = Delta(
            request_id="r",
            attempt=0,
            sequence_index=index,
            start_index=len(sequence.token_ids),
            previous_hash=history.extend(history.EMPTY, sequence.token_ids),
            token_ids=token_ids,
            finish_reason=FinishReason.LENGTH if done else reason,
            preemptions=0,
            swaps=0,
            cached_prompt_tokens=0,
            logprobs=logprobs,
            cumulative_logprob=None if sampling.beam is None else -1.0,
        )
        return self.journal.accept(delta, 1.0)


def replayed(answer: Answer, after: int) -> list[Emitted]:
    return [emitted for batch in answer.sent_after(after) for emitted in batch]


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


requests = st.builds(
    lambda n, kept, logprobs, incremental, stops, beam, max_tokens: Request(
        SamplingParams(
            max_tokens=max_tokens,
            num_sequences=n,
            # The best are known by their logprobs.
            logprobs=0 if logprobs is None and kept < n and not beam else None if beam else logprobs,
            beam=BeamSearch(n, 1.0, EarlyStopping.OFF) if beam else None,
        ),
        num_results=n if beam else min(kept, n),
        incremental=incremental,
        stop_strings=() if beam else stops,
    ),
    n=st.integers(1, 3),
    kept=st.integers(1, 3),
    logprobs=st.sampled_from([None, 0, 2]),
    incremental=st.booleans(),
    stops=st.sampled_from([(), (".",), ("top", "y."), ("本",)]),
    beam=st.booleans(),
    max_tokens=st.integers(1, 12),
)


def run_by_chance(request: Request, rng: random.Random) -> list[Emitted]:
    """All its events, its tokens having come in pieces and turns as chance has it, and notices between them."""
    told: list[Emitted] = []
    answers = [ids_of("".join(rng.choices(TEXTS, k=12))) for _ in request.journal.sequences]
    while not request.answer.finished:
        for index, sequence in enumerate(request.journal.sequences):
            start = len(sequence.token_ids)
            count = rng.randrange(4) if request.sampling.beam is None else request.sampling.max_tokens
            new = answers[index][start : min(start + count, request.sampling.max_tokens)]
            if new and not sequence.complete:
                assert request.get(index, new) is DeltaVerdict.ACCEPTED
        if rng.random() < 0.3:
            request.notices.append(RequestNotice(rng.choice(list(NoticeKind)), rng.randrange(3)))
        told += request.advance()
    return told


@given(requests, st.integers(0, 2**32))
def test_events_told_again_are_the_same_after_every_offset(request: Request, seed: int) -> None:
    told = run_by_chance(request, random.Random(seed))
    assert [emitted.offset for emitted in told] == list(range(1, len(told) + 1))
    assert isinstance(told[-1].event, RequestUsage)
    for after in range(len(told) + 1):
        assert replayed(request.answer, after) == told[after:]


def test_what_was_told_so_far_is_told_again_while_it_runs() -> None:
    token_ids = ids_of("日x🙂yé")
    request = Request(SamplingParams(max_tokens=len(token_ids)), num_results=1)
    told = []
    for token_id in token_ids:
        request.get(0, [token_id])
        told += request.advance()
        assert replayed(request.answer, 0) == told
    told += request.advance()
    assert request.answer.finished
    assert replayed(request.answer, 0) == told


def test_a_notice_comes_before_the_start_and_between_tokens() -> None:
    request = Request(SamplingParams(max_tokens=2), num_results=1)
    request.notices.append(RequestNotice(NoticeKind.QUEUED, 4))
    kinds = [type(e) for _, e in request.advance()]
    request.get(0, [5])
    kinds += [type(e) for _, e in itertools.chain(request.advance(), request.advance())]
    request.notices.append(RequestNotice(NoticeKind.PREEMPTED))
    request.get(0, [6])
    kinds += [type(e) for _, e in request.advance()]
    assert kinds == [RequestNotice, RequestStarted, TextDelta, RequestNotice, TextDelta, SequenceFinished, RequestUsage]


def test_a_long_answer_comes_in_pieces_of_a_bounded_size() -> None:
    count = 2 * MAX_PIECE_TOKENS + 1
    request = Request(SamplingParams(max_tokens=count, logprobs=0), num_results=1)
    request.get(0, [5] * count)
    told: list[Emitted] = []
    behind = []
    while not request.answer.finished:
        told += request.advance()
        behind.append(request.answer.behind)
    # Each turn but the last asks for the next.
    assert behind == [True, True, True, False]
    sizes = [len(e.token_ids) for _, e in told if isinstance(e, TextDelta)]
    assert sizes == [MAX_PIECE_TOKENS, MAX_PIECE_TOKENS, 1]
    assert replayed(request.answer, 0) == told


def test_a_whole_answer_of_any_length_and_place_comes_again() -> None:
    count = 1 << 20
    request = Request(SamplingParams(max_tokens=count, num_sequences=MAX_PARALLEL), MAX_PARALLEL, incremental=False)
    told: list[Emitted] = []
    request.get(MAX_PARALLEL - 1, [5] * count)
    for index in range(MAX_PARALLEL - 1):
        request.get(index, [5], FinishReason.STOP)
    while not any(isinstance(event, SequenceFinished) for _, event in told):
        told += request.advance()
    [whole] = [event for _, event in told if isinstance(event, TextDelta)]
    assert (whole.index, len(whole.token_ids)) == (MAX_PARALLEL - 1, count)
    assert [(e.index, e.token_ids) for _, e in replayed(request.answer, 0) if isinstance(e, TextDelta)] == [
        (whole.index, whole.token_ids)
    ]


def test_an_end_that_no_token_shows_is_a_fault_once_all_is_told() -> None:
    request = Request(SamplingParams(max_tokens=9), num_results=1)
    request.get(0, [5], FinishReason.STOP)
    assert [type(e) for _, e in request.advance()] == [RequestStarted]
    assert (request.answer.behind, request.answer.fault) == (True, None)
    assert [type(e) for _, e in request.advance()] == [TextDelta]
    assert isinstance(request.answer.fault, Broken)
    assert "without a reason" in str(request.answer.fault)
