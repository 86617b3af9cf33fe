"""Only what continues a journal gets in; everything else is stale or a reason to submit again."""

from typing import Any

import pytest

from octavo.frontend.scheduler.journal import DeltaVerdict, DraftUse, Journal
from octavo.wire import history
from octavo.wire.requests import CacheKey, Delta, FinishReason, GeneratedSequence
from octavo.wire.sampling import BeamSearch, EarlyStopping, Logprobs, SamplingParams

TOKENS = [10, 11, 12, 13, 14, 15]
BEAM = BeamSearch(width=3, length_penalty=1.0, early_stopping=EarlyStopping.OFF)
SURE = Logprobs(-0.5, 1, [], [])


def journal_of(**sampling: Any) -> Journal:
    params = SamplingParams(seed=7, max_tokens=6, stop_token_ids=[99], **sampling)
    journal = Journal("r", [1, 2], params, arrived_at=100.0, priority=3, tenant="t", cache_key=CacheKey(salt="s"))
    journal.start_attempt(1)
    return journal


@pytest.fixture
def journal() -> Journal:
    return journal_of()


@pytest.fixture
def pair() -> Journal:
    return journal_of(num_sequences=2)


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
        "swaps": 0,
        "cached_prompt_tokens": 0,
    }
    return Delta(**(fields | changes))  # type: ignore[arg-type]


def test_it_grows_by_what_continues_it(journal: Journal) -> None:
    assert journal.accept(delta(0, 2), 101.0) is DeltaVerdict.ACCEPTED
    assert journal.accept(delta(2, 3), 102.0) is DeltaVerdict.ACCEPTED
    assert journal.sequences[0].token_ids == TOKENS[:3]
    assert (journal.first_token_at, journal.last_token_at) == (101.0, 102.0)


def test_a_repetition_is_broken(journal: Journal) -> None:
    journal.accept(delta(0, 3), 101.0)
    assert journal.accept(delta(0, 2), 102.0) is DeltaVerdict.BROKEN
    assert journal.accept(delta(2, 4), 102.0) is DeltaVerdict.BROKEN
    assert journal.sequences[0].token_ids == TOKENS[:3]


def test_a_gap_is_broken(journal: Journal) -> None:
    journal.accept(delta(0, 1), 101.0)
    assert journal.accept(delta(2, 3), 102.0) is DeltaVerdict.BROKEN
    assert journal.sequences[0].token_ids == TOKENS[:1]


def test_another_history_at_the_right_place_is_broken(journal: Journal) -> None:
    journal.accept(delta(0, 2), 101.0)
    assert journal.accept(delta(2, 3, tokens=[10, 66, 12]), 102.0) is DeltaVerdict.BROKEN


def test_an_earlier_attempt_is_stale(journal: Journal) -> None:
    journal.accept(delta(0, 1), 101.0)
    journal.start_attempt(2)
    assert journal.accept(delta(1, 2), 102.0) is DeltaVerdict.STALE
    assert journal.accept(delta(1, 2, attempt=2), 102.0) is DeltaVerdict.ACCEPTED


def test_a_sequence_that_was_not_asked_for_is_stale(journal: Journal) -> None:
    assert journal.accept(delta(0, 1, sequence_index=1), 101.0) is DeltaVerdict.STALE


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
    assert journal.accept(delta(2, 3), 102.0) is DeltaVerdict.STALE


def test_a_submission_carries_all_that_is_needed_to_go_on(journal: Journal) -> None:
    journal.accept(delta(0, 2, preemptions=1), 101.0)
    journal.start_attempt(2)
    request = journal.submit("model", now=103.5)
    assert (request.attempt, request.prompt_token_ids) == (2, [1, 2])
    assert request.generated == [GeneratedSequence(TOKENS[:2], finished=False)]
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


def test_a_submission_says_who_asks_and_how_urgent_it_is(journal: Journal) -> None:
    request = journal.submit("model", now=100.0)
    assert (request.priority, request.tenant, request.cache_key) == (3, "t", CacheKey(salt="s"))


def test_sequences_grow_each_by_itself(pair: Journal) -> None:
    other = [20, 21, 22]
    assert pair.accept(delta(0, 2), 101.0) is DeltaVerdict.ACCEPTED
    assert pair.accept(delta(0, 1, tokens=other, sequence_index=1), 101.0) is DeltaVerdict.ACCEPTED
    assert pair.accept(delta(1, 3, tokens=other, sequence_index=1), 102.0) is DeltaVerdict.ACCEPTED
    assert pair.accept(delta(2, 3, sequence_index=1), 103.0) is DeltaVerdict.BROKEN
    assert [sequence.token_ids for sequence in pair.sequences] == [TOKENS[:2], other]


def test_all_sequences_must_end_and_nothing_follows_the_end_of_one(pair: Journal) -> None:
    pair.accept(delta(0, 6), 101.0)
    assert not pair.complete
    assert pair.accept(delta(6, 7), 102.0) is DeltaVerdict.STALE
    pair.accept(delta(0, 2, sequence_index=1, finish_reason=FinishReason.STOP), 102.0)
    assert pair.complete


def test_nothing_generated_is_told_as_nothing(pair: Journal) -> None:
    assert pair.submit("model", now=101.0).generated == []


def test_a_submission_says_which_sequences_have_ended_however_they_did() -> None:
    journal = journal_of(num_sequences=5)
    journal.accept(delta(0, 6), 101.0)
    journal.accept(delta(0, 2, tokens=[10, 99], sequence_index=1), 101.0)
    journal.accept(delta(0, 1, sequence_index=2, finish_reason=FinishReason.STOP), 101.0)
    journal.accept(delta(0, 3, sequence_index=3), 101.0)
    journal.end_sequence(3)
    assert journal.submit("model", now=102.0).generated == [
        GeneratedSequence(TOKENS, finished=True),
        GeneratedSequence([10, 99], finished=True),
        GeneratedSequence(TOKENS[:1], finished=True),
        GeneratedSequence(TOKENS[:3], finished=True),
        GeneratedSequence([], finished=False),
    ]


def test_a_sequence_ended_here_takes_nothing_more(pair: Journal) -> None:
    pair.accept(delta(0, 1), 101.0)
    assert pair.end_sequence(0)
    assert pair.accept(delta(1, 2), 102.0) is DeltaVerdict.STALE
    assert not pair.complete


def test_the_last_sequence_is_not_ended_here(pair: Journal) -> None:
    assert pair.end_sequence(1)
    assert not pair.end_sequence(1)
    assert not pair.end_sequence(0)
    assert not pair.complete


def test_swaps_add_up_over_attempts(pair: Journal) -> None:
    pair.submit("model", now=100.0)
    pair.accept(delta(0, 1, preemptions=3, swaps=2), 101.0)
    pair.start_attempt(2)
    pair.submit("model", now=101.0)
    pair.accept(delta(1, 2, attempt=2, preemptions=1, swaps=1), 102.0)
    assert (pair.preemptions, pair.swaps) == (5, 3)


def test_drafts_add_up_over_sequences_and_attempts(pair: Journal) -> None:
    told: dict[str, Any] = {"drafted": 5, "accepted": 3, "accepted_predictions": 2, "rejected_predictions": 1}
    pair.accept(delta(0, 1, drafted=1, accepted=1), 1.0)
    pair.accept(delta(1, 2, **told), 1.0)
    # What comes without drafts leaves the counts as they are.
    pair.accept(delta(0, 1, sequence_index=1), 1.0)
    assert pair.draft_use == DraftUse(5, 3, 2, 1)
    pair.start_attempt(2)
    assert pair.draft_use == DraftUse(5, 3, 2, 1)
    pair.accept(delta(2, 3, attempt=2, drafted=2), 2.0)
    pair.accept(delta(1, 2, attempt=2, sequence_index=1, **told), 2.0)
    assert pair.draft_use == DraftUse(12, 6, 4, 2)


def test_every_submission_carries_the_prediction() -> None:
    journal = Journal("r", [1, 2], SamplingParams(max_tokens=6), 0.0, predicted_token_ids=(7, 8, 9))
    for attempt in (1, 2):
        journal.start_attempt(attempt)
        assert journal.submit("model", now=1.0).predicted_token_ids == [7, 8, 9]


def test_a_beam_search_starts_over() -> None:
    journal = journal_of(num_sequences=2, beam=BEAM)
    best = delta(0, 6, finish_reason=FinishReason.LENGTH, cumulative_logprob=-1.5)
    assert journal.accept(best, 101.0) is DeltaVerdict.ACCEPTED
    assert journal.sequences[0].cumulative_logprob == -1.5
    journal.start_attempt(2)
    assert journal.submit("model", now=102.0).generated == []


def test_the_prompts_logprobs_come_first_and_are_kept() -> None:
    journal = journal_of(num_sequences=2, prompt_logprobs=0)
    assert journal.accept(delta(0, 1, sequence_index=1), 101.0) is DeltaVerdict.ACCEPTED
    assert not journal.begun
    assert journal.accept(delta(0, 1, prompt_logprobs=[SURE]), 101.0) is DeltaVerdict.ACCEPTED
    assert journal.begun
    assert journal.accept(delta(1, 2), 102.0) is DeltaVerdict.ACCEPTED
    assert journal.prompt_logprobs == [SURE]


@pytest.mark.parametrize(
    ("asked", "brought"),
    [
        ({"logprobs": 0}, {"logprobs": []}),
        ({"logprobs": 0}, {"logprobs": [SURE, SURE, SURE]}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": [SURE, SURE]}),
        ({"beam": BEAM}, {"cumulative_logprob": None}),
    ],
)
def test_what_lacks_the_logprobs_asked_for_is_a_fault(asked: dict[str, Any], brought: dict[str, Any]) -> None:
    journal = journal_of(**asked)
    assert journal.accept(delta(0, 2, **brought), 101.0) is DeltaVerdict.FAULTY
    assert not journal.begun
    assert journal_of().accept(delta(0, 2, **brought), 101.0) is DeltaVerdict.ACCEPTED


def test_a_prompt_takes_four_bytes_for_a_token_until_it_is_sent() -> None:
    """Not nine times as many, as a list of large numbers does."""
    prompt = list(range(1000, 2000))
    journal = Journal("r", prompt, SamplingParams(max_tokens=4), 0.0)
    assert len(memoryview(journal.prompt_token_ids).tobytes()) == 4 * len(prompt)  # type: ignore[arg-type]
    assert journal.submit("model", 0.0).prompt_token_ids == prompt
