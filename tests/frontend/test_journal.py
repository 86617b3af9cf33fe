"""Only what continues a journal gets in; everything else is stale or a reason to submit again."""

import pytest

from octavo.frontend.journal import Journal, Verdict
from octavo.wire import history
from octavo.wire.requests import Delta, FinishReason
from octavo.wire.sampling import SamplingParams

TOKENS = [10, 11, 12, 13, 14, 15]


@pytest.fixture
def journal() -> Journal:
    sampling = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=7, max_tokens=6, stop_token_ids=[99])
    journal = Journal("r", [1, 2], sampling, arrived_at=100.0)
    journal.start_attempt(1)
    return journal


def delta(start: int, end: int, *, tokens: list[int] = TOKENS, attempt: int = 1, **changes: object) -> Delta:
    fields: dict[str, object] = {
        "request_id": "r",
        "attempt": attempt,
        "sequence_index": 0,
        "start_index": start,
        "previous_hash": history.extend(history.EMPTY, tokens[:start]),
        "token_ids": tokens[start:end],
        "finish_reason": None,
        "preemptions": 0,
        "cached_prompt_tokens": 0,
    }
    return Delta(**(fields | changes))  # type: ignore[arg-type]


def test_it_grows_by_what_continues_it(journal: Journal) -> None:
    assert journal.accept(delta(0, 2), 101.0) is Verdict.ACCEPTED
    assert journal.accept(delta(2, 3), 102.0) is Verdict.ACCEPTED
    assert journal.generated_token_ids == TOKENS[:3]
    assert (journal.first_token_at, journal.last_token_at) == (101.0, 102.0)


def test_a_repetition_is_broken(journal: Journal) -> None:
    journal.accept(delta(0, 3), 101.0)
    assert journal.accept(delta(0, 2), 102.0) is Verdict.BROKEN
    assert journal.accept(delta(2, 4), 102.0) is Verdict.BROKEN
    assert journal.generated_token_ids == TOKENS[:3]


def test_a_gap_is_broken(journal: Journal) -> None:
    journal.accept(delta(0, 1), 101.0)
    assert journal.accept(delta(2, 3), 102.0) is Verdict.BROKEN
    assert journal.generated_token_ids == TOKENS[:1]


def test_another_history_at_the_right_place_is_broken(journal: Journal) -> None:
    journal.accept(delta(0, 2), 101.0)
    assert journal.accept(delta(2, 3, tokens=[10, 66, 12]), 102.0) is Verdict.BROKEN


def test_an_earlier_attempt_is_stale(journal: Journal) -> None:
    journal.accept(delta(0, 1), 101.0)
    journal.start_attempt(2)
    assert journal.accept(delta(1, 2), 102.0) is Verdict.STALE
    assert journal.accept(delta(1, 2, attempt=2), 102.0) is Verdict.ACCEPTED


def test_another_sequence_is_stale(journal: Journal) -> None:
    assert journal.accept(delta(0, 1, sequence_index=1), 101.0) is Verdict.STALE


def test_completeness_is_seen_in_the_tokens(journal: Journal) -> None:
    journal.accept(delta(0, 5), 101.0)
    assert not journal.complete
    journal.accept(delta(5, 6), 101.0)
    assert journal.complete


def test_a_stop_token_completes(journal: Journal) -> None:
    journal.accept(delta(0, 2, tokens=[10, 99]), 101.0)
    assert journal.complete


def test_nothing_follows_the_end(journal: Journal) -> None:
    journal.accept(delta(0, 2, finish_reason=FinishReason.LENGTH), 101.0)
    assert journal.accept(delta(2, 3), 102.0) is Verdict.STALE


def test_a_submission_carries_all_that_is_needed_to_go_on(journal: Journal) -> None:
    journal.accept(delta(0, 2, preemptions=1), 101.0)
    journal.start_attempt(2)
    request = journal.submit("model", now=103.5)
    assert (request.attempt, request.prompt_token_ids, request.generated_token_ids) == (2, [1, 2], TOKENS[:2])
    assert (request.age_ms, request.sampling.seed, request.model_fingerprint) == (3500, 7, "model")


def test_only_the_first_submission_is_none_again(journal: Journal) -> None:
    assert [journal.submit("model", now=103.5).resubmitted for _ in range(3)] == [False, True, True]


def test_preemptions_add_up_over_attempts(journal: Journal) -> None:
    journal.submit("model", now=100.0)
    journal.accept(delta(0, 1, preemptions=2), 101.0)
    journal.start_attempt(2)
    journal.submit("model", now=101.0)
    journal.accept(delta(1, 2, attempt=2, preemptions=1), 102.0)
    # Two within the first attempt, one for its loss, one within the second.
    assert journal.preemptions == 4


def test_what_never_left_was_not_preempted(journal: Journal) -> None:
    journal.start_attempt(2)
    assert journal.preemptions == 0


def test_cached_prompt_tokens_are_those_of_the_attempt_that_began_the_answer(journal: Journal) -> None:
    journal.accept(delta(0, 1, cached_prompt_tokens=7), 101.0)
    journal.accept(delta(1, 2, cached_prompt_tokens=9), 102.0)
    assert journal.cached_prompt_tokens == 7
