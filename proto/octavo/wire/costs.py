"""Defines what steps cost on a worker, as the worker measured at its start: by these costs a scheduler weighs moving KV
against computing it again."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, field

from octavo.wire.base import Value

Seconds = Annotated[float, Meta(ge=0.0, le=3600.0)]


class PrefillCosts(Value, frozen=True):
    """Gives the seconds of any step, of each token that it computes, and of each pair of such a token and one that it
    attends to (`attended_pairs`)."""

    step_s: Seconds
    token_s: Seconds
    pair_s: Seconds


class SwapCosts(Value, frozen=True):
    """Gives the seconds of moving blocks between device and CPU memory: `moves_s` for all blocks that a step moves one
    way together, `block_out_s` and `block_in_s` for each block that leaves or enters the device."""

    moves_s: Seconds
    block_out_s: Seconds
    block_in_s: Seconds


class RowCost(Value, frozen=True):
    """Gives the seconds of a step of so many rows that all choose a token: those of one sequence and its drafts."""

    rows: Annotated[int, Meta(ge=1, le=2**20)]
    seconds: Seconds


class StepCosts(Value, frozen=True):
    """Holds the costs that a scheduler weighs against each other: computing a prompt again, and swapping its blocks;
    and, by rising numbers of `rows`, what a step's time grows by with drafts (nothing where that was not measured).
    `proposals`: by rising numbers of sequences, what it grows by for each token that is proposed for all of them."""

    prefill: PrefillCosts
    swap: SwapCosts
    rows: Annotated[list[RowCost], Meta(max_length=64, extra={"since": 9})] = field(default_factory=list)
    proposals: Annotated[list[RowCost], Meta(max_length=64, extra={"since": 9})] = field(default_factory=list)


def attended_pairs(context: int, num_tokens: int, windows: Sequence[int]) -> float:
    """Counts the pairs of a token and one that it attends to, itself included, for `num_tokens` tokens after `context`
    others: the mean over KV groups, by their windows (0: none), which have about equally many layers."""
    return sum(_pairs(context, num_tokens, window) for window in windows) / len(windows)


def _pairs(context: int, num_tokens: int, window: int) -> int:
    """Counts the pairs of one group: the first tokens see all before them, those whose window has begun to slide as
    many as fit it."""
    growing = min(max(window - context, 0), num_tokens) if window else num_tokens
    return growing * context + growing * (growing + 1) // 2 + (num_tokens - growing) * window
