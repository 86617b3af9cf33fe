"""The table of sequences follows every sound plan and refuses every other."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.testing.worker_plans import plan, start, work
from octavo.wire.steps import SequenceWork, StepPlan
from octavo.worker.sequences import PlanError, SequenceTable

VOCAB_SIZE = 50
NUM_BLOCKS = 12
BLOCK_SIZE = 4
MAX_MODEL_LEN = 24


def make_table() -> SequenceTable:
    return SequenceTable(
        vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )


def test_a_prompt_in_chunks_samples_only_with_its_last_token() -> None:
    table = make_table()
    (first,) = table.apply(plan(1, starts=[start(1, [5, 6, 7, 8, 9])], work=[work(1, 3, [2])]))
    assert (first.start, first.num_tokens, first.samples) == (0, 3, False)
    table.complete([first], [])
    (second,) = table.apply(plan(2, work=[work(1, 2, [0])]))
    assert (second.start, second.num_tokens, second.samples) == (3, 2, True)
    table.complete([second], [42])
    assert second.sequence.token_ids == [5, 6, 7, 8, 9, 42]
    assert second.sequence.num_generated == 1
    assert second.sequence.num_computed == 5
    assert second.sequence.block_ids == [2, 0]


def test_a_sampled_token_can_be_computed_without_the_scheduler_naming_it() -> None:
    table = make_table()
    items = table.apply(plan(1, starts=[start(1, [5])], work=[work(1, 1, [3])]))
    table.complete(items, [17])
    (decode,) = table.apply(plan(2, work=[work(1, 1)]))
    assert (decode.start, decode.samples) == (1, True)
    assert decode.sequence.token_ids == [5, 17]


def test_generated_tokens_of_an_earlier_life_stay_apart_from_the_prompt() -> None:
    (item,) = make_table().apply(plan(1, starts=[start(1, [5, 6], [7, 8, 9], index=2)], work=[work(1, 5, [0, 1])]))
    assert item.samples
    assert item.sequence.prompt_length == 2
    assert item.sequence.num_generated == 3
    assert item.sequence.sequence_index == 2


def test_a_sequence_may_start_with_its_first_tokens_computed_by_another() -> None:
    table = make_table()
    begun = start(1, [5, 6, 7, 8, 9, 10], num_computed=4)
    (item,) = table.apply(plan(1, starts=[begun], work=[work(1, 2, [7, 3])]))
    assert (item.start, item.num_tokens, item.samples) == (4, 2, True)
    table.complete([item], [42])
    assert item.sequence.num_computed == 6


def test_forgetting_comes_first_and_unknown_ids_do_not_matter() -> None:
    table = make_table()
    table.apply(plan(1, starts=[start(1, [5])], work=[work(1, 1, [3])]))
    (item,) = table.apply(plan(2, forget=[1, 99], starts=[start(1, [6])], work=[work(1, 1, [4])]))
    assert item.sequence.token_ids == [6]
    assert item.sequence.block_ids == [4]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (plan(2, work=[work(2, 1, [1])]), "unknown"),
        (plan(2, starts=[start(2, [5, 6], num_computed=2)], work=[work(2, 1, [1])]), "none is left"),
        (plan(2, starts=[start(1, [5])]), "started twice"),
        (plan(2, starts=[start(2, [5]), start(2, [5])]), "started twice"),
        (plan(2, starts=[start(2, [])]), "without a prompt"),
        (plan(2, starts=[start(2, [], [4])]), "without a prompt"),
        (plan(2, starts=[start(2, [VOCAB_SIZE])]), "outside the vocabulary"),
        (plan(2, starts=[start(2, [1], [VOCAB_SIZE])]), "outside the vocabulary"),
        (plan(2, work=[work(1, 3)]), "known tokens"),
        (plan(2, starts=[start(2, [1] * 5)], work=[work(2, 5, [1])]), "slots in its blocks"),
        (plan(2, starts=[start(2, [1] * 25)], work=[work(2, 25, list(range(7)))]), "positions in the model"),
        (plan(2, work=[work(1, 1, [NUM_BLOCKS])]), "there are 12"),
        (plan(2, work=[work(1, 1, [3])]), "holds a block twice"),
        (plan(2, work=[work(1, 1), work(1, 1)]), "two shares"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(bad: StepPlan, why: str) -> None:
    table = make_table()
    table.complete(table.apply(plan(1, starts=[start(1, [5, 6])], work=[work(1, 1, [3])])), [])
    with pytest.raises(PlanError, match=why):
        table.apply(bad)


def test_discarding_a_plan_forgets_all_it_names_and_nothing_else() -> None:
    table = make_table()
    table.apply(plan(1, starts=[start(i, [i]) for i in (1, 2, 3, 4)]))
    table.discard(plan(2, forget=[1], starts=[start(5, [1])], work=[work(2, 1), work(6, 1)]))
    assert [sequence.sequence_id for sequence in table] == [3, 4]


@pytest.mark.parametrize("sampled", [[], [1, 2], [VOCAB_SIZE], [-1]])
def test_a_runner_that_returns_impossible_tokens_is_found_out(sampled: list[int]) -> None:
    table = make_table()
    items = table.apply(plan(1, starts=[start(1, [5])], work=[work(1, 1, [3])]))
    with pytest.raises(ValueError, match="the runner returned"):
        table.complete(items, sampled)
    assert items[0].sequence.num_computed == 0


@dataclass
class PlainSequence:
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


def plainly_sound(known: dict[int, PlainSequence], step: StepPlan) -> bool:
    """Whether `step` may run, worked out from the whole plan instead of on the way."""
    kept = {i: sequence for i, sequence in known.items() if i not in step.forget}
    started = {s.sequence_id: PlainSequence(s.prompt_token_ids + s.generated_token_ids) for s in step.starts}
    worked = [share.sequence_id for share in step.work]
    if kept.keys() & started.keys() or len(started) < len(step.starts) or len(set(worked)) < len(worked):
        return False
    everyone = kept | started
    return (
        all(s.prompt_token_ids for s in step.starts)
        and all(token < VOCAB_SIZE for s in started.values() for token in s.tokens)
        and all(
            share.sequence_id in everyone and plainly_fits(everyone[share.sequence_id], share) for share in step.work
        )
    )


def plainly_fits(sequence: PlainSequence, share: SequenceWork) -> bool:
    blocks = sequence.blocks + share.new_block_ids
    last = sequence.computed + share.num_tokens
    return (
        len(set(blocks)) == len(blocks)
        and all(block < NUM_BLOCKS for block in blocks)
        and last <= min(len(sequence.tokens), BLOCK_SIZE * len(blocks), MAX_MODEL_LEN)
    )


def follow(known: dict[int, PlainSequence], step: StepPlan, next_token: Callable[[], int]) -> None:
    """Does to `known` what a sound `step` says."""
    for i in step.forget:
        known.pop(i, None)
    for s in step.starts:
        known[s.sequence_id] = PlainSequence(s.prompt_token_ids + s.generated_token_ids)
    for share in step.work:
        sequence = known[share.sequence_id]
        sequence.blocks += share.new_block_ids
        sequence.computed += share.num_tokens
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(next_token())


ids = st.integers(1, 4)
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=9)
starts = st.builds(lambda i, prompt, generated: start(i, prompt, generated), ids, tokens, tokens)
shares = st.builds(work, ids, st.integers(1, 6), st.lists(st.integers(0, NUM_BLOCKS), max_size=3))


@st.composite
def plausible_shares(draw: st.DrawFn, known: dict[int, PlainSequence]) -> list[SequenceWork]:
    """Work that mostly fits, so that sequences live long enough to be interesting."""
    chosen = draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []
    result = []
    for i in chosen:
        missing = len(known[i].tokens) - known[i].computed
        count = draw(st.integers(1, max(1, missing)))
        needed = -(-(known[i].computed + count) // BLOCK_SIZE) - len(known[i].blocks)
        free = [block for block in range(NUM_BLOCKS) if block not in known[i].blocks]
        result.append(work(i, count, free[: max(0, needed)]))
    return result


@st.composite
def plans(draw: st.DrawFn, known: dict[int, PlainSequence]) -> StepPlan:
    forget = draw(st.lists(ids, max_size=1))
    started = draw(st.lists(starts, max_size=2))
    if draw(st.integers(0, 3)):
        started = [s for s in started if s.sequence_id not in known and s.prompt_token_ids]
    everyone = {i: sequence for i, sequence in known.items() if i not in forget}
    everyone |= {s.sequence_id: PlainSequence(s.prompt_token_ids + s.generated_token_ids) for s in started}
    shares_now = draw(plausible_shares(everyone) if draw(st.integers(0, 3)) else st.lists(shares, max_size=2))
    return plan(1, forget=forget, starts=started, work=shares_now)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_run_of_plans_is_followed_as_a_plain_model_follows_it(data: st.DataObject) -> None:
    table, known = make_table(), dict[int, PlainSequence]()
    for _ in range(8):
        step = data.draw(plans(known))
        if not plainly_sound(known, step):
            with pytest.raises(PlanError):
                table.apply(step)
            return
        items = table.apply(step)
        sampled = [data.draw(st.integers(0, VOCAB_SIZE - 1)) for item in items if item.samples]
        table.complete(items, sampled)
        follow(known, step, iter(sampled).__next__)
        assert {s.sequence_id: (s.token_ids, s.num_computed, s.block_ids) for s in table} == {
            i: (s.tokens, s.computed, s.blocks) for i, s in known.items()
        }
