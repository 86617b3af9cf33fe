"""The events of a request, and the same again for whoever reads it anew, however its tokens came."""

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.errors import Broken
from octavo.frontend.request.events import Emitted, Finished, Notice, Started, TextDelta, Usage
from octavo.frontend.scheduler.journal import Journal, Verdict
from octavo.frontend.scheduler.reader import Reader
from octavo.frontend.stream.answer import MAX_PIECE_TOKENS, Completion, EndRules
from octavo.frontend.stream.stream import Shape, Stream
from octavo.frontend.text.detokenizer import StopStrings, Vocabulary, make_detokenizer
from octavo.testing.fakes.fake_answers import made_up
from octavo.testing.small.tokenizers import byte_level_tokenizer
from octavo.wire import history
from octavo.wire.requests import Delta, FinishReason, NoticeKind
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams

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
    reader: Reader = field(default_factory=Reader)
    attempt: int = 0

    def __post_init__(self) -> None:
        self.journal = Journal("r", [1, 2], self.sampling, 0.0)
        self.stream = Stream(
            self.journal, self.reader, Shape("m", self.num_results, self.incremental, self._completion)
        )

    def _completion(self) -> Completion:
        sampling = self.sampling
        rules = EndRules(sampling.max_tokens, sampling.min_tokens, frozenset(), frozenset(), include_stop=False)
        detokenizer = make_detokenizer(VOCABULARY, skip_special_tokens=True)
        return Completion(rules, detokenizer, StopStrings(self.stop_strings, include_stop=False))

    def get(self, index: int, token_ids: list[int], reason: FinishReason | None = None) -> Verdict:
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


def replayed(stream: Stream, after: int) -> list[Emitted]:
    return [emitted for batch in stream.sent_after(after) for emitted in batch]


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
    while not request.stream.finished:
        for index, sequence in enumerate(request.journal.sequences):
            start = len(sequence.token_ids)
            count = rng.randrange(4) if request.sampling.beam is None else request.sampling.max_tokens
            new = answers[index][start : min(start + count, request.sampling.max_tokens)]
            if new and not sequence.complete:
                assert request.get(index, new) is Verdict.ACCEPTED
        if rng.random() < 0.3:
            request.reader.tell(Notice(rng.choice(list(NoticeKind)), rng.randrange(3)))
        told += request.stream.advance()
    return told


@given(requests, st.integers(0, 2**32))
def test_events_told_again_are_the_same_after_every_offset(request: Request, seed: int) -> None:
    told = run_by_chance(request, random.Random(seed))
    assert [emitted.offset for emitted in told] == list(range(1, len(told) + 1))
    assert isinstance(told[-1].event, Usage)
    for after in range(len(told) + 1):
        assert replayed(request.stream, after) == told[after:]


def test_what_was_told_so_far_is_told_again_while_it_runs() -> None:
    token_ids = ids_of("日x🙂yé")
    request = Request(SamplingParams(max_tokens=len(token_ids)), num_results=1)
    told = []
    for token_id in token_ids:
        request.get(0, [token_id])
        told += request.stream.advance()
        assert replayed(request.stream, 0) == told
    told += request.stream.advance()
    assert request.stream.finished
    assert replayed(request.stream, 0) == told


def test_a_notice_comes_before_the_start_and_between_tokens() -> None:
    request = Request(SamplingParams(max_tokens=2), num_results=1)
    request.reader.tell(Notice(NoticeKind.QUEUED, 4))
    kinds = [type(e) for _, e in request.stream.advance()]
    request.get(0, [5])
    kinds += [type(e) for _, e in itertools.chain(request.stream.advance(), request.stream.advance())]
    request.reader.tell(Notice(NoticeKind.PREEMPTED))
    request.get(0, [6])
    kinds += [type(e) for _, e in request.stream.advance()]
    assert kinds == [Notice, Started, TextDelta, Notice, TextDelta, Finished, Usage]


async def test_a_long_answer_comes_in_pieces_of_a_bounded_size() -> None:
    count = 2 * MAX_PIECE_TOKENS + 1
    request = Request(SamplingParams(max_tokens=count, logprobs=0), num_results=1)
    turn = request.reader.take()
    request.get(0, [5] * count)
    told: list[Emitted] = []
    while not request.stream.finished:
        # Each turn asks for the next.
        await turn.wait()
        told += request.stream.advance()
    sizes = [len(e.token_ids) for _, e in told if isinstance(e, TextDelta)]
    assert sizes == [MAX_PIECE_TOKENS, MAX_PIECE_TOKENS, 1]
    assert replayed(request.stream, 0) == told


async def test_an_end_that_no_token_shows_fails_it_once_all_is_told() -> None:
    request = Request(SamplingParams(max_tokens=9), num_results=1)
    turn = request.reader.take()
    request.get(0, [5], FinishReason.STOP)
    await turn.wait()
    assert [type(e) for _, e in request.stream.advance()] == [Started]
    await turn.wait()
    assert [type(e) for _, e in request.stream.advance()] == [TextDelta]
    with pytest.raises(Broken, match="without a reason"):
        await turn.wait()
