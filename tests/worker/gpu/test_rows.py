"""What the device knows of sequences follows what the host does with them."""

import random

import pytest
import torch

from octavo.testing.oracles.worker_plans import sampling
from octavo.worker.gpu.inputs import SequenceRows
from octavo.worker.sequences import PENDING_TOKEN, WorkerSequence

CPU = torch.device("cpu")


def sequence(sequence_id: int, *tables: list[int]) -> WorkerSequence:
    return WorkerSequence(sequence_id, 0, sampling(), 1, [5], 0, [list(table) for table in tables])


def pending(sequence_id: int, *tables: list[int]) -> WorkerSequence:
    """One whose next token only the device knows."""
    each = sequence(sequence_id, *tables)
    each.token_ids.append(PENDING_TOKEN)
    return each


def table_of(rows: SequenceRows, each: WorkerSequence, group: int = 0) -> list[int]:
    known: list[int] = rows.tables[group, rows.row_of(each)].tolist()
    return known[: len(each.block_tables[group])]


def test_a_sequence_keeps_its_row_until_it_is_forgotten() -> None:
    rows = SequenceRows(1, 4, CPU, capacity=4)
    first, second = sequence(1, [3]), sequence(2, [4])
    assert rows.row_of(first) != rows.row_of(second)
    assert rows.row_of(first) == rows.row_of(first)
    freed = rows.row_of(first)
    rows.forget([1, 99])
    assert rows.row_of(sequence(3, [3])) == freed


def test_nobody_has_the_last_row() -> None:
    rows = SequenceRows(1, 4, CPU, capacity=4)
    assert rows.discard_row not in {rows.row_of(sequence(each, [1])) for each in range(3)}


def test_only_what_has_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SequenceRows(2, 8, CPU, capacity=8)
    each = sequence(1, [7, 8], [9])
    rows.row_of(each)
    rows.send_tables([each])
    rows.tables[0, rows.row_of(each), 0] = 99
    each.block_tables[0].append(5)
    rows.send_tables([each])
    assert rows.tables[0, rows.row_of(each)].tolist()[:3] == [99, 8, 5]
    assert table_of(rows, each, 1) == [9]


def test_a_remapped_entry_is_told_again() -> None:
    rows = SequenceRows(1, 8, CPU, capacity=8)
    each = sequence(1, [7, 8, 9])
    rows.row_of(each)
    rows.send_tables([each])
    each.block_tables[0][1] = 4
    each.mark_unsent(0, 1)
    rows.send_tables([each])
    assert table_of(rows, each) == [7, 4, 9]


def test_whoever_gets_a_used_row_is_told_wholly() -> None:
    rows = SequenceRows(1, 8, CPU, capacity=2)
    first = sequence(1, [7, 8, 9])
    rows.row_of(first)
    rows.send_tables([first])
    rows.forget([1])
    second = sequence(2, [1, 2])
    rows.row_of(second)
    rows.send_tables([second])
    assert table_of(rows, second) == [1, 2]


def test_one_that_was_forgotten_and_comes_back_is_told_wholly() -> None:
    rows = SequenceRows(1, 8, CPU, capacity=2)
    first, second = sequence(1, [7, 8, 9]), sequence(2, [1, 2])
    for each in (first, second, first):
        rows.row_of(each)
        rows.send_tables([each])
        assert table_of(rows, each) == each.block_tables[0]
        rows.forget([each.sequence_id])


def test_as_many_as_there_is_room_for_from_the_start_lose_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    rows = SequenceRows(1, 2, CPU, capacity=5)
    for each in range(4):
        rows.row_of(pending(each, [each]))
    assert (rows.generation, caplog.text) == (0, "")
    rows.row_of(pending(4, [4]))
    assert rows.generation == 1
    assert "more than 4 sequences in two steps" in caplog.text


def test_a_sequence_that_rests_gives_its_row_to_one_that_runs_and_is_told_anew() -> None:
    """Those of the step keep theirs, and so does one with a token that only the device knows."""
    rows = SequenceRows(1, 4, CPU, capacity=4)
    resting, running, unknown = sequence(1, [7, 8]), sequence(2, [3]), pending(3, [4])
    rows.assign([unknown, running, resting])
    rows.send_tables([unknown, running, resting])
    freed, kept = rows.row_of(resting), [rows.row_of(unknown), rows.row_of(running)]
    new = sequence(4, [5])
    rows.assign([running, new])
    rows.send_tables([running, new])
    assert rows.row_of(new) == freed
    assert [rows.row_of(unknown), rows.row_of(running)] == kept
    rows.assign([resting])
    rows.send_tables([resting])
    assert table_of(rows, resting) == [7, 8]
    assert table_of(rows, unknown) == [4]
    assert rows.generation == 0


def test_more_rows_are_had_when_they_run_out_and_nothing_is_lost() -> None:
    rows = SequenceRows(1, 2, CPU, capacity=2)
    everybody = [pending(each, [each, each + 50]) for each in range(9)]
    for place, each in enumerate(everybody):
        rows.row_of(each)
        rows.send_tables([each])
        rows.next_tokens[rows.row_of(each)] = place + 100
    assert rows.generation == 3
    assert [table_of(rows, each) for each in everybody] == [each.block_tables[0] for each in everybody]
    assert [int(rows.next_tokens[rows.row_of(each)]) for each in everybody] == list(range(100, 109))
    assert rows.discard_row not in {rows.row_of(each) for each in everybody}


def test_tables_are_right_after_any_history() -> None:
    draw = random.Random(0)
    rows = SequenceRows(2, 12, CPU, capacity=4)
    alive: dict[int, WorkerSequence] = {}
    for number in range(300):
        match draw.randrange(5):
            case 0:
                alive[number] = sequence(number, [draw.randrange(90)], [draw.randrange(90)])
            case 1 if alive:
                forgotten = draw.choice(list(alive))
                del alive[forgotten]
                rows.forget([forgotten])
            case 2 if alive:
                each = draw.choice(list(alive.values()))
                group = draw.randrange(2)
                entry = draw.randrange(len(each.block_tables[group]))
                each.block_tables[group][entry] = draw.randrange(90)
                each.mark_unsent(group, entry)
            case 3 if alive:
                each = draw.choice(list(alive.values()))
                if len(each.block_tables[0]) < 12:
                    for table in each.block_tables:
                        table.append(draw.randrange(90))
            case _:
                chosen = [each for each in alive.values() if draw.random() < 0.5]
                rows.assign(chosen)
                rows.send_tables(chosen)
                for each in chosen:
                    assert [table_of(rows, each, group) for group in range(2)] == each.block_tables
