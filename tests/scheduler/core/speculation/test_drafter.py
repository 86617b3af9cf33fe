"""Drafts continue what a sequence repeats: its prompt, its output, its siblings, its prediction, what its tenant was
told lately; and nothing else."""

import random
import sys
from collections.abc import Iterable
from itertools import accumulate
from operator import mul

import msgspec
import pytest

from octavo.scheduler.core.sequence import RequestGroup, Sequence
from octavo.scheduler.core.speculation.draft import NO_GUESSES, Draft, DraftSource
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.speculation.store import HALF_TOKENS, MOST_OWNERS, OutputStore, Owner
from octavo.testing.cluster import make_request
from octavo.wire.requests import CacheKey, GeneratedSequence

PHRASE = [500, 501, 502, 503, 504, 505, 506, 507]


def make_group(
    prompt: Iterable[int] = (),
    *,
    predicted: Iterable[int] = (),
    generated: Iterable[int] = (),
    tenant: str = "",
    key: CacheKey | None = None,
    num_sequences: int = 1,
) -> RequestGroup:
    request = msgspec.structs.replace(
        make_request("r", 4, 100_000, tenant=tenant, num_sequences=num_sequences),
        prompt_token_ids=[*prompt, 1, 2, 3],
        predicted_token_ids=list(predicted),
        cache_key=key or CacheKey(),
        generated=[GeneratedSequence(list(generated), finished=False)] * num_sequences if generated else [],
    )
    return RequestGroup(request, 0.0, (0.0, 0), frontend_id=1)


def proposed(drafter: Drafter, group: RequestGroup, *tokens: int, index: int = 0, most: int = 2) -> Draft | None:
    """What is guessed after these further tokens, which come one by one; it is asked for after each."""
    sequence = group.sequences[index]
    drafter.begin_step()
    for token in tokens:
        drafter.propose(group, sequence, most)
        append(sequence, token)
        drafter.begin_step()
    draft = drafter.propose(group, sequence, most)
    return draft if draft is not None and draft.token_ids else None


def owner(number: int = 0) -> Owner:
    return Owner(f"tenant-{number}", "", "")


def append(sequence: Sequence, *tokens: int) -> None:
    for token in tokens:
        sequence.append(token)


def guessed(draft: Draft | None) -> tuple[list[int], DraftSource] | None:
    return None if draft is None else (draft.token_ids, draft.source)


def test_a_sequence_that_repeats_its_prompt_is_continued_from_there() -> None:
    group = make_group([*PHRASE, 9])
    assert guessed(proposed(Drafter(), group, 7, 500, 501, 502)) == ([503, 504], DraftSource.PROMPT)


def test_a_sequence_that_repeats_its_output_is_continued_from_there() -> None:
    draft = proposed(Drafter(), make_group(), *PHRASE, 8, 500, 501, 502)
    assert guessed(draft) == ([503, 504], DraftSource.OUTPUT)


def test_the_output_of_another_sequence_of_the_request_is_repeated() -> None:
    drafter, group = Drafter(), make_group(num_sequences=2)
    proposed(drafter, group, *PHRASE)
    draft = proposed(drafter, group, 7, 500, 501, 502, index=1)
    assert guessed(draft) == ([503, 504], DraftSource.SIBLING)


def test_what_was_never_there_before_is_not_guessed() -> None:
    drafter, group = Drafter(), make_group(range(100, 200))
    assert all(proposed(drafter, group, token) is None for token in range(1000, 1100))


def test_a_run_that_ends_a_loop_is_guessed_to_go_round_and_round() -> None:
    drafter, group = Drafter(), make_group()
    draft = proposed(drafter, group, *(10 * [11, 12, 13]), most=8)
    assert guessed(draft) == ([11, 12, 13, 11, 12, 13, 11, 12], DraftSource.OUTPUT)


def test_no_more_is_guessed_than_is_asked_for() -> None:
    drafter, group = Drafter(), make_group([*PHRASE, 9])
    draft = proposed(drafter, group, 500, 501, 502, most=2)
    assert draft is not None
    assert (draft.token_ids, len(draft.chances)) == ([503, 504], 2)
    assert proposed(drafter, group, most=0) is None


def test_a_draft_ends_with_the_text_that_it_copies() -> None:
    draft = proposed(Drafter(), make_group(range(100, 200)), *range(100, 198), most=32)
    assert guessed(draft) == ([198, 199, 1, 2, 3], DraftSource.PROMPT)


def test_a_copy_is_followed_without_being_searched_for_again_and_gains_chance() -> None:
    drafter, group = Drafter(), make_group(range(100, 200))
    chances = [draft.chances[0] for token in range(100, 150) if (draft := proposed(drafter, group, token))]
    assert len(chances) == 48
    assert chances[-1] > 0.9 > chances[0]


def test_a_copy_that_departs_is_taken_up_again_behind_what_differs() -> None:
    """As where a name is replaced: one token there, or none, or several."""
    for replaced in ([], [900], [900, 901, 902]):
        drafter, group = Drafter(), make_group(range(100, 200))
        draft = proposed(drafter, group, *range(100, 120), *replaced, 121)
        assert guessed(draft) == ([122, 123], DraftSource.PROMPT)


def test_a_copy_that_has_long_departed_is_given_up() -> None:
    drafter, group = Drafter(), make_group(range(100, 200))
    assert proposed(drafter, group, *range(100, 120), *range(900, 920), 121) is None


def test_a_predicted_answer_is_guessed_from_its_first_token() -> None:
    group = make_group(predicted=PHRASE)
    draft = proposed(Drafter(), group, most=1)
    assert guessed(draft) == ([500], DraftSource.PREDICTION)


def test_a_predicted_answer_counts_as_such_where_the_prompt_has_it_too() -> None:
    group = make_group([*PHRASE, 9], predicted=PHRASE)
    draft = proposed(Drafter(), group, 7, 8, 500, 501, 502)
    assert guessed(draft) == ([503, 504], DraftSource.PREDICTION)


def test_an_answer_unlike_its_prediction_gives_that_little_chance() -> None:
    drafter, group = Drafter(), make_group(predicted=range(100, 200))
    drafts = [proposed(drafter, group, token) for token in (100, 900, 901, 105, 902, 903, 110, 904, 905)]
    assert drafts[-1] is None
    resumed = proposed(drafter, group, 112)
    assert resumed is None or resumed.chances[0] < 0.2


SALTED = CacheKey(salt="ours")


@pytest.mark.parametrize(
    ("tenant", "key", "is_told"),
    [
        ("a", SALTED, True),
        ("b", SALTED, False),
        ("", SALTED, False),
        ("a", CacheKey(), False),
        ("a", CacheKey(salt="theirs"), False),
        ("a", CacheKey(salt="ours", adapter="x"), False),
    ],
)
def test_what_a_tenant_was_told_is_repeated_to_the_same_tenant_and_salt_alone(
    tenant: str, key: CacheKey, is_told: bool
) -> None:
    drafter, first = Drafter(), make_group(tenant="a", key=SALTED)
    proposed(drafter, first, *PHRASE, 9)
    drafter.forget(first)
    draft = proposed(drafter, make_group(tenant=tenant, key=key), 7, 500, 501, 502)
    assert guessed(draft) == (([503, 504], DraftSource.STORE) if is_told else None)


def test_outputs_nobody_was_asked_about_are_kept_as_well() -> None:
    drafter, first = Drafter(), make_group()
    append(first.sequences[0], *PHRASE)
    drafter.forget(first)
    assert guessed(proposed(drafter, make_group(), 500, 501, 502, most=2)) == ([503, 504], DraftSource.STORE)


def test_the_store_keeps_the_latest_outputs_and_no_more_than_it_may() -> None:
    store = OutputStore()
    for output in range(100):
        store.add(owner(), [output] * 1000)
        kept = [token for text in store.texts(owner()) for token in text.tokens]
        assert len(kept) < 4 * HALF_TOKENS
    assert len(kept) >= HALF_TOKENS
    assert set(kept) == set(range(min(kept), 100))


def test_the_store_keeps_the_end_of_an_output_that_is_longer_than_it_may_hold() -> None:
    store = OutputStore()
    store.add(owner(), list(range(5 * HALF_TOKENS)))
    (text,) = store.texts(owner())
    assert list(text.tokens) == list(range(4 * HALF_TOKENS, 5 * HALF_TOKENS))


def test_the_store_gives_up_whoever_was_served_longest_ago() -> None:
    store = OutputStore()
    for number in range(MOST_OWNERS):
        store.add(owner(number), [1, 2, 3])
    store.add(owner(0), [4])
    store.add(owner(MOST_OWNERS), [5])
    assert [number for number in range(MOST_OWNERS + 1) if not store.texts(owner(number))] == [1]


@pytest.mark.parametrize(("salt", "is_told"), [(None, False), ("s", False), ("other", True)])
def test_a_reset_forgets_what_was_kept_behind_its_salt(salt: str | None, is_told: bool) -> None:
    drafter, key = Drafter(), CacheKey(salt="s")
    # The one has ended by then; the other is half way, and more of it comes.
    ended, running = make_group(key=key), make_group(key=key)
    append(ended.sequences[0], *PHRASE)
    append(running.sequences[0], 600, 601, 602, 603)
    drafter.forget(ended)
    drafter.reset(salt, [running])
    append(running.sequences[0], 604, 605)
    drafter.forget(running)
    for start, following in ((500, [503, 504]), (600, [603, 604])):
        draft = proposed(drafter, make_group(key=key), start, start + 1, start + 2, most=2)
        assert guessed(draft) == ((following, DraftSource.STORE) if is_told else None)


def test_who_ran_at_a_reset_is_let_go_of_at_its_end() -> None:
    drafter, group = Drafter(), make_group()
    append(group.sequences[0], *PHRASE)
    num_references = sys.getrefcount(group)
    drafter.reset(None, [group])
    drafter.forget(group)
    assert sys.getrefcount(group) == num_references


def test_what_begins_after_a_reset_is_kept_as_ever() -> None:
    drafter, group = Drafter(), make_group()
    drafter.reset(None, [])
    append(group.sequences[0], *PHRASE)
    drafter.forget(group)
    assert guessed(proposed(drafter, make_group(), 500, 501, 502, most=2)) == ([503, 504], DraftSource.STORE)


def test_a_long_prompt_is_indexed_over_several_steps_whoever_asks() -> None:
    source = random.Random(5)
    prompts = [[source.randrange(50_000) for _ in range(10_000)] for _ in range(3)]
    drafter, groups = Drafter(), [make_group(prompt) for prompt in prompts]
    append(groups[0].sequences[0], 1)
    steps = 0
    # The last run of the last prompt is found once all is indexed.
    wanted = prompts[2][-4:-1]
    for group in groups:
        append(group.sequences[0], *wanted)
    while True:
        drafter.begin_step()
        drafts = [drafter.propose(group, group.sequences[0], 1) for group in groups]
        steps += 1
        # Nothing yet, but there may be once all is indexed.
        assert drafts[2] is not None
        if drafts[2].token_ids:
            break
        assert steps < 100
    assert drafts[2].token_ids == prompts[2][-1:]
    assert 14 <= steps <= 16


def test_a_long_prompt_is_indexed_on_while_nobody_asks() -> None:
    source = random.Random(5)
    group = make_group(prompt := [source.randrange(50_000) for _ in range(10_000)])
    drafter, sequence = Drafter(), group.sequences[0]
    append(sequence, *prompt[-4:-1])
    drafter.begin_step()
    drafter.propose(group, sequence, 1)
    for _ in range(4):
        drafter.begin_step()
    draft = drafter.propose(group, sequence, 1)
    assert draft is not None
    assert draft.token_ids == prompt[-1:]


def test_a_sequence_that_repeats_nothing_is_told_from_one_that_has_nothing_for_the_moment() -> None:
    drafter, group = Drafter(), make_group(PHRASE)
    for token in (7, 8):
        append(group.sequences[0], token)
        assert drafter.propose(group, group.sequences[0], 4) is None
    append(group.sequences[0], *PHRASE[:4])
    assert proposed(drafter, group) is not None
    # It departs from the phrase, to which it may come back.
    append(group.sequences[0], 900)
    assert drafter.propose(group, group.sequences[0], 4) is NO_GUESSES
    append(group.sequences[0], *range(901, 920))
    assert drafter.propose(group, group.sequences[0], 4) is None


def test_guesses_are_as_many_as_are_worth_it() -> None:
    lengths = []
    for worth in (0.0, 0.1, 0.3, 0.9):
        drafter, group = Drafter(), make_group([*PHRASE, 9])
        append(group.sequences[0], *PHRASE[:4])
        drafter.begin_step(worth)
        draft = drafter.propose(group, group.sequences[0], 10)
        assert draft is not None
        assert all(chance >= worth for chance in accumulate(draft.chances, mul))
        lengths.append(len(draft.token_ids))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > lengths[2] >= lengths[3] == 0


def test_tokens_may_come_several_at_once_or_unasked_for_long() -> None:
    drafter, group = Drafter(), make_group(range(100, 1000))
    append(group.sequences[0], *range(100, 110))
    assert guessed(proposed(drafter, group)) == ([110, 111], DraftSource.PROMPT)
    append(group.sequences[0], *range(110, 113))
    draft = proposed(drafter, group, most=1)
    assert guessed(draft) == ([113], DraftSource.PROMPT)
    append(group.sequences[0], *range(113, 700))
    assert guessed(proposed(drafter, group, most=1)) == ([700], DraftSource.PROMPT)


def test_a_request_that_is_submitted_again_goes_on_as_if_it_had_never_left() -> None:
    group = make_group(range(100, 200), generated=range(100, 120))
    assert guessed(proposed(Drafter(), group, most=1)) == ([120], DraftSource.PROMPT)


def test_a_sequence_of_one_or_two_tokens_has_no_draft() -> None:
    group = make_group()
    group.request.prompt_token_ids.clear()
    group.sequences[0].num_prompt = group.sequences[0].num_known = 0
    assert [proposed(Drafter(), group, 1), proposed(Drafter(), group, 1)] == [None, None]


def test_the_same_tokens_bring_the_same_drafts() -> None:
    def history() -> list[Draft | None]:
        source, drafter, drafts = random.Random(9), Drafter(), []
        for _ in range(20):
            group = make_group((source.randrange(30) for _ in range(200)), num_sequences=2)
            for _ in range(100):
                index = source.randrange(2)
                drafts.append(proposed(drafter, group, source.randrange(30), index=index))
            drafter.forget(group)
        return drafts

    first = history()
    assert sum(draft is not None for draft in first) > 100
    assert first == history()


def holders(group: RequestGroup) -> list[int]:
    """How many hold the group and what it consists of."""
    parts = [group, *group.sequences, group.request.prompt_token_ids, group.sequences[0].generated_token_ids]
    return [sys.getrefcount(part) for part in parts]


def test_nothing_of_a_group_is_kept_once_it_is_forgotten() -> None:
    for prompt in ([], list(range(5_000))):
        drafter, group = Drafter(), make_group(prompt)
        # A long prompt is still to be indexed.
        proposed(drafter, group, *PHRASE[: 1 if prompt else None])
        assert holders(group) != holders(make_group(prompt))
        drafter.forget(group)
        assert holders(group) == holders(make_group(prompt))


def test_random_tokens_are_hardly_ever_guessed_with_any_confidence() -> None:
    source, drafter = random.Random(2), Drafter()
    drafts = []
    for _ in range(10):
        group = make_group(source.randrange(40) for _ in range(300))
        drafts += [proposed(drafter, group, source.randrange(40)) for _ in range(200)]
    confident = [draft for draft in drafts[500:] if draft is not None and draft.chances[0] > 0.3]
    assert len(confident) < 0.01 * len(drafts)
