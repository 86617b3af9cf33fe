"""A step's inputs on the device are those that the host would have made."""

import pytest
import torch

from octavo.kernels.triton.attention import TritonStep
from octavo.testing.gpu_runner import DEVICE
from octavo.testing.oracles.worker_plans import sampling
from octavo.wire.steps import KVGroup
from octavo.worker.gpu.inputs import SequenceRows, StepInputs, decodes_first
from octavo.worker.models.decoder import PagedStep
from octavo.worker.sequences import PENDING_TOKEN, WorkerSequence, WorkItem
from octavo.worker.step.forward import Paging

BLOCK_SIZE = 4
NUM_GROUPS = 2


def sequence(sequence_id: int, num_tokens: int, *, pending: bool = False) -> WorkerSequence:
    """Of tokens 100 * id + 0, 1, ..., in blocks that tell both id and place apart."""
    tokens = [100 * sequence_id + place for place in range(num_tokens)]
    if pending:
        tokens[-1] = PENDING_TOKEN
    width = -(-num_tokens // BLOCK_SIZE)
    tables = [[1000 * group + 10 * sequence_id + place for place in range(width)] for group in range(NUM_GROUPS)]
    return WorkerSequence(sequence_id, 0, sampling(), num_tokens, tokens, 0, tables)


def inputs_of(items: list[WorkItem]) -> tuple[StepInputs, SequenceRows]:
    device = torch.device(DEVICE)
    rows = SequenceRows(NUM_GROUPS, 8, device, capacity=64)
    for item in items:
        rows.row_of(item.sequence)
        rows.next_tokens[rows.row_of(item.sequence)] = 9000 + item.sequence.sequence_id
    rows.send_tables(item.sequence for item in items)
    attention: object = None
    groups = [KVGroup(0), KVGroup(6)]
    paging = Paging(attention, groups, BLOCK_SIZE, max_model_len=32, device=device)  # type: ignore[arg-type]
    return StepInputs(paging, [], rows, max_batch=8), rows


def expected(items: list[WorkItem]) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens, positions and each group's slots."""
    tokens, positions, slots = [], [], [[], []]  # type: ignore[var-annotated]
    for item in items:
        for position in range(item.start, item.end):
            token = item.sequence.token_ids[position]
            tokens.append(9000 + item.sequence.sequence_id if token == PENDING_TOKEN else token)
            positions.append(position)
            for group, table in enumerate(item.sequence.block_tables):
                slots[group].append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    return tokens, positions, slots


def found(step: PagedStep, num_tokens: int) -> tuple[list[int], list[int], list[list[int]]]:
    slots = [group.slot_mapping[:num_tokens].tolist() for group in step.groups]
    return step.input_ids[:num_tokens].tolist(), step.positions[:num_tokens].tolist(), slots


ITEMS = {
    "decodes": [(1, 9, 8, 1), (2, 1, 0, 1), (3, 5, 4, 1)],
    "chunks": [(1, 9, 2, 5), (2, 4, 0, 4)],
    "mixed": [(4, 17, 16, 1), (1, 9, 8, 1), (2, 12, 3, 9), (3, 2, 0, 2)],
}


@pytest.mark.parametrize("case", ITEMS)
@pytest.mark.parametrize("pending", [False, True])
def test_of_any_step(case: str, pending: bool) -> None:
    items = []
    for sequence_id, length, start, count in ITEMS[case]:
        each = sequence(sequence_id, length, pending=pending and start + count == length)
        items.append(WorkItem(each, start, count, ()))
    inputs, rows = inputs_of(items)
    step = inputs.step(items, [0, 2])
    assert found(step, sum(item.num_tokens for item in items)) == expected(items)
    assert step.rows.tolist() == [0, 2]
    for index, group in enumerate(step.groups):
        assert isinstance(group, TritonStep)
        assert group.window == (0, 6)[index]
        assert group.context_lens.tolist() == [item.end for item in items]
        assert group.query_starts.tolist()[-1] == group.num_tokens == sum(item.num_tokens for item in items)
        assert group.table_rows.tolist() == [rows.row_of(item.sequence) for item in items]
        assert group.num_decodes == sum(item.num_tokens == 1 for item in items)
        for item, row in zip(items, group.table_rows.tolist(), strict=True):
            table = item.sequence.block_tables[index]
            assert group.block_tables[row, : len(table)].tolist() == table


def test_of_a_decode_step_with_padding_that_is_written_nowhere() -> None:
    items = [WorkItem(sequence(each, 6, pending=each == 2), 5, 1, ()) for each in (1, 2, 3)]
    inputs, _ = inputs_of(items)
    step = inputs.decode_step(4)
    inputs.fill(items, 4)
    tokens, positions, slots = expected(items)
    assert found(step, 4) == ([*tokens, 0], [*positions, 0], [[*each, -1] for each in slots])
    for group in step.groups:
        assert group.context_lens.tolist() == [6, 6, 6, 0]
        assert (group.num_decodes, group.num_tokens, group.max_query_len) == (4, 4, 0)
        assert group.query_starts.tolist() == [0, 1, 2, 3, 4]
        assert group.max_context_len == 32


def test_decodes_come_first_and_keep_their_order() -> None:
    items = [WorkItem(sequence(each, 9), 0, count, ()) for each, count in ((1, 4), (2, 1), (3, 2), (4, 1))]
    assert [item.sequence.sequence_id for item in decodes_first(items)] == [2, 4, 1, 3]
