"""The arithmetic of how evenly programs share a decode."""

import pytest
import torch

from octavo.bench.gpu.balance import BATCHES, balance, in_one_pass, listed, main
from octavo.bench.gpu.shapes import AttentionShape
from octavo.kernels.backend import GroupBatch
from octavo.kernels.triton.launch import SequenceRange, TritonStep
from octavo.kernels.triton.tiles import DECODE_SPLIT_KEYS, decode_tiles
from octavo.kernels.triton.work_list import list_work

SHAPE = AttentionShape()


def test_a_long_sequence_in_one_pass_holds_up_the_others_and_in_pieces_does_not() -> None:
    batch = (32_768, *[1024] * 63)
    one, other = balance(in_one_pass(batch, 8), SHAPE), balance(listed(batch, 8), SHAPE)
    assert one.over_floor > 3 > 1.05 > other.over_floor >= 1
    assert one.busiest > 6 > 1.1 > other.busiest >= 1


def test_equal_sequences_that_fill_the_device_take_the_time_to_read_them() -> None:
    assert balance([1024] * 132 * 3 * 2, SHAPE).over_floor == pytest.approx(1)
    # Eight programs reach what their loads under way allow.
    assert balance([4096] * 8, SHAPE).over_floor == pytest.approx(4.3e12 / (8 * 65536e6))


def test_the_pieces_are_as_many_as_a_device_lists() -> None:
    contexts = [9000, 1024, 1023, 70]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slots, tables = torch.full((4,), -1), torch.zeros(4, 9000 // 16 + 1, dtype=torch.int64)
    step = TritonStep.of(GroupBatch(slots, tables, contexts, [1] * 4, 0), 16, device)
    tiles = decode_tiles(SHAPE.group, SHAPE.head_dim, torch.bfloat16, torch.bfloat16)
    share = SequenceRange(0, 4, 4, 1, tiles, decode=True, num_splits=33, least_keys=DECODE_SPLIT_KEYS)
    work = list_work(step, share, SHAPE.group, 0, 4)
    count = int(work.counts[0])
    pieces = work.pieces[:count].tolist()
    assert [sum(piece // 33 == row for piece in pieces) for row in range(4)] == [
        len(listed([context], SHAPE.kv_heads)) // SHAPE.kv_heads for context in contexts
    ]


def test_prints_a_line_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(BATCHES)
    assert lines[2].startswith("1 x 32768, 15 x 1024 ")
