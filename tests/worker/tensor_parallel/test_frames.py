"""What the ranks are told: every batch comes out as it went in, and nothing that does not fit is computed."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.batch import Batch, build_batch
from octavo.worker.tensor_parallel.frames import (
    Beat,
    Compute,
    EndFrame,
    Frame,
    FrameError,
    Logits,
    Move,
    batch_of,
    compute_frame,
    decode,
    encode,
)

CPU = torch.device("cpu")


def batch() -> Batch:
    """A prompt of which nothing is chosen yet, and two sequences that decode, one with a draft, in two KV groups."""
    sampling = SamplingParams(max_tokens=8)
    prompt = WorkerSequence(0, 0, sampling, 9, list(range(9)), 0, [[4, 5, 6], [7, 8, 9]])
    decoding = [WorkerSequence(i, 0, sampling, 3, [1, 2, 3, 4], 3, [[10 + i, 0], [12 + i, 1]]) for i in (1, 2)]
    drafts: list[list[int]] = [[], [5, 6]]
    decodes = [WorkItem(each, 3, 1 + len(draft), (each,), draft) for each, draft in zip(decoding, drafts, strict=True)]
    items = [WorkItem(prompt, 0, 6, ()), *decodes]
    return build_batch(items, 2, 4, CPU)


def frame(**changed: Any) -> Compute:
    return msgspec.structs.replace(compute_frame(batch()), **changed)


def test_a_batch_comes_out_as_it_went_in_but_for_its_sequences() -> None:
    sent = batch()
    received = decode(encode(compute_frame(sent)))
    assert isinstance(received, Compute)
    found = batch_of(received, 2, CPU)
    for name in ("input_ids", "positions", "fresh_blocks"):
        assert torch.equal(getattr(found, name), getattr(sent, name))
    for name in ("slot_mappings", "block_tables"):
        assert all(map(torch.equal, getattr(found, name), getattr(sent, name)))
    assert (found.context_lens, found.query_lens) == (sent.context_lens, sent.query_lens)
    wanted = sent.logit_rows
    assert found.logit_rows == replace(wanted, choosers=[], chooser_rows=[], watched=[], prompt_spans=[])


@pytest.mark.parametrize(
    "sent",
    [Move(BlockMoves(copy=[BlockMove(1, 2)])), Logits(3, 5), Beat(), EndFrame()],
    ids=lambda each: type(each).__name__,
)
def test_orders_come_out_as_they_went_in(sent: Frame) -> None:
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(["Beat", 1]), encode(["Compute"]), encode({"type": "Beat"})])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data)


@pytest.mark.parametrize(
    "changed",
    [
        {"input_ids": bytes(8 * 7)},
        {"positions": bytes(8 * 9)},
        {"slot_mappings": [bytes(8 * 8), bytes(8 * 7)]},
        {"slot_mappings": [bytes(8 * 8)]},
        {"block_tables": [bytes(8 * 6), bytes(8 * 5)]},
        {"block_tables": []},
        {"fresh_blocks": bytes(7)},
        {"context_lens": [6, 4]},
        {"query_lens": [6, 1, 0]},
        {"query_lens": []},
        {"rows": [8]},
        {"rows": [-1]},
        {"num_choosing": 6},
        {"num_choosing": -1},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_each_other_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        batch_of(frame(**changed), 2, CPU)
