"""Flattening: what each token of a step is, where it goes, and whose logits are needed."""

from dataclasses import replace

import msgspec
import pytest
import torch

from octavo.testbed.models import GREEDY
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.batch import Batch, PromptSpan, build_batch

CPU = torch.device("cpu")


def item(
    token_ids: list[int],
    block_ids: list[int],
    start: int,
    num_tokens: int,
    *,
    prompt_length: int | None = None,
    prompt_logprobs: int | None = None,
    followers: int = 0,
    draft: list[int] | None = None,
) -> WorkItem:
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=prompt_logprobs)
    length = len(token_ids) if prompt_length is None else prompt_length
    sequence = WorkerSequence(1, 0, sampling, length, token_ids, start, [block_ids])
    family = (sequence, *(replace(sequence, sequence_index=index + 1) for index in range(followers)))
    chooses = start + num_tokens == len(token_ids)
    return WorkItem(sequence, start, num_tokens + len(draft or []), family if chooses else (), draft or [])


def build(*items: WorkItem, block_size: int = 4) -> Batch:
    return build_batch(list(items), 1, block_size, CPU)


def test_a_mixed_step_is_flattened_in_order() -> None:
    batch = build(
        item([10, 11, 12, 13, 14, 15], [7, 3], start=5, num_tokens=1),
        item([20, 21, 22, 23, 24, 25, 26, 27, 28], [5, 2, 9], start=2, num_tokens=5),
        item([30, 31, 32], [4], start=0, num_tokens=3),
    )
    assert batch.input_ids.tolist() == [15, 22, 23, 24, 25, 26, 30, 31, 32]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5, 6, 0, 1, 2]
    assert [slots.tolist() for slots in batch.slot_mappings] == [[3 * 4 + 1, 22, 23, 8, 9, 10, 16, 17, 18]]
    assert batch.logit_rows.rows == [0, 8, 5]
    assert batch.fresh_blocks.tolist() == [2, 4]
    assert [tables.tolist() for tables in batch.block_tables] == [[[7, 3], [5, 2], [4, 0]]]
    assert batch.context_lens == [6, 7, 3]
    assert batch.query_lens == [1, 5, 3]


@pytest.mark.parametrize("block_size", [1, 2, 256])
def test_slots_follow_the_block_table_at_any_block_size(block_size: int) -> None:
    token_ids, block_ids = list(range(100, 109)), [8, 1, 6, 3, 0, 2, 4, 7, 5]
    batch = build(item(token_ids, block_ids, 1, 8), block_size=block_size)
    expected = [block_ids[p // block_size] * block_size + p % block_size for p in range(1, 9)]
    assert batch.slot_mappings[0].tolist() == expected


def test_each_kv_group_has_its_own_tables_and_slots() -> None:
    sequence = WorkerSequence(1, 0, GREEDY, 6, list(range(6)), 3, [[7, 3, 1], [-1, 5, 2]])
    batch = build_batch([WorkItem(sequence, 3, 3, (sequence,))], 2, 2, CPU)
    assert [tables.tolist() for tables in batch.block_tables] == [[[7, 3, 1]], [[-1, 5, 2]]]
    assert [slots.tolist() for slots in batch.slot_mappings] == [[7, 2, 3], [11, 4, 5]]
    assert batch.fresh_blocks.tolist() == [1, 2]


def test_a_chunk_that_does_not_reach_the_end_chooses_nothing_but_is_watched() -> None:
    work = item([1, 2, 3, 4], [0], 0, 3)
    rows = build(work).logit_rows
    assert (rows.rows, rows.num_choosing, rows.choosers) == ([2], 0, [])
    assert rows.watched == [work.sequence]


def test_followers_choose_from_the_row_of_their_leader() -> None:
    items = [item([1, 2, 3], [0], 0, 3, followers=2), item([1, 2], [1], 0, 1), item([4], [2], 0, 1)]
    rows = build(*items).logit_rows
    assert (rows.rows, rows.num_choosing) == ([2, 4, 3], 2)
    assert rows.chooser_rows == [0, 0, 0, 1]
    assert [each.sequence for each in rows.choosers] == [*items[0].choosers, *items[2].choosers]


def test_the_rows_of_a_draft_choose_too() -> None:
    batch = build(
        item([1, 2, 3], [0], 0, 2),
        item([4, 5, 6], [1, 2], 2, 1, draft=[7, 8, 9]),
        item([10, 11, 12, 13], [3, 4], 1, 3, prompt_logprobs=1, draft=[14]),
    )
    assert batch.input_ids.tolist() == [1, 2, 6, 7, 8, 9, 11, 12, 13, 14]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert [slots.tolist() for slots in batch.slot_mappings] == [[0, 1, 6, 7, 8, 9, 13, 14, 15, 16]]
    assert batch.fresh_blocks.tolist() == [0, 2, 4]
    assert (batch.context_lens, batch.query_lens) == ([2, 6, 5], [2, 4, 4])
    rows = batch.logit_rows
    # Those that choose, the one that is watched, and those before the prompt's tokens.
    assert (rows.rows, rows.num_choosing) == ([2, 3, 4, 5, 8, 9, 1, 6, 7], 6)
    assert rows.chooser_rows == list(range(6))
    assert [(each.draft, each.num_drafted) for each in rows.choosers] == [
        *(([7, 8, 9], count) for count in range(4)),
        *(([14], count) for count in range(2)),
    ]
    assert [each.num_generated for each in rows.choosers] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("start", "num_tokens", "rows", "spans"),
    [
        (0, 6, [5, 0, 1, 2], [(1, 3)]),  # The prompt has 4 tokens: nobody asks for those after.
        (0, 2, [1, 0, 1], [(1, 2)]),
        (0, 4, [3, 0, 1, 2], [(1, 3)]),
        (2, 1, [0, 0], [(3, 1)]),
        (2, 4, [3, 0], [(3, 1)]),
        (3, 1, [0], []),
        (5, 1, [0], []),
    ],
)
def test_the_rows_before_prompt_tokens_are_wanted_where_their_logprobs_are(
    start: int, num_tokens: int, rows: list[int], spans: list[tuple[int, int]]
) -> None:
    work = item([1, 2, 3, 4, 5, 6], [0, 1], start, num_tokens, prompt_length=4, prompt_logprobs=0)
    wanted = build(work).logit_rows
    assert wanted.rows == rows
    assert wanted.prompt_spans == [PromptSpan(work.sequence, *span) for span in spans]


def test_prompt_rows_come_after_those_that_choose_and_those_that_are_watched() -> None:
    rows = build(
        item([1, 2, 3], [0], 0, 3, prompt_logprobs=1), item([4, 5], [1], 0, 2), item([6, 7, 8], [2], 0, 2)
    ).logit_rows
    assert (rows.rows, rows.num_choosing) == ([2, 4, 6, 0, 1], 2)
