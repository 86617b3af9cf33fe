"""Windows are read off the mask functions of transformers itself."""

from typing import Any

import pytest
import torch
from transformers import masking_utils

from octavo.worker.models.transformers.attention import MaskMarks, NotCausal, causal_window

CPU = torch.device("cpu")
NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mask_function", "context", "window"),
    [
        (masking_utils.causal_mask_function, 1, 0),
        (masking_utils.causal_mask_function, 100, 0),
        (masking_utils.sliding_window_causal_mask_function(1), 100, 1),
        (masking_utils.sliding_window_causal_mask_function(30), 100, 30),
        (masking_utils.sliding_window_causal_mask_function(99), 100, 99),
        (masking_utils.sliding_window_causal_mask_function(100), 100, 0),
        (masking_utils.sliding_window_causal_mask_function(4097), 5000, 4097),
        # A chunk that holds the context is as good as none.
        (masking_utils.chunked_causal_mask_function(100, NO_PADDING), 100, 0),
    ],
)
def test_a_causal_mask_has_its_window(mask_function: Any, context: int, window: int) -> None:
    assert causal_window(mask_function, context, CPU) == window


@pytest.mark.parametrize(
    "mask_function",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(30),
        masking_utils.chunked_causal_mask_function(30, NO_PADDING),
        masking_utils.or_masks(
            masking_utils.sliding_window_causal_mask_function(30), masking_utils.blockwise_overlay(torch.zeros(1, 100))
        ),
        # Which looks up tokens that the context has and the batch does not.
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 8))),
    ],
)
def test_any_other_mask_has_none(mask_function: Any) -> None:
    assert causal_window(mask_function, 100, CPU) is None


def test_a_mark_is_read_whatever_was_cut_from_it() -> None:
    marks = MaskMarks(100)
    full, sliding = (marks.mark(window, (2, 1, 8, 8), CPU) for window in (0, 4097))
    assert marks.window_of(full) == 0
    assert marks.window_of(sliding[:1, :, 3:, :4].to(torch.bfloat16).expand(1, 4, 5, 4)) == 4097


def test_a_mark_that_was_changed_is_found_out() -> None:
    marks = MaskMarks(100)
    mark = marks.mark(0, (1, 1, 8, 8), CPU)
    for changed in (mark + torch.arange(8), mark - 1, mark + 1, mark + 0.5, torch.full_like(mark, -torch.inf)):
        with pytest.raises(NotCausal, match="of its own making"):
            marks.window_of(changed)


def test_a_mark_of_another_kind_of_mask_says_so() -> None:
    marks = MaskMarks(100)
    with pytest.raises(NotCausal, match="another way than causally"):
        marks.window_of(marks.mark(None, (1, 1, 8, 8), CPU))
