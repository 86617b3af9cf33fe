"""Paged attention in the place where transformers' models look for theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

# transformers makes no masks for an attention that its mask interface does not know.
PAGED = "octavo_paged"


class Attending(Protocol):
    """What computes attention in a forward pass: `octavo.worker.models.decoder.PagedStep`, or the check at start."""

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
    """Within it, models that attend as `PAGED` attend to `to`."""
    forward_pass = ForwardPass(to)
    token = _CURRENT.set(forward_pass)
    try:
        yield forward_pass
    finally:
        _CURRENT.reset(token)


def current_pass() -> ForwardPass:
    """The forward pass being computed."""
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
    """transformers' attention function: `query` is [batch, heads, tokens, head_dim], the result [batch, tokens, heads,
    head_dim]. What it leaves out, the mask above all, `octavo.worker.models.transformers.check` has looked at."""
    forward_pass = current_pass()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rows, keys, values = map(_rows, (query, key, value))
    attended = forward_pass.attending.attend(
        forward_pass.next_layer(), rows, keys, values, scale, softcap=softcap or 0.0, sinks=s_aux
    )
    return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]), None


def _rows(heads: Tensor) -> Tensor:
    """[batch * tokens, heads, head_dim] of [batch, heads, tokens, head_dim]; a view as models lay it out."""
    return heads.transpose(1, 2).flatten(0, 1).contiguous()


AttentionInterface.register(PAGED, paged_attention)
