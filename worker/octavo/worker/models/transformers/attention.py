"""Paged attention in transformers models, and marks in place of their masks, which show what each token sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

# Visibility by (batch, head, query, key) indices, as transformers' mask functions have it.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# transformers makes no masks for an attention that its mask interface does not know.
PAGED = "octavo_paged"


class NotCausal(Exception):
    """Raised for a mask that is not simply causal, with or without a window."""


@dataclass(slots=True)
class MaskMarks:
    """Makes tensors that stand for masks, for a model with a context of `context` tokens.

    A mark has the shape of its mask and is full of one small number, so it survives being cut, expanded and cast;
    anything that a model adds to it shows.
    """

    context: int
    _windows: list[int | None] = field(default_factory=list)

    def mark(self, window: int | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if window not in self._windows:
            self._windows.append(window)
        return torch.full(shape, float(self._windows.index(window)), device=device)

    def window_of(self, mark: Tensor) -> int:
        """Returns the window of the mask that `mark` stands for, 0 being none. Raises `NotCausal`."""
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
    """Gives marks for masks, within the block, to models that attend as a name registered with `mark_masks`."""
    marks = MaskMarks(context)
    token = _MARKS.set(marks)
    try:
        yield marks
    finally:
        _MARKS.reset(token)


def mark_masks(name: str) -> None:
    """Makes transformers build marks instead of masks for the attention called `name`."""
    AttentionMaskInterface.register(name, _mark)


def _mark(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> Tensor:
    marks = _MARKS.get()
    window = causal_window(mask_function, marks.context, device)
    return marks.mark(window, (batch_size, 1, q_length, kv_length), device)


def causal_window(mask_function: MaskFunction, context: int, device: torch.device) -> int | None:
    """Returns how many tokens, itself included, a token sees at most in a context of `context` tokens; 0: all before
    it.

    The result is None if a token does not simply see the last so many tokens.
    """
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
    """Returns [queries, keys] bool, for the first sequence of a batch and its first head."""
    first = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=keys.device)
    visible = mask_function(first, first, queries[None, None, :, None], keys[None, None, None, :])
    return visible.expand(1, 1, len(queries), len(keys))[0, 0]


class Attending(Protocol):
    """Computes attention in a forward pass: `octavo.worker.models.decoder.PagedStep`, or the check at start."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class ForwardPass:
    """Numbers a pass's calls of attention: the n-th is layer n, whatever the model calls its layers."""

    def __init__(self, attending: Attending) -> None:
        self.attending = attending
        self.num_calls = 0

    def next_layer(self) -> int:
        self.num_calls += 1
        return self.num_calls - 1


# Not every model hands keyword arguments on to its attention.
_CURRENT: ContextVar[ForwardPass] = ContextVar("octavo_forward_pass")


@contextmanager
def attending(to: Attending) -> Iterator[ForwardPass]:
    """Directs the attention of models that attend as `PAGED` to `to` within the block."""
    forward_pass = ForwardPass(to)
    token = _CURRENT.set(forward_pass)
    try:
        yield forward_pass
    finally:
        _CURRENT.reset(token)


def current_pass() -> ForwardPass:
    """Returns the forward pass being computed."""
    return _CURRENT.get()


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the signature that transformers expects.

    `query` is [batch, heads, tokens, head_dim], the result [batch, tokens, heads, head_dim]. The arguments that it
    leaves out, above all the mask, have been checked by `octavo.worker.models.transformers.check`.
    """
    forward_pass = current_pass()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rows, keys, values = map(_rows, (query, key, value))
    attended = forward_pass.attending.attend(
        forward_pass.next_layer(), rows, keys, values, scale, softcap=softcap or 0.0, sinks=s_aux
    )
    return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]), None


def _rows(heads: Tensor) -> Tensor:
    """Returns [batch, heads, tokens, head_dim] as [batch * tokens, heads, head_dim]; a view as models lay it out."""
    return heads.transpose(1, 2).flatten(0, 1).contiguous()


AttentionInterface.register(PAGED, paged_attention)
