"""The token that ends a completion, what it is called, and the text before it."""

from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.request.events import Match, MatchKind, SequenceFinished
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.stream.completion import SequenceText
from octavo.frontend.text.detokenizer import Vocabulary
from octavo.testing.small.tokenizers import byte_level_tokenizer, id_of
from octavo.wire.requests import FinishReason
from octavo.wire.sampling import Logprobs, SamplingParams

TOKENIZER = byte_level_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
END = id_of(TOKENIZER, "<|end|>")


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def completion(
    *,
    max_tokens: int = 100,
    min_tokens: int = 0,
    stop_ids: Collection[int] = (),
    stops: tuple[str, ...] = (),
    include: bool = False,
    skip: bool = True,
) -> SequenceText:
    request = GenerationRequest("", stop_strings=stops, stop_token_ids=sorted(stop_ids), include_stop=include)
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=sorted(stop_ids or {END}))
    return SequenceText(request, sampling, frozenset({END}), VOCABULARY.detokenizer(skip_special_tokens=skip))


def test_the_limit_ends_it_and_flushes_what_was_held() -> None:
    sequence = completion(max_tokens=4, stops=("xyz",))
    piece = sequence.feed([*ids("."), *ids("x"), *ids("y")])
    assert (piece.text, sequence.finished) == (".", None)
    piece = sequence.feed([*ids("."), *ids("after")])
    assert piece.text == "xy."
    assert piece.token_ids == ids(".")
    assert sequence.finished == SequenceFinished(FinishReason.LENGTH, None)


def test_eos_counts_and_has_no_text() -> None:
    sequence = completion()
    piece = sequence.feed([*ids("x"), END, *ids("y")])
    assert (piece.text, piece.token_ids, sequence.num_tokens) == ("x", [*ids("x"), END], 2)
    assert sequence.finished == SequenceFinished(FinishReason.STOP, Match(MatchKind.EOS_TOKEN, END))


def test_a_stop_token_is_called_so_and_kept_when_asked() -> None:
    [stop] = ids(".")
    sequence = completion(stop_ids={stop}, include=True)
    assert sequence.feed([*ids("x"), stop]).text == "x."
    assert sequence.finished == SequenceFinished(FinishReason.STOP, Match(MatchKind.STOP_TOKEN, stop))
    assert completion(stop_ids={stop}).feed([*ids("x"), stop]).text == "x"


def test_a_special_stop_token_appears_only_if_specials_do() -> None:
    assert completion(include=True, skip=True).feed([*ids("x"), END]).text == "x"
    assert completion(include=True, skip=False).feed([*ids("x"), END]).text == "x<|end|>"
    assert completion(include=False, skip=False).feed([*ids("x"), END]).text == "x"


def test_tokens_count_up_to_the_one_that_completes_the_stop_string() -> None:
    sequence = completion(stops=("y.",))
    piece = sequence.feed([*ids("x"), *ids("y"), *ids("."), *ids("x")])
    assert (piece.text, sequence.num_tokens) == ("x", 3)
    assert sequence.finished == SequenceFinished(FinishReason.STOP, Match(MatchKind.STOP_STRING, "y."))


def test_half_a_character_at_the_limit_becomes_a_replacement() -> None:
    first_byte = next(i for i in range(256) if VOCABULARY.pieces[i] == b"\xe6")
    assert completion(max_tokens=1).feed([first_byte]).text == "�"


def test_a_stop_string_counts_from_the_least_number_of_tokens_on() -> None:
    x, stop = ids("x"), ids(".")
    assert completion(stops=(".",), min_tokens=3).feed([*x, *stop, *x, *stop, *x]).text == "x.x"
    assert completion(stops=(".",), min_tokens=2).feed([*x, *stop, *x]).text == "x"


def test_a_stop_string_may_begin_before_the_least_number_of_tokens() -> None:
    sequence = completion(stops=("xy",), min_tokens=2)
    assert sequence.feed([*ids("."), *ids("x"), *ids("y")]).text == "."
    assert sequence.finished == SequenceFinished(FinishReason.STOP, Match(MatchKind.STOP_STRING, "xy"))


def test_logprobs_are_those_of_the_tokens_taken() -> None:
    sequence = completion(stops=("y",))
    logprobs = [Logprobs(-(2.0**-n), 1, [], []) for n in range(4)]
    piece = sequence.feed([*ids("x"), *ids("."), *ids("y"), *ids("x")], logprobs)
    assert piece.logprobs == logprobs[:3]
    assert sequence.cumulative_logprob == -1.75


def test_the_sum_of_logprobs_does_not_depend_on_the_pieces() -> None:
    logprobs = [Logprobs(-0.1 * n, 1, [], []) for n in range(1, 8)]
    whole, cut = completion(), completion()
    whole.feed(ids("x") * 7, logprobs)
    for start, end in ((0, 3), (3, 4), (4, 7)):
        cut.feed(ids("x") * (end - start), logprobs[start:end])
    assert cut.cumulative_logprob == whole.cumulative_logprob


BYTE_IDS = {VOCABULARY.pieces[token_id]: token_id for token_id in range(TOKENIZER.get_vocab_size())}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text("aé日🙂", max_size=12),
    stops=st.lists(st.text("aé日🙂", min_size=1, max_size=3), max_size=2),
    pieces=st.lists(st.integers(1, 5), max_size=20),
    include=st.booleans(),
)
def test_nothing_of_a_stop_string_is_let_out_whatever_tokens_it_spans(
    text: str, stops: list[str], pieces: list[int], include: bool
) -> None:
    # Every token is a byte: most end in the middle of a character.
    waiting = [BYTE_IDS[bytes([byte])] for byte in text.encode()]
    sequence = completion(stops=tuple(stops), include=include)
    let_out = ""
    for size in [*pieces, len(waiting)]:
        if not sequence.finished:
            let_out += sequence.feed(waiting[:size]).text
            waiting = waiting[size:]
    if not sequence.finished:
        let_out += sequence.feed([END]).text
    assert let_out == _up_to_stop(text, stops, include)


def _up_to_stop(text: str, stops: list[str], include: bool) -> str:
    """The rule itself, on the whole text: what is complete first wins, of those the longest."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[:end] if include else text[: end - max(map(len, ending))]
    # The end token is special, and skipped.
    return text
