"""What the masks of a transformers model let a token see, read off the functions that would make them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

# Visibility by (batch, head, query, key) indices, as transformers' mask functions have it.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class NotCausal(Exception):
    """A mask that is not simply causal, with or without a window."""


@dataclass(slots=True)
class MaskMarks:
    """Tensors that stand for masks, for a model with a context of `context` tokens.

    A mark has the shape of its mask and is full of one small number, so it survives being cut, expanded and cast; what
    a model adds to it shows.
    """

    context: int
    _windows: list[int | None] = field(default_factory=list)

    def mark(self, window: int | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if window not in self._windows:
            self._windows.append(window)
        return torch.full(shape, float(self._windows.index(window)), device=device)

    def window_of(self, mark: Tensor) -> int:
        """The window of the mask that `mark` stands for, 0 being none. Raises `NotCausal`."""
        number = float(mark.flatten()[0])
        if number not in range(len(self._windows)) or not bool((mark == number).all()):
            raise NotCausal("adds to the scores with a mask or bias of its own making")
        window = self._windows[int(number)]
        if window is None:
            raise NotCausal("masks in another way than causally with a fixed window (both ways, or by chunks)")
        return window


_MARKS: ContextVar[MaskMarks] = ContextVar("octavo_mask_marks")


@contextmanager
def marking(context: int) -> Iterator[MaskMarks]:
    """Within it, models that attend as a name registered with `mark_masks` get marks for masks."""
    marks = MaskMarks(context)
    token = _MARKS.set(marks)
    try:
        yield marks
    finally:
        _MARKS.reset(token)


def mark_masks(name: str) -> None:
    """Has transformers make marks instead of masks for the attention called `name`."""
    AttentionMaskInterface.register(name, _mark)


def _mark(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> Tensor:
    marks = _MARKS.get()
    window = causal_window(mask_function, marks.context, device)
    return marks.mark(window, (batch_size, 1, q_length, kv_length), device)


def causal_window(mask_function: MaskFunction, context: int, device: torch.device) -> int | None:
    """How many tokens, itself included, a token sees at most in a context of `context` tokens; 0: all before it.
    None if what it sees is not simply the last so many tokens."""
    keys = torch.arange(context, device=device)
    try:
        window = int(_visible(mask_function, keys[-1:], keys).sum())
        edges = {0, 1, window - 1, window, window + 1, context // 2, context - 1}
        queries = torch.tensor(sorted(edge for edge in edges if 0 <= edge < context), device=device)
        visible = _visible(mask_function, queries, keys)
    except IndexError:  # It looks up something about each token of the batch.
        return None
    expected = (keys <= queries[:, None]) & (keys > queries[:, None] - window)
    if window == 0 or not torch.equal(visible, expected):
        return None
    return 0 if window >= context else window


def _visible(mask_function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """[queries, keys] bool, for the first sequence of a batch and its first head."""
    first = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=keys.device)
    visible = mask_function(first, first, queries[None, None, :, None], keys[None, None, None, :])
    return visible.expand(1, 1, len(queries), len(keys))[0, 0]
