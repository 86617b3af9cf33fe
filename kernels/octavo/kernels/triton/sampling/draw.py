"""Chooses token ids from logits on the device: greedily, or with temperature, min-p, top-k and top-p by inverse CDF
with one uniform number per row.

One program chooses for one row, so a row's token does not depend on the rows beside it. The order of the CDF is that of
the ids for a row that is not cut, and falling probability for a row that is, equal ones by rising id. So the device
chooses the token that the CPU does, but for the rounding of probability sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.language import POINTERS
from octavo.kernels.triton.sampling.cuts import LEAST_KEY, gather, keys_of, pick, search
from octavo.kernels.triton.sampling.stats import (
    SPANS,
    check_logits,
    fp32_temperature,
    largest_or_nan,
    relative_masses,
    span_masses,
    span_widths,
    survey,
)

# The columns of `parameters`.
UNIFORM, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(5)
NUM_PARAMETERS = 5

# So many tokens that may be left by cuts are gathered; from more, the whole row is searched. And what a search reads at
# once, and the keys that it tries.
_FEW, _CHUNK, _WAYS = 4096, 4096, 8
_NUM_WARPS = 16


@dataclass(frozen=True)
class Drawn:
    """Holds the token of each row, [rows] int64, and its largest logit, [rows] fp32. The largest logit is NaN or
    infinite if the row is not finite; the token is 0 then."""

    tokens: Tensor
    largest: Tensor


def draw(logits: Tensor, parameters: Tensor) -> Drawn:
    """Draws a token for each row of `logits` ([rows, vocab_size], see
    `octavo.kernels.triton.sampling.stats.check_logits`).

    `parameters`: [rows, 5] fp64, contiguous: a number in [0, 1), the temperature (0: the token with the largest logit,
    of equals the one with the lowest id), top-k (0: off), top-p (1: off) and min-p (0: off). Left are the first top-k
    tokens, of them those with min-p of the largest probability, and of these the first that reach top-p of their mass.
    Raises `ValueError`.
    """
    check_logits(logits)
    rows, size = logits.shape
    if (
        parameters.shape != (rows, NUM_PARAMETERS)
        or parameters.dtype != torch.float64
        or not parameters.is_contiguous()
    ):
        raise ValueError(
            f"parameters are [{rows}, {NUM_PARAMETERS}] fp64 without gaps, not {list(parameters.shape)}"
            f" {parameters.dtype}"
        )
    found = survey(logits, parameters[:, TEMPERATURE])
    drawn = Drawn(
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
    )
    if rows:
        _draw[(rows,)](
            logits,
            logits.stride(0),
            size,
            parameters,
            found.maxima,
            found.masses,
            found.maxima.shape[1],
            torch.empty((rows, SPANS), dtype=torch.int32, device=logits.device),
            torch.empty((rows, _FEW), dtype=logits.dtype, device=logits.device),
            torch.empty((rows, _FEW), dtype=torch.int32, device=logits.device),
            drawn.tokens,
            drawn.largest,
            WIDTH=found.width,
            SPANS=SPANS,
            FEW=_FEW,
            CHUNK=_CHUNK,
            WAYS=_WAYS,
            num_warps=_NUM_WARPS,
        )
    return drawn


def variants() -> Iterator[Variant]:
    """Yields every configuration that this module launches."""
    types = {
        "logits_stride": "i64",
        "vocab_size": "i32",
        "parameters": "*fp64",
        "maxima": "*fp32",
        "masses": "*fp64",
        "num_spans": "i32",
        "wanted_spans": "*i32",
        "few_ids": "*i32",
        "tokens": "*i64",
        "largest": "*fp32",
    }
    constants = {"SPANS": SPANS, "FEW": _FEW, "CHUNK": _CHUNK, "WAYS": _WAYS}
    usual, *wide = span_widths()
    for logits, width in [(logits, usual) for logits in POINTERS.values()] + [("*bf16", width) for width in wide]:
        signature = {"logits": logits, "few_values": logits, **types}
        name = f"draw from {logits[1:]} in spans of {width}"
        yield Variant(name, _draw, signature, {"WIDTH": width, **constants}, num_warps=_NUM_WARPS)


@triton.jit
def _first_above(masses, target, places):
    """Returns the first of the `places` up to which `masses` are more than `target` together; at most the last with
    any."""
    above = (tl.cumsum(masses, 0) > target) & (masses > 0)
    last = tl.max(tl.where(masses > 0, places, 0), 0)
    return tl.minimum(tl.min(tl.where(above, places, 0x7FFFFFFF), 0), last)


@triton.jit
def _argmax(logits, vocab_size, tops, spans, largest, WIDTH: tl.constexpr):
    span = tl.min(tl.where(tops == largest, spans, 0x7FFFFFFF), 0)
    ids = span * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(values == largest, ids, 0x7FFFFFFF), 0)


@triton.jit
def _pick_any(logits, vocab_size, masses, spans, uniform, largest, temperature, WIDTH: tl.constexpr):
    """Returns a token of the whole vocabulary, chosen in two levels: first the span of ids, then the id in the span."""
    target = uniform * tl.sum(masses, 0)
    span = _first_above(masses, target, spans)
    before = tl.sum(tl.where(spans < span, masses, 0.0), 0)
    ids = span * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    inside = relative_masses(values, largest, temperature).to(tl.float64)
    return _first_above(inside, target - before, ids)


@triton.jit
def _pick_cut(
    logits,
    vocab_size,
    maxima,
    num_spans,
    tops,
    spans,
    whole,
    wanted_spans,
    few_values,
    few_ids,
    uniform,
    top_k,
    top_p,
    min_p,
    largest,
    temperature,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Returns a token of those that the cuts leave. First come bounds that none of them is below: what reaches them is
    nearly always little, and in few spans."""
    least_key, least = tl.full([], LEAST_KEY, tl.int32), tl.full([], float("-inf"), tl.float32)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab_size), vocab_size).to(tl.int32)
    is_open = (top_k == vocab_size) & (min_p == 0)
    if top_k <= num_spans:
        # As many spans have something that is not below the so many largest maxima.
        highest = keys_of(largest)
        least_key = search(maxima, num_spans, least_key, highest, top_k, largest, temperature, "count", SPANS, WAYS)
    if min_p > 0:
        least = tl.log(min_p).to(tl.float32)
    if is_open & (top_p < 1):
        # All below it have together less than is cut off; by half, for the whole is rounded.
        least = tl.log((1 - top_p) / 2 * whole / vocab_size).to(tl.float32)
    reached = (keys_of(tops) >= least_key) & ((tops - largest) / temperature >= least) & (spans < num_spans)
    order = tl.cumsum(reached.to(tl.int32), 0) - 1
    tl.store(wanted_spans + order, spans, mask=reached)
    tl.debug_barrier()
    count, lowest = gather(
        logits,
        vocab_size,
        wanted_spans,
        tl.sum(reached.to(tl.int32), 0),
        least_key,
        least,
        few_values,
        few_ids,
        largest,
        temperature,
        WIDTH,
        FEW,
        CHUNK,
    )
    values, size = logits, vocab_size
    if count <= FEW:
        values, size = few_values, count
    whole = tl.where(is_open, whole, 0.0)
    token = pick(values, size, count, lowest, top_k, top_p, whole, uniform, largest, temperature, CHUNK, WAYS)
    if count <= FEW:
        token = tl.load(few_ids + token)
    return token


@triton.jit(do_not_specialize_on_alignment=["parameters"])
def _draw(
    logits,
    logits_stride,
    vocab_size,
    parameters,
    maxima,
    masses,
    num_spans,
    wanted_spans,
    few_values,
    few_ids,
    tokens,
    largest,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    maxima += row * num_spans
    parameters += row * 5
    uniform, temperature = tl.load(parameters), tl.load(parameters + 1)
    top_k, top_p, min_p = tl.load(parameters + 2), tl.load(parameters + 3), tl.load(parameters + 4)
    spans = tl.arange(0, SPANS)
    tops = tl.load(maxima + spans, mask=spans < num_spans, other=float("-inf"))
    top = largest_or_nan(tops, 0)
    tl.store(largest + row, top)
    token = tl.full([], 0, tl.int32)
    if tl.abs(top) < float("inf"):
        if temperature > 0:
            divisor = fp32_temperature(temperature)
            held = tl.load(masses + row * num_spans + spans, mask=spans < num_spans, other=0.0)
            held = span_masses(tops, held, top, divisor)
            if (top_k > 0) | (top_p < 1) | (min_p > 0):
                token = _pick_cut(
                    logits,
                    vocab_size,
                    maxima,
                    num_spans,
                    tops,
                    spans,
                    tl.sum(held, 0),
                    wanted_spans + row * SPANS,
                    few_values + row * FEW,
                    few_ids + row * FEW,
                    uniform,
                    top_k,
                    top_p,
                    min_p,
                    top,
                    divisor,
                    WIDTH,
                    SPANS,
                    FEW,
                    CHUNK,
                    WAYS,
                )
            else:
                token = _pick_any(logits, vocab_size, held, spans, uniform, top, divisor, WIDTH)
        else:
            token = _argmax(logits, vocab_size, tops, spans, top, WIDTH)
    tl.store(tokens + row, token.to(tl.int64))
