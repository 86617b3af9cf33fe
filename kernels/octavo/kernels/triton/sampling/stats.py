"""Reads the largest logit and the probability sum of each row of logits once, span by span and in parallel."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.language import POINTERS, block_for

# A row is read as at most so many spans of neighbouring ids, each of a power of two of them and at least so many.
SPANS = 1024
_LEAST_WIDTH = 256
# The ids that one program reads, and so the most of a span.
_TILE = 4096


@dataclass(frozen=True)
class Survey:
    """Holds two figures of every span of `width` ids of each row.

    `maxima`: [rows, spans] fp32, the largest logit, NaN if there is one. `masses`: [rows, spans] fp64, the sum of
    exp((logit - that largest) / temperature) where the row has a temperature.
    """

    maxima: Tensor
    masses: Tensor
    width: int


def check_logits(logits: Tensor) -> None:
    """Raises `ValueError` unless they are [rows, vocab_size] in a float dtype, the ids of a row side by side."""
    if logits.dim() != 2 or logits.dtype not in POINTERS or not logits.shape[1]:
        raise ValueError(
            f"logits are [rows, vocab_size] of fp32, bf16 or fp16, not {list(logits.shape)} {logits.dtype}"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"the logits of a row must be side by side, but have a stride of {logits.stride(1)}")
    if logits.shape[1] > SPANS * _TILE:
        raise ValueError(f"a vocabulary of {logits.shape[1]} is more than the {SPANS * _TILE} ids there is room for")


def survey(logits: Tensor, temperatures: Tensor) -> Survey:
    """Surveys `logits` ([rows, vocab_size], see `check_logits`). `temperatures`: [rows] fp64, 0 where no sum is wanted.
    Raises `ValueError` on arguments that do not fit."""
    check_logits(logits)
    rows, size = logits.shape
    if temperatures.shape != (rows,) or temperatures.dtype != torch.float64:
        raise ValueError(f"temperatures are [{rows}] fp64, not {list(temperatures.shape)} {temperatures.dtype}")
    width = span_width(size)
    spans = triton.cdiv(size, width)
    found = Survey(
        torch.empty((rows, spans), dtype=torch.float32, device=logits.device),
        torch.empty((rows, spans), dtype=torch.float64, device=logits.device),
        width,
    )
    if rows:
        _survey[(rows, triton.cdiv(size, _TILE))](
            logits,
            logits.stride(0),
            size,
            temperatures,
            temperatures.stride(0),
            found.maxima,
            found.masses,
            spans,
            WIDTH=width,
            TILE=_TILE,
            num_warps=4,
        )
    return found


def log_masses(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest of each row of `logits` ([rows, vocab_size], see `check_logits`; NaN if there is one) and the
    logarithm of the sum of exp(logit - largest), NaN if the largest is not finite, [rows] fp32 each. A row's figures
    are the same whatever rows are beside it."""
    rows = len(logits)
    found = survey(logits, torch.ones(1, dtype=torch.float64, device=logits.device).expand(rows))
    largest, masses = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _log_masses[(rows,)](
            found.maxima, found.masses, found.maxima.shape[1], largest, masses, SPANS=SPANS, num_warps=4
        )
    return largest, masses


def span_width(vocab_size: int) -> int:
    """Returns the number of ids in a span."""
    return max(_LEAST_WIDTH, block_for(-(-vocab_size // SPANS)))


def span_widths() -> tuple[int, ...]:
    """Returns the span widths of vocabularies up to half a million ids."""
    return tuple(span_width(size) for size in (1 << 18, 1 << 19))


def variants() -> Iterator[Variant]:
    """Yields every configuration that this module launches."""
    types = {
        "logits_stride": "i64",
        "vocab_size": "i32",
        "temperatures": "*fp64",
        "temperature_stride": "i32",
        "maxima": "*fp32",
        "masses": "*fp64",
        "num_spans": "i32",
    }
    for logits in POINTERS.values():
        for width in span_widths():
            name = f"survey of {logits[1:]} in spans of {width}"
            yield Variant(name, _survey, {"logits": logits, **types}, {"WIDTH": width, "TILE": _TILE})
    results = {"maxima": "*fp32", "masses": "*fp64", "num_spans": "i32", "largest": "*fp32", "log_masses": "*fp32"}
    yield Variant("log masses", _log_masses, results, {"SPANS": SPANS})


@triton.jit
def relative_masses(values, largest, temperature):
    """Returns exp((`values` - `largest`) / `temperature`), all fp32; 0 for a value that is -inf."""
    return tl.exp((values - largest) / temperature)


@triton.jit
def largest_or_nan(values, axis: tl.constexpr):
    """Returns the largest along `axis`; NaN if one is. (A maximum by itself passes over NaN.)"""
    is_nan = tl.max((values != values).to(tl.int32), axis)
    return tl.where(is_nan > 0, float("nan"), tl.max(values, axis))


@triton.jit
def span_masses(maxima, masses, largest, temperature):
    """Returns the `masses` of spans, which are relative to their `maxima`, relative to the `largest`."""
    return tl.where(masses > 0, masses * relative_masses(maxima, largest, temperature).to(tl.float64), 0.0)


@triton.jit(do_not_specialize=["temperature_stride"], do_not_specialize_on_alignment=["temperatures"])
def _survey(
    logits,
    logits_stride,
    vocab_size,
    temperatures,
    temperature_stride,
    maxima,
    masses,
    num_spans,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    spans = tl.program_id(1) * (TILE // WIDTH) + tl.arange(0, TILE // WIDTH)
    ids = spans[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    largest = largest_or_nan(values, 1)
    at = row * num_spans + spans
    tl.store(maxima + at, largest, mask=spans < num_spans)
    temperature = tl.load(temperatures + row * temperature_stride)
    if temperature > 0:
        divisor = fp32_temperature(temperature)
        # Where nothing is possible, and where a row is broken, any number will do.
        reference = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
        found = tl.sum(relative_masses(values, reference[:, None], divisor).to(tl.float64), 1)
        tl.store(masses + at, found, mask=spans < num_spans)


@triton.jit
def fp32_temperature(temperature):
    """Returns `temperature` in fp32, but not 0: one that fp32 rounds to 0 would make 0 / 0 of the largest logit."""
    return tl.maximum(temperature, 1.1754943508222875e-38).to(tl.float32)


@triton.jit
def _log_masses(maxima, masses, num_spans, largest, log_masses, SPANS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, SPANS)
    at, inside = row * num_spans + spans, spans < num_spans
    tops = tl.load(maxima + at, mask=inside, other=float("-inf"))
    top = largest_or_nan(tops, 0)
    found = tl.full([], float("nan"), tl.float32)
    if tl.abs(top) < float("inf"):
        whole = tl.sum(span_masses(tops, tl.load(masses + at, mask=inside, other=0.0), top, 1.0), 0)
        found = tl.log(whole).to(tl.float32)
    tl.store(largest + row, top)
    tl.store(log_masses + row, found)
