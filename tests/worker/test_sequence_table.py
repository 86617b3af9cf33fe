"""The table of sequences follows every sound plan and refuses every other."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from octavo.testing.depth import deep
from octavo.testing.oracles.worker_plans import beam_sampling, moves, plan, sampling, start, work
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import (
    Candidates,
    FurtherTokens,
    KVGroup,
    Remap,
    SampledToken,
    SequenceDraft,
    SequenceFailure,
    SequenceFork,
    SequenceStart,
    SequenceWork,
    StepPlan,
    StepTimes,
)
from octavo.worker.runner import StepOutput
from octavo.worker.sequence_table import SequenceTable
from octavo.worker.sequences import PENDING_TOKEN, WorkerSequence, WorkItem
from octavo.worker.step.failures import no_token_left
from octavo.worker.step.plan_checks import PlanError

VOCAB_SIZE = 50
NUM_BLOCKS = 24
BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
# One KV group that sees all tokens, one that does not.
WINDOWS = (0, 6)
# More than these a drawn plan does not add to.
MAX_SEQUENCES = 6


def make_table(*windows: int) -> SequenceTable:
    return SequenceTable(
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=NUM_BLOCKS,
        num_cpu_blocks=6,
        block_size=BLOCK_SIZE,
        kv_groups=[KVGroup(window) for window in windows or (0,)],
        on_forget=lambda sequence_ids: None,
    )


def complete(
    table: SequenceTable, items: list[WorkItem], *token_ids: int, further: Sequence[FurtherTokens] = ()
) -> None:
    """What a runner would return, if those that sample sample `token_ids`, and some `further` ones, and every beam is
    offered tokens 0 and 1."""
    choosers = [sequence for item in items for sequence in item.choosers]
    sampling = [sequence.sequence_id for sequence in choosers if sequence.sampling.beam is None]
    beams = [sequence.sequence_id for sequence in choosers if sequence.sampling.beam is not None]
    sampled = [SampledToken(i, token) for i, token in zip(sampling, token_ids, strict=True)]
    table.begin(items)
    table.complete(items, output(sampled, [Candidates(i, [0, 1], [-0.5, -1.5]) for i in beams], further=further))


def output(
    sampled: Sequence[SampledToken] = (),
    candidates: Sequence[Candidates] = (),
    failed: Sequence[SequenceFailure] = (),
    further: Sequence[FurtherTokens] = (),
) -> StepOutput:
    return StepOutput(list(sampled), list(candidates), [], list(failed), StepTimes(0, 0, 0), list(further))


def sequences_of(table: SequenceTable) -> dict[int, WorkerSequence]:
    return {sequence.sequence_id: sequence for sequence in table}


def test_a_prompt_in_chunks_chooses_only_with_its_last_token() -> None:
    table = make_table()
    (first,) = table.apply(plan(1, starts=[start(1, [5, 6, 7, 8, 9])], work=[work(1, 3, [2])]))
    assert (first.start, first.num_tokens, first.choosers) == (0, 3, ())
    complete(table, [first])
    (second,) = table.apply(plan(2, work=[work(1, 2, [0])]))
    assert (second.start, second.num_tokens, second.choosers) == (3, 2, (second.sequence,))
    complete(table, [second], 42)
    assert second.sequence.token_ids == [5, 6, 7, 8, 9, 42]
    assert second.sequence.num_generated == 1
    assert second.sequence.num_computed == 5
    assert second.sequence.block_tables == [[2, 0]]


def test_a_sampled_token_can_be_computed_without_the_scheduler_naming_it() -> None:
    table = make_table()
    complete(table, table.apply(plan(1, starts=[start(1, [5])], work=[work(1, 1, [3])])), 17)
    (decode,) = table.apply(plan(2, work=[work(1, 1)]))
    assert (decode.start, decode.choosers) == (1, (decode.sequence,))
    assert decode.sequence.token_ids == [5, 17]


def test_generated_tokens_of_an_earlier_life_stay_apart_from_the_prompt() -> None:
    (item,) = make_table().apply(plan(1, starts=[start(1, [5, 6], [7, 8, 9], index=2)], work=[work(1, 5, [0, 1])]))
    assert item.choosers == (item.sequence,)
    assert item.sequence.prompt_length == 2
    assert item.sequence.num_generated == 3
    assert item.sequence.sequence_index == 2


def test_a_sequence_may_start_with_its_first_tokens_computed_by_another() -> None:
    table = make_table()
    begun = start(1, [5, 6, 7, 8, 9, 10], num_computed=4)
    (item,) = table.apply(plan(1, starts=[begun], work=[work(1, 2, [7, 3])]))
    assert (item.start, item.num_tokens) == (4, 2)
    complete(table, [item], 42)
    assert item.sequence.num_computed == 6


def test_forgetting_comes_first_and_unknown_ids_do_not_matter() -> None:
    table = make_table()
    table.apply(plan(1, starts=[start(1, [5])], work=[work(1, 1, [3])]))
    (item,) = table.apply(plan(2, forget=[1, 99], starts=[start(1, [6])], work=[work(1, 1, [4])]))
    assert item.sequence.token_ids == [6]
    assert item.sequence.block_tables == [[4]]


def test_sequences_forked_in_the_plan_of_the_last_prompt_token_each_sample_their_first() -> None:
    table = make_table()
    (item,) = table.apply(
        plan(
            1,
            starts=[start(1, [5, 6, 7, 8, 9], params=sampling(1.0))],
            forks=[SequenceFork(1, 2, 1), SequenceFork(1, 3, 2)],
            work=[work(1, 5, [4, 7], followers=[2, 3])],
        )
    )
    assert [(s.sequence_id, s.sequence_index) for s in item.choosers] == [(1, 0), (2, 1), (3, 2)]
    complete(table, [item], 30, 31, 32)
    for sequence, token in zip(item.choosers, (30, 31, 32), strict=True):
        assert sequence.token_ids == [5, 6, 7, 8, 9, token]
        assert (sequence.num_computed, sequence.block_tables) == (5, [[4, 7]])
    assert [table.apply(plan(2, work=[work(i, 1)]))[0].start for i in (1, 2, 3)] == [5, 5, 5]


def test_a_fork_shares_nothing_with_its_parent_but_blocks() -> None:
    table = make_table()
    complete(table, table.apply(plan(1, starts=[start(1, [5, 6])], work=[work(1, 2, [4])])), 9)
    copied = plan(
        2,
        moves=moves(copy=[(4, 8)]),
        forks=[SequenceFork(1, 2, 1)],
        remaps=[Remap(2, 0, 0, 8)],
        work=[work(1, 1), work(2, 1)],
    )
    complete(table, table.apply(copied), 10, 11)
    known = sequences_of(table)
    assert (known[1].token_ids, known[1].block_tables) == ([5, 6, 9, 10], [[4]])
    assert (known[2].token_ids, known[2].block_tables) == ([5, 6, 9, 11], [[8]])
    assert known[2].sampling is known[1].sampling


def test_a_beam_waits_for_the_token_that_the_scheduler_chose() -> None:
    table = make_table()
    complete(table, table.apply(plan(1, starts=[start(1, [5, 6], params=beam_sampling())], work=[work(1, 2, [4])])))
    (beam,) = table
    assert (beam.token_ids, beam.num_computed) == ([5, 6], 2)
    branched = plan(
        2,
        forks=[SequenceFork(1, 2, 1)],
        remaps=[Remap(2, 0, 0, 9)],
        work=[work(1, 1, input_token_id=7), work(2, 1, input_token_id=8)],
    )
    items = table.apply(branched)
    assert [(item.start, item.num_tokens, len(item.choosers)) for item in items] == [(2, 1, 1), (2, 1, 1)]
    complete(table, items)
    assert [(s.token_ids, s.num_computed, s.num_generated) for s in table] == [([5, 6, 7], 3, 1), ([5, 6, 8], 3, 1)]


def test_all_entries_of_a_table_may_change_places() -> None:
    table = make_table()
    table.apply(plan(1, starts=[start(1, [5] * 9)], work=[work(1, 8, [4, 7])]))
    table.apply(plan(2, remaps=[Remap(1, 0, 0, 7), Remap(1, 0, 1, 4)]))
    assert sequences_of(table)[1].block_tables == [[7, 4]]


def test_no_entry_of_a_table_may_become_another_of_its_blocks() -> None:
    table = make_table()
    table.apply(plan(1, starts=[start(1, [5] * 9)], work=[work(1, 8, [4, 7])]))
    with pytest.raises(PlanError, match="holds a block twice"):
        table.apply(plan(2, remaps=[Remap(1, 0, 0, 7)]))


def test_every_kv_group_has_a_table_of_its_own_and_a_window_leaves_blocks_behind() -> None:
    table = make_table(*WINDOWS)
    long = start(1, [5] * 13, num_computed=12)
    (item,) = table.apply(plan(1, starts=[long], work=[work(1, 1, [3, 2, 1, 0], [NULL_BLOCK, 6, 5, 4])]))
    assert item.sequence.block_tables == [[3, 2, 1, 0], [NULL_BLOCK, 6, 5, 4]]
    complete(table, [item], 9)
    table.apply(plan(2, remaps=[Remap(1, 1, 1, NULL_BLOCK)], work=[work(1, 1)]))
    assert item.sequence.block_tables[1] == [NULL_BLOCK, NULL_BLOCK, 5, 4]


def test_blocks_that_a_window_has_left_are_anybodys_even_if_they_are_told_of_late() -> None:
    table = make_table(*WINDOWS)
    begun = plan(1, starts=[start(1, [5] * 16)], work=[work(1, 16, [3, 2, 1, 0], [7, 6, 5, 4])])
    items = table.apply(begun)
    complete(table, items, 9)
    tables = items[0].sequence.block_tables
    assert tables[1] == [NULL_BLOCK, NULL_BLOCK, 5, 4]
    late = [Remap(1, 1, 1, 9), Remap(1, 1, 2, 8)]
    table.apply(plan(2, remaps=late, work=[work(1, 1, [9], [6])]))
    assert tables == [[3, 2, 1, 0, 9], [NULL_BLOCK, NULL_BLOCK, 8, 4, 6]]


# A sequence that has 9 tokens, and 8 of them computed over the blocks 4 and 7.
DRAFTABLE = plan(1, starts=[start(1, [5] * 9)], work=[work(1, 8, [4, 7])])


@pytest.mark.parametrize(
    ("further", "tokens", "computed", "held"),
    [
        ([], [20], 9, [4, 7, 3]),
        ([11], [20, 11], 10, [4, 7, 3]),
        ([11, 12, 13], [20, 11, 12, 13], 12, [4, 7, 3]),
        ([11, 12, 13, 14], [20, 11, 12, 13, 14], 13, [4, 7, 3, 6]),
        ([11, 12, 13, 14, 40], [20, 11, 12, 13, 14, 40], 14, [4, 7, 3, 6]),
    ],
)
def test_of_a_draft_that_much_counts_as_its_step_has_chosen(
    further: list[int], tokens: list[int], computed: int, held: list[int]
) -> None:
    """The blocks go that have nothing in them."""
    table = make_table()
    complete(table, table.apply(DRAFTABLE))
    drafted = plan(2, work=[work(1, 1, [3, 6])], drafts={1: [20, 11, 12, 13, 14]})
    (item,) = table.apply(drafted)
    assert (item.start, item.num_tokens, item.end, item.num_known, item.known_end) == (8, 6, 14, 1, 9)
    assert item.token_ids == [5, 20, 11, 12, 13, 14]
    table.begin([item])
    assert (item.sequence.num_computed, item.sequence.token_ids[9:]) == (9, [PENDING_TOKEN])
    found = [FurtherTokens(1, further)] if further else []
    table.complete([item], output([SampledToken(1, 20)], further=found))
    assert item.sequence.token_ids[9:] == tokens
    assert (item.sequence.num_computed, item.sequence.block_tables) == (computed, [held])
    # The next step goes on behind the last token that was chosen.
    (following,) = table.apply(plan(3, work=[work(1, 1, *([[6]] if computed % BLOCK_SIZE == 0 else []))]))
    assert (following.start, following.token_ids, following.choosers) == (computed, tokens[-1:], (item.sequence,))


def test_a_window_passes_with_the_tokens_that_a_draft_has_brought() -> None:
    table = make_table(*WINDOWS)
    complete(table, table.apply(plan(1, starts=[start(1, [5] * 9)], work=[work(1, 8, [4, 7], [2, 5])])))
    (item,) = table.apply(plan(2, work=[work(1, 1, [3, 6], [8, 9])], drafts={1: [20, 11, 12, 13, 14]}))
    table.begin([item])
    assert item.sequence.block_tables == [[4, 7, 3, 6], [NULL_BLOCK, 5, 8, 9]]
    table.complete([item], output([SampledToken(1, 20)], further=[FurtherTokens(1, [11, 12, 13, 9])]))
    assert item.sequence.num_computed == 13
    assert item.sequence.block_tables == [[4, 7, 3, 6], [NULL_BLOCK, NULL_BLOCK, 8, 9]]


def test_what_a_device_was_told_of_dropped_blocks_does_not_count() -> None:
    table = make_table()
    complete(table, table.apply(DRAFTABLE))
    (item,) = table.apply(plan(2, work=[work(1, 1, [3, 6])], drafts={1: [20, 11, 12, 13]}))
    item.sequence.num_sent = [4]
    complete(table, [item], 20)
    assert item.sequence.num_sent == [3]


def test_while_a_draft_is_checked_no_plan_goes_on_with_its_sequence() -> None:
    """One that guesses what follows a pending token waits for that as well."""
    table = make_table()
    complete(table, table.apply(DRAFTABLE))
    items = table.apply(plan(2, starts=[start(2, [5])], work=[work(1, 1, [3]), work(2, 1, [6])], drafts={1: [20]}))
    table.begin(items)
    assert table.must_know(plan(3, work=[work(1, 1)]))
    assert table.must_know(plan(3, forks=[SequenceFork(1, 3, 1)]))
    assert not table.must_know(plan(3, work=[work(2, 1)]))
    assert table.must_know(plan(3, work=[work(2, 1)], drafts={2: [4]}))
    table.complete(items, output([SampledToken(1, 20), SampledToken(2, 3)], further=[FurtherTokens(1, [6])]))
    assert not table.must_know(plan(3, work=[work(1, 1), work(2, 1)], drafts={2: [4]}))


@pytest.mark.parametrize(("draft", "further"), [([], []), ([20, 11], [11]), ([20, 11], [11, 12])])
def test_of_a_proposal_nothing_is_kept_that_the_tokens_do_not_reach(draft: list[int], further: list[int]) -> None:
    """Its blocks are there for the draft model, and gone once the step is done; until then no plan goes on."""
    table = make_table()
    complete(table, table.apply(DRAFTABLE))
    drafts = {1: draft} if draft else {}
    (item,) = table.apply(plan(2, work=[work(1, 1, [3, 6])], drafts=drafts, proposals={1: 5}))
    assert (item.num_tokens, item.draft, item.num_proposed) == (1 + len(draft), draft, 5)
    table.begin([item])
    assert item.sequence.block_tables == [[4, 7, 3, 6]]
    assert table.must_know(plan(3, work=[work(1, 1)]))
    found = [FurtherTokens(1, further)] if further else []
    answer = output([SampledToken(1, 20)], further=found)
    table.complete([item], replace(answer, proposed=[SequenceDraft(1, [1, 2, 3])]))
    assert item.sequence.num_computed == 9 + len(further)
    assert item.sequence.block_tables == [[4, 7, 3]]
    assert not table.must_know(plan(3, work=[work(1, 1)]))


def test_a_proposal_waits_for_the_token_that_it_follows() -> None:
    table = make_table()
    complete(table, table.apply(DRAFTABLE))
    table.begin(table.apply(plan(2, work=[work(1, 1, [3])])))
    assert not table.must_know(plan(3, work=[work(1, 1)]))
    assert table.must_know(plan(3, work=[work(1, 1)], proposals={1: 2}))


@pytest.mark.parametrize(
    ("proposed", "error"),
    [
        ([SequenceDraft(1, [1, 2, 3])], "not those of the sequences they were to be made for"),
        ([SequenceDraft(2, [1])], "not those of the sequences they were to be made for"),
        ([SequenceDraft(1, [VOCAB_SIZE])], "outside the vocabulary"),
    ],
)
def test_a_runner_proposes_what_it_was_asked_for(proposed: list[SequenceDraft], error: str) -> None:
    table = make_table()
    complete(table, table.apply(DRAFTABLE))
    items = table.apply(plan(2, work=[work(1, 1, [3])], proposals={1: 2}))
    table.begin(items)
    with pytest.raises(ValueError, match=error):
        table.complete(items, replace(output([SampledToken(1, 20)]), proposed=proposed))


def test_a_sequence_that_failed_takes_its_draft_along() -> None:
    table = make_table()
    failing(table, 1)
    assert table.apply(plan(2, work=[work(1, 1, [3])], drafts={1: [4]})) == []


@pytest.mark.parametrize(
    ("first", "further"),
    [
        (20, FurtherTokens(1, [11, 13])),
        (21, FurtherTokens(1, [12])),
        (20, FurtherTokens(1, [12, 13, 14])),
        (20, FurtherTokens(2, [11])),
        (20, FurtherTokens(3, [11])),
    ],
    ids=["after a wrong one", "after a wrong first", "beyond its end", "without a draft", "of nobody"],
)
def test_further_tokens_must_follow_from_a_draft(first: int, further: FurtherTokens) -> None:
    table = make_table()
    complete(table, table.apply(DRAFTABLE))
    step = plan(2, starts=[start(2, [5])], work=[work(1, 1, [3]), work(2, 1, [6])], drafts={1: [20, 12]})
    items = table.apply(step)
    table.begin(items)
    with pytest.raises(ValueError, match="do not follow from its draft"):
        table.complete(items, output([SampledToken(1, first), SampledToken(2, 20)], further=[further]))
    unknown = [FurtherTokens(1, [12, VOCAB_SIZE])]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        table.complete(items, output([SampledToken(1, 20), SampledToken(2, 20)], further=unknown))
    assert [item.sequence.token_ids[-1] for item in items] == [PENDING_TOKEN] * 2


ONE_MORE = [start(2, [1] * 5)]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (plan(2, work=[work(2, 1, [1])]), "0x2 is unknown"),
        (plan(2, starts=[start(2, [5, 6], num_computed=2)], work=[work(2, 1, [1])]), "none is left"),
        (plan(2, starts=[start(1, [5])]), "started twice"),
        (plan(2, starts=[start(2, [5]), start(2, [5])]), "started twice"),
        (plan(2, starts=[start(2, [])]), "without a prompt"),
        (plan(2, starts=[start(2, [], [4])]), "without a prompt"),
        (plan(2, starts=[start(2, [VOCAB_SIZE])]), "outside the vocabulary"),
        (plan(2, starts=[start(2, [1], [VOCAB_SIZE])]), "outside the vocabulary"),
        (plan(2, forks=[SequenceFork(7, 2, 1)]), "0x7 is unknown"),
        (plan(2, forks=[SequenceFork(1, 1, 1)]), "started twice"),
        (plan(2, starts=ONE_MORE, forks=[SequenceFork(1, 2, 1)]), "started twice"),
        (plan(2, forget=[1], forks=[SequenceFork(1, 2, 1)]), "0x1 is unknown"),
        (plan(2, remaps=[Remap(2, 0, 0, 5)]), "0x2 is unknown"),
        (plan(2, remaps=[Remap(1, 1, 0, 5)]), "no KV group 1; there are 1"),
        (plan(2, remaps=[Remap(1, 0, 1, 5)]), "no block 1 to remap; its table has 1"),
        (plan(2, remaps=[Remap(1, 0, 0, NUM_BLOCKS)]), "there are 24"),
        (plan(2, remaps=[Remap(1, 0, 0, NULL_BLOCK)]), "sees all tokens"),
        (plan(2, work=[work(1, 3)]), "known tokens"),
        (plan(2, starts=ONE_MORE, work=[work(2, 5, [1])]), "slots in its blocks"),
        (plan(2, starts=[start(2, [1] * 25)], work=[work(2, 25, list(range(7)))]), "positions in the model"),
        (plan(2, work=[work(1, 1, [NUM_BLOCKS])]), "there are 24"),
        (plan(2, work=[work(1, 1, [NULL_BLOCK])]), "sees all tokens"),
        (plan(2, work=[work(1, 1, [3])]), "holds a block twice"),
        (plan(2, work=[work(1, 1, [4], [5])]), "blocks for 2 KV groups; there are 1"),
        (plan(2, work=[work(1, 1), work(1, 1)]), "two shares"),
        (plan(2, work=[work(1, 1, followers=[1])]), "two shares"),
        (plan(2, forks=[SequenceFork(1, 2, 1)], work=[work(1, 1, followers=[2, 2])]), "two shares"),
        (plan(2, forks=[SequenceFork(1, 2, 1)], work=[work(1, 1, followers=[2]), work(2, 1)]), "two shares"),
        (plan(2, work=[work(1, 1, followers=[2])]), "0x2 is unknown"),
        (plan(2, starts=[start(2, [5, 6], num_computed=1)], work=[work(1, 1, followers=[2])]), "0x2 cannot follow"),
        (
            plan(2, starts=[start(2, [5, 6]), start(3, [5, 7])], work=[work(2, 2, [4], followers=[3])]),
            "0x3 cannot follow sequence 0x2",
        ),
        (
            plan(2, starts=[start(2, [5, 6]), start(3, [5, 6], num_computed=1)], work=[work(2, 2, [4], followers=[3])]),
            "0x3 cannot follow sequence 0x2",
        ),
        (
            plan(2, starts=ONE_MORE, forks=[SequenceFork(2, 3, 1)], work=[work(2, 4, [4], followers=[3])]),
            "does not reach its last token",
        ),
        (plan(2, work=[work(1, 1, input_token_id=4)]), "not waiting for one"),
        (plan(2, proposals={1: 4}), "a proposal and no work"),
        (plan(2, work=[work(1, 1)], proposals={1: 3}), "is to reach 5 tokens; it has 4 slots in its blocks"),
        (
            plan(2, starts=ONE_MORE, work=[work(2, 4, [4, 5])], proposals={2: 2}),
            "proposal, but does not reach its last",
        ),
        (
            plan(2, starts=[start(2, [1] * 23)], work=[work(2, 23, list(range(4, 11)))], proposals={2: 2}),
            "positions in the model",
        ),
        (
            plan(2, starts=[start(2, [5], params=beam_sampling())], work=[work(2, 1, [4])], proposals={2: 2}),
            "has a proposal, but is a beam",
        ),
        (plan(2, drafts={1: [4]}), "a draft and no work"),
        (plan(2, work=[work(1, 1)], drafts={7: [4]}), "a draft and no work"),
        (
            structs.replace(plan(2, work=[work(1, 1)]), drafts=[SequenceDraft(1, [4]), SequenceDraft(1, [4])]),
            "two drafts",
        ),
        (plan(2, starts=ONE_MORE, work=[work(2, 4, [4, 5])], drafts={2: [4]}), "does not reach its last token"),
        (plan(2, work=[work(1, 1)], drafts={1: [VOCAB_SIZE]}), "draft with a token id outside the vocabulary"),
        (plan(2, work=[work(1, 1)], drafts={1: [4, 4, 4]}), "is to reach 5 tokens; it has 4 slots in its blocks"),
        (
            plan(2, starts=[start(2, [1] * 23)], work=[work(2, 23, list(range(4, 11)))], drafts={2: [4, 4]}),
            "is to reach 25 tokens; it has 24 positions in the model",
        ),
        (
            plan(2, forks=[SequenceFork(1, 2, 1)], work=[work(1, 1, followers=[2])], drafts={1: [4]}),
            "has a draft, but has followers",
        ),
        (
            plan(2, starts=[start(2, [5], params=beam_sampling())], work=[work(2, 1, [4])], drafts={2: [4]}),
            "has a draft, but is a beam",
        ),
        (plan(2, moves=moves(copy=[(1, NUM_BLOCKS)])), "copy moves block 1 to 24"),
        (plan(2, moves=moves(swap_out=[(1, 6)])), "swap_out moves block 1 to 6"),
        (plan(2, moves=moves(swap_out=[(1, 1)], swap_in=[(1, 0)])), "fills CPU blocks"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(bad: StepPlan, why: str) -> None:
    table = make_table()
    complete(table, table.apply(plan(1, starts=[start(1, [5, 6])], work=[work(1, 1, [3])])))
    with pytest.raises(PlanError, match=why):
        table.apply(bad)


@pytest.mark.parametrize(
    ("token_id", "computed", "why"),
    [(VOCAB_SIZE, 2, "outside the vocabulary"), (4, 1, "not waiting for one"), (None, 2, "known tokens")],
)
def test_a_beam_is_given_one_token_of_the_vocabulary_when_it_has_none_left(
    token_id: int | None, computed: int, why: str
) -> None:
    table = make_table()
    begun = start(1, [5, 6], params=beam_sampling())
    complete(table, table.apply(plan(1, starts=[begun], work=[work(1, computed, [3])])))
    with pytest.raises(PlanError, match=why):
        table.apply(plan(2, work=[work(1, 1, input_token_id=token_id)]))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (work(1, 1, [3, 2, 1, 0], [NULL_BLOCK, NULL_BLOCK, 5, 4]), "window of 6 tokens still sees"),
        (work(1, 1, [3, 2, 1, 0], [NULL_BLOCK, 6, 5, NULL_BLOCK]), "window of 6 tokens still sees"),
        (work(1, 1, [NULL_BLOCK, 2, 1, 0], [7, 6, 5, 4]), "sees all tokens"),
        (work(1, 1, [3, 2, 1, 0], [7, 6, 5]), "12 slots in its blocks"),
        (work(1, 1, [3, 2, 1, 0]), "blocks for 1 KV groups; there are 2"),
        (work(1, 1, [3, 2, 1, 0], [7, 6, 5, 0]), "holds a block twice"),
    ],
)
def test_all_kv_groups_must_hold_what_a_step_sees_and_writes(bad: SequenceWork, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        make_table(*WINDOWS).apply(plan(1, starts=[start(1, [5] * 13, num_computed=12)], work=[bad]))


def failing(table: SequenceTable, *sequence_ids: int) -> None:
    """Starts sequences that fail in their first step, and sequence 9, which does not."""
    starts = [start(sequence_id, [5, 6]) for sequence_id in (*sequence_ids, 9)]
    items = table.apply(plan(1, starts=starts, work=[work(s.sequence_id, 2, [i]) for i, s in enumerate(starts)]))
    table.begin(items)
    table.complete(items, output([SampledToken(9, 7)], failed=[no_token_left(each) for each in sequence_ids]))


def test_a_failed_sequence_is_kept_by_its_failure_alone() -> None:
    table = make_table()
    failing(table, 1, 2)
    assert set(sequences_of(table)) == {9}
    step = plan(2, work=[work(2, 1), work(9, 1), work(1, 1)])
    assert [item.sequence.sequence_id for item in table.apply(step)] == [9]
    assert list(table.failures(step).values()) == [no_token_left(2), no_token_left(1)]
    assert table.failures(plan(3, work=[work(9, 1)])) == {}


def test_the_name_of_a_failed_sequence_is_taken_until_it_is_forgotten() -> None:
    table = make_table()
    failing(table, 1)
    with pytest.raises(PlanError, match="started twice"):
        table.apply(plan(2, starts=[start(1, [5])]))
    table.apply(plan(3, forget=[1], starts=[start(1, [5])]))
    assert set(sequences_of(table)) == {1, 9}


@pytest.mark.parametrize("forget", ["discard", "clear"])
def test_failures_go_with_what_is_discarded_or_cleared(forget: str) -> None:
    table = make_table()
    failing(table, 1)
    step = plan(2, work=[work(1, 1)])
    if forget == "discard":
        table.discard(step)
    else:
        table.clear()
    assert table.failures(step) == {}


def test_a_failure_of_what_is_not_in_the_step_is_the_runners_fault() -> None:
    table = make_table()
    items = table.apply(plan(1, starts=[start(1, [5, 6])], work=[work(1, 1, [3])]))
    with pytest.raises(ValueError, match="not in the step"):
        table.complete(items, output(failed=[no_token_left(2)]))
    table.complete(items, output(failed=[no_token_left(1)]))


def test_discarding_a_plan_forgets_all_it_would_have_changed_and_nothing_else() -> None:
    table = make_table()
    table.apply(plan(1, starts=[start(i, [i]) for i in range(1, 9)]))
    table.discard(
        plan(
            2,
            forget=[1],
            starts=[start(9, [1])],
            forks=[SequenceFork(3, 4, 1)],
            remaps=[Remap(5, 0, 0, 1)],
            work=[work(2, 1, followers=[6]), work(16, 1)],
        )
    )
    assert [sequence.sequence_id for sequence in table] == [3, 7, 8]


SAMPLED = [SampledToken(1, 5)]
OFFERED = [Candidates(2, [6, 7], [-1.0, -2.0])]


@pytest.mark.parametrize(
    ("sampled", "candidates", "why"),
    [
        ([], OFFERED, "the runner returned tokens of 0 sequences"),
        ([*SAMPLED, *SAMPLED], OFFERED, "the runner returned tokens of 2 sequences"),
        ([SampledToken(2, 5)], OFFERED, "the runner returned tokens of 1 sequences"),
        (SAMPLED, [], "the runner returned candidates of 0 sequences"),
        (SAMPLED, [Candidates(1, [6], [-1.0])], "the runner returned candidates of 1 sequences"),
        ([SampledToken(1, VOCAB_SIZE)], OFFERED, "outside the vocabulary"),
        ([SampledToken(1, -1)], OFFERED, "outside the vocabulary"),
        (SAMPLED, [Candidates(2, [6, VOCAB_SIZE], [-1.0, -2.0])], "outside the vocabulary"),
    ],
)
def test_a_runner_that_returns_the_impossible_is_found_out(
    sampled: list[SampledToken], candidates: list[Candidates], why: str
) -> None:
    table = make_table()
    starts = [start(1, [5]), start(2, [6], params=beam_sampling())]
    items = table.apply(plan(1, starts=starts, work=[work(1, 1, [3]), work(2, 1, [4])]))
    table.begin(items)
    with pytest.raises(ValueError, match=why):
        table.complete(items, output(sampled, candidates))
    assert [item.sequence.token_ids for item in items] == [[5, PENDING_TOKEN], [6]]
    table.complete(items, output(SAMPLED, OFFERED))
    assert [item.sequence.token_ids for item in items] == [[5, 5], [6]]


@dataclass
class Plain:
    """A sequence of the plain model below."""

    tokens: list[int]
    computed: int
    beam: bool
    tables: list[list[int]]

    @property
    def state(self) -> tuple[list[int], int, list[list[int]]]:
        return self.tokens, self.computed, self.tables


class UnsoundError(Exception):
    pass


def demand(condition: object) -> None:
    if not condition:
        raise UnsoundError


def plainly(known: dict[int, Plain], step: StepPlan) -> tuple[dict[int, Plain], list[list[int]]]:
    """What is known after `step` has been computed but before anything is chosen, and who chooses, share by share.

    Slow and position by position. Raises `UnsoundError` if `step` may not run.
    """
    known = {i: deepcopy(sequence) for i, sequence in known.items() if i not in step.forget}
    for s in step.starts:
        history = s.prompt_token_ids + s.generated_token_ids
        demand(s.sequence_id not in known and s.prompt_token_ids and s.num_computed < len(history))
        demand(all(token < VOCAB_SIZE for token in history))
        known[s.sequence_id] = Plain(history, s.num_computed, s.sampling.beam is not None, [[] for _ in WINDOWS])
    for fork in step.forks:
        demand(fork.parent_id in known and fork.sequence_id not in known)
        known[fork.sequence_id] = deepcopy(known[fork.parent_id])
    for remap in step.remaps:
        demand(remap.sequence_id in known and remap.kv_group < len(WINDOWS))
        table = known[remap.sequence_id].tables[remap.kv_group]
        demand(remap.logical_index < len(table))
        if table[remap.logical_index] != NULL_BLOCK:
            table[remap.logical_index] = remap.block_id
    for remap in step.remaps:
        demand_sound_tables(known[remap.sequence_id])
    drafts = {draft.sequence_id: draft.token_ids for draft in step.drafts}
    demand(len(drafts) == len(step.drafts) and drafts.keys() <= {share.sequence_id for share in step.work})
    choosers = [plainly_share(known, share, drafts.get(share.sequence_id, [])) for share in step.work]
    worked = [i for share in step.work for i in (share.sequence_id, *share.follower_ids)]
    demand(len(set(worked)) == len(worked))
    return known, choosers


def plainly_share(known: dict[int, Plain], share: SequenceWork, draft: list[int]) -> list[int]:
    ids = [share.sequence_id, *share.follower_ids]
    demand(all(i in known for i in ids))
    members = [known[i] for i in ids]
    demand(all(member.state == members[0].state for member in members))
    for member in members:
        if share.input_token_id is not None:
            demand(member.beam and member.computed == len(member.tokens) and share.input_token_id < VOCAB_SIZE)
            member.tokens.append(share.input_token_id)
        if share.new_block_ids:
            demand(len(share.new_block_ids) == len(WINDOWS))
            for table, block_ids in zip(member.tables, share.new_block_ids, strict=True):
                table += block_ids
            demand_sound_tables(member)
    leader, begin = members[0], members[0].computed
    end = begin + share.num_tokens
    demand(end <= len(leader.tokens) and end + len(draft) <= MAX_MODEL_LEN)
    if draft:
        demand(end == len(leader.tokens) and not leader.beam and not share.follower_ids)
        demand(max(draft) < VOCAB_SIZE)
    for table, window in zip(leader.tables, WINDOWS, strict=True):
        for position in range(max(0, begin - window + 1) if window else 0, end + len(draft)):
            demand(position // BLOCK_SIZE < len(table) and table[position // BLOCK_SIZE] != NULL_BLOCK)
    demand(end == len(leader.tokens) or not share.follower_ids)
    for member in members:
        plainly_advance(member, end)
    return ids if end == len(leader.tokens) else []


def plainly_advance(sequence: Plain, end: int) -> None:
    for table, window in zip(sequence.tables, WINDOWS, strict=True):
        for index in range(first_seen(window, sequence.computed), first_seen(window, end)):
            table[index] = NULL_BLOCK
    sequence.computed = end


def plainly_confirm(sequence: Plain, further: list[int]) -> None:
    """What becomes of a sequence whose draft has brought `further` tokens."""
    sequence.tokens += further
    plainly_advance(sequence, sequence.computed + len(further))
    for table in sequence.tables:
        while (len(table) - 1) * BLOCK_SIZE >= sequence.computed:
            table.pop()


def first_seen(window: int, position: int) -> int:
    return max(0, position - window + 1) // BLOCK_SIZE if window else 0


def demand_sound_tables(sequence: Plain) -> None:
    entries = [(block, window) for table, window in zip(sequence.tables, WINDOWS, strict=True) for block in table]
    demand(all(block < NUM_BLOCKS and (block != NULL_BLOCK or window) for block, window in entries))
    blocks = [block for block, _ in entries if block != NULL_BLOCK]
    demand(len(set(blocks)) == len(blocks))


ids = st.integers(1, 6)
tokens = st.integers(0, VOCAB_SIZE - 1)
token_ids = st.lists(tokens, max_size=12)
block_ids = st.integers(NULL_BLOCK, NUM_BLOCKS)
wild_remaps = st.builds(Remap, ids, st.integers(0, 2), st.integers(0, 3), block_ids)
wild_work = st.builds(
    lambda i, count, tables, token, followers: work(i, count, *tables, input_token_id=token, followers=followers),
    ids,
    st.integers(1, 6),
    st.lists(st.lists(block_ids, max_size=3), max_size=3),
    st.none() | st.integers(0, VOCAB_SIZE),
    st.lists(ids, max_size=2),
)


@st.composite
def starts(draw: st.DrawFn, known: dict[int, Plain]) -> SequenceStart:
    prompt, generated = draw(token_ids) or [1], draw(token_ids)
    computed = draw(st.sampled_from([0, 0, len(prompt + generated) - 1, len(prompt) - 1]))
    params = draw(st.sampled_from([sampling(), beam_sampling()]))
    return start(draw(fresh_ids(known)), prompt, generated, num_computed=computed, params=params)


def fresh_ids(known: dict[int, Plain]) -> st.SearchStrategy[int]:
    return st.sampled_from([i for i in range(1, MAX_SEQUENCES + 5) if i not in known][:3])


def forks(known: dict[int, Plain]) -> st.SearchStrategy[SequenceFork]:
    return st.builds(SequenceFork, st.sampled_from(sorted(known)), fresh_ids(known), st.just(1))


@st.composite
def plausible_remaps(draw: st.DrawFn, known: dict[int, Plain]) -> list[Remap]:
    """Entries that become an unused block, or none where the window has passed."""
    found = []
    for i in draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=2)) if known else []:
        group = draw(st.integers(0, len(WINDOWS) - 1))
        table = known[i].tables[group]
        if table:
            index = draw(st.integers(0, len(table) - 1))
            passed = WINDOWS[group] and (index + 1) * BLOCK_SIZE <= known[i].computed - WINDOWS[group] + 1
            found.append(Remap(i, group, index, NULL_BLOCK if passed else draw(st.sampled_from(unused(known[i])))))
    return found


def unused(sequence: Plain) -> list[int]:
    held = {block for table in sequence.tables for block in table}
    return [block for block in range(NUM_BLOCKS) if block not in held]


@st.composite
def plausible_work(draw: st.DrawFn, known: dict[int, Plain]) -> tuple[list[SequenceWork], dict[int, list[int]]]:
    """Shares and drafts that mostly fit, so that sequences live long enough to be interesting."""
    result: list[SequenceWork] = []
    drafts: dict[int, list[int]] = {}
    followed: set[int] = set()
    for i in draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []:
        if i in followed:
            continue
        sequence = known[i]
        waiting = sequence.beam and sequence.computed == len(sequence.tokens)
        missing = len(sequence.tokens) + waiting - sequence.computed
        count = max(1, draw(st.sampled_from([missing, missing, missing - 1, 1])))
        equals = [j for j in known if j != i and j not in followed and known[j].state == sequence.state]
        followers = equals if draw(st.booleans()) and count == missing else []
        followed.update((i, *followers))
        token = draw(st.integers(0, VOCAB_SIZE - 1)) if waiting else None
        if count == missing and not (followers or sequence.beam):
            drafts[i] = draw(st.lists(tokens, max_size=max(0, min(6, MAX_MODEL_LEN - len(sequence.tokens)))))
        grown = growth(sequence, count + len(drafts.get(i, [])))
        result.append(work(i, count, *grown, input_token_id=token, followers=followers))
    return result, {i: draft for i, draft in drafts.items() if draft}


def growth(sequence: Plain, count: int) -> list[list[int]]:
    """The blocks that `count` more tokens need, none where a window has passed already."""
    free, grown = unused(sequence), list[list[int]]()
    for table, window in zip(sequence.tables, WINDOWS, strict=True):
        first = first_seen(window, sequence.computed)
        needed = range(len(table), -(-(sequence.computed + count) // BLOCK_SIZE))
        grown.append([NULL_BLOCK if index < first else free.pop() for index in needed])
    return grown if any(grown) else []


@st.composite
def plausible_plans(draw: st.DrawFn, known: dict[int, Plain]) -> StepPlan:
    """Mostly sound plans, made in the order in which they are applied."""
    forget = draw(st.lists(ids, max_size=1)) if not draw(st.integers(0, 3)) else []
    room = 2 if len(known) < MAX_SEQUENCES else 0
    started = draw(st.lists(starts(known), max_size=room, unique_by=lambda s: s.sequence_id))
    known, _ = plainly(known, plan(1, forget=forget, starts=started))
    forked = draw(st.lists(forks(known), max_size=room, unique_by=lambda f: f.sequence_id)) if known else []
    known, _ = plainly(known, plan(1, forks=forked))
    remapped = draw(plausible_remaps(known))
    known, _ = plainly(known, plan(1, remaps=remapped))
    shares, drafts = draw(plausible_work(known))
    return plan(1, forget=forget, starts=started, forks=forked, remaps=remapped, work=shares, drafts=drafts)


@st.composite
def wild_plans(draw: st.DrawFn, known: dict[int, Plain]) -> StepPlan:
    """A plausible plan with something in it that nobody thought about."""
    step = draw(plausible_plans(known))
    wild: list[tuple[str, st.SearchStrategy[Any]]] = [
        ("starts", st.builds(start, ids, token_ids, token_ids, num_computed=st.integers(0, 4))),
        ("forks", st.builds(SequenceFork, ids, ids, st.just(1))),
        ("remaps", wild_remaps),
        ("work", wild_work),
        ("drafts", st.builds(SequenceDraft, ids, st.lists(st.integers(0, VOCAB_SIZE), min_size=1, max_size=8))),
    ]
    name, strategy = draw(st.sampled_from(wild))
    return structs.replace(step, **{name: [*getattr(step, name), draw(strategy)]})


def right_so_far(draft: list[int]) -> st.SearchStrategy[list[int]]:
    """The further tokens of a step that chooses some of the first tokens of `draft`, and then anything."""
    lengths = st.integers(0, len(draft))
    return st.builds(lambda length, token: [*draft[1:length], token] if length else [], lengths, tokens)


def without_named(known: dict[int, Plain], step: StepPlan) -> dict[int, Plain]:
    """What is left of `known` after a discarded plan."""
    named = {*step.forget, *(i for share in step.work for i in (share.sequence_id, *share.follower_ids))}
    named.update(part.sequence_id for parts in (step.starts, step.forks, step.remaps) for part in parts)
    return {i: sequence for i, sequence in known.items() if i not in named}


@pytest.mark.parametrize("examples", [30, *deep(80)])
def test_any_run_of_plans_is_followed_as_a_plain_model_follows_it(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        follow(data)

    check()


def follow(data: st.DataObject) -> None:
    table, known = make_table(*WINDOWS), dict[int, Plain]()
    for _ in range(8):
        step = data.draw(wild_plans(known) if data.draw(st.integers(0, 5)) == 5 else plausible_plans(known))
        try:
            following, choosers = plainly(known, step)
        except UnsoundError:
            with pytest.raises(PlanError):
                table.apply(step)
            table.discard(step)
            known = without_named(known, step)
        else:
            known = following
            items = table.apply(step)
            assert [[s.sequence_id for s in item.choosers] for item in items] == choosers
            drawing = [i for chosen in choosers for i in chosen if not known[i].beam]
            sampled = data.draw(st.lists(tokens, min_size=len(drawing), max_size=len(drawing)))
            further = {each.sequence_id: data.draw(right_so_far(each.token_ids)) for each in step.drafts}
            # Those whose drafts begin right.
            firsts = {each.sequence_id: each.token_ids[0] for each in step.drafts if further[each.sequence_id]}
            sampled = [firsts.get(i, token) for i, token in zip(drawing, sampled, strict=True)]
            complete(table, items, *sampled, further=[FurtherTokens(i, further[i]) for i in firsts])
            for i, token in zip(drawing, sampled, strict=True):
                known[i].tokens.append(token)
                if i in further:
                    plainly_confirm(known[i], further[i])
        assert {s.sequence_id: (s.token_ids, s.num_computed, s.block_tables) for s in table} == {
            i: sequence.state for i, sequence in known.items()
        }
