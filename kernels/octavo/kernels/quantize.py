"""Quantises weights to the codes and scales that llama.cpp's reference quantisers choose, and its `gguf` package with
them: each group by itself, from its largest values (https://github.com/ggml-org/ggml, ggml-quants.c)."""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.kernels.quantized import FORMATS, GROUP, BlockFormat, Quantized

# Values that are quantised at a time: few enough for a core's cache, and for one thread. Torch shares operations on
# more among all threads, which wait for each other at the end of every one.
_CHUNK = (1 << 15) - 1


def _codes_of_halves(groups: Tensor, steps: int) -> tuple[Tensor, Tensor, None]:
    """Returns codes and scales without mins: the largest value of each of `groups` gets the code 0, and zero gets
    `steps`."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    # Of a value and its negative, the first is the largest.
    ties = (high == -low).view(-1).nonzero().view(-1)
    tied = groups[ties]
    largest[ties] = tied.gather(1, tied.abs().argmax(-1, keepdim=True))
    scales = largest / -steps
    codes = (groups * _inverse(scales)).add_(steps + 0.5).clamp_(max=2 * steps - 1)
    return codes.to(torch.uint8), scales, None


def _codes_of_ranges(groups: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes from 0 for the least value of each of `groups` to `steps` for the largest, scales, and mins."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low) / steps
    codes = ((groups - low) * _inverse(scales)).add_(0.5).clamp_(max=steps)
    return codes.to(torch.uint8), scales, low


def _codes_of_bytes(groups: Tensor, steps: int) -> tuple[Tensor, Tensor, None]:
    """Returns codes and scales without mins: zero gets the code `steps` + 1, halves are rounded away from it."""
    scales = groups.abs().amax(-1, keepdim=True) / steps
    products = groups * _inverse(scales)
    sizes = products.abs()
    codes = sizes.floor()
    codes += sizes.sub_(codes).mul_(2).floor_()
    return codes.mul_(products.sign_()).add_(steps + 1).to(torch.uint8), scales, None


def _inverse(scales: Tensor) -> Tensor:
    inverse = 1 / scales
    # A scale so small is 0 in fp16 as well.
    return inverse.masked_fill_(inverse.isinf(), 0)


_Rule = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor | None]]
_RULES = MappingProxyType[str, tuple[_Rule, int]](
    {
        "q4_0": (_codes_of_halves, 8),
        "q4_1": (_codes_of_ranges, 15),
        "q5_0": (_codes_of_halves, 16),
        "q5_1": (_codes_of_ranges, 31),
        "q8_0": (_codes_of_bytes, 127),
    }
)
# The names of the formats that `quantize` knows.
QUANTIZERS = tuple(_RULES)


def quantize(weight: Tensor, to: BlockFormat) -> Quantized:
    """Returns `weight` ([outputs, inputs] of a floating dtype) in the format `to`, one of `QUANTIZERS`.

    Raises `ValueError` on inputs that are no multiple of the group, and on values that are not finite or too large for
    fp16 scales.
    """
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"{inputs} inputs are no multiple of {GROUP}, as {to.name} wants them")
    rule, steps = _RULES[to.name]
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // GROUP, dtype=torch.float16)
    mins = torch.empty_like(scales) if to.mins else None
    for first in range(0, outputs, rows := max(1, _CHUNK // max(1, inputs))):
        chunk = slice(first, first + rows)
        chosen, scale, low = rule(weight[chunk].float().view(-1, GROUP), steps)
        codes[chunk] = chosen.view(-1, inputs)
        scales[chunk] = scale.view(-1, inputs // GROUP)
        if mins is not None and low is not None:
            mins[chunk] = low.view(-1, inputs // GROUP)
    if not (scales.isfinite().all() and (mins is None or mins.isfinite().all())):
        raise ValueError(f"values that are not finite, or too large for the fp16 scales of {to.name}")
    return Quantized(FORMATS[to.name], codes, scales, mins)
