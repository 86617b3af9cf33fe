"""Multiplies by weights in e4m3, rows of inputs rounded to e4m3 too: y = x W^T + b.

A row's scale, or that of each group of its inputs, is its largest value / 448. A weight has a scale for each output, or
for each output and group of inputs. `torch._scaled_mm` multiplies where scales are those of whole rows and the card and
the type allow it, and else a kernel whose sums of 128 inputs are added in fp32, each with its scales.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.devices import HOPPER, shared_limit, shared_memory
from octavo.kernels.triton.language import POINTERS, block_for, cached, dot, rounded
from octavo.kernels.triton.layers.output_tiles import OutputTile, check_linear, smallest

logger = logging.getLogger(__name__)

_LARGEST, _LARGEST_FP32 = tl.constexpr(448.0), tl.constexpr(3.4028234663852886e38)
# Inputs that are added up before their sum is multiplied by its scales: a matrix unit keeps fewer bits than fp32.
_PIECE = 128
# Inputs that a program rounds at a time.
_ROUNDED = 1024
# torch's product takes inputs and outputs in multiples of so many.
_SCALED_ITEMS = 16

# By the tokens of a step, as those of `octavo.kernels.triton.layers.packed`.
_TILES = (OutputTile(64, 16, 4, 5), OutputTile(64, 64, 4, 4), OutputTile(128, 128, 8, 3))


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """Holds a weight on a device: `values` are [outputs, inputs] e4m3, `scales` [groups, outputs] fp32."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Quantized) -> Self:
        """Raises `ValueError` on a weight of another format."""
        if not weight.format.floats:
            raise ValueError(f"a weight of {weight.format.name} is not one of e4m3")
        return cls(weight.codes.contiguous().view(torch.float8_e4m3fn), weight.scales.t().contiguous())

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    @property
    def group(self) -> int:
        """Returns how many inputs share a scale."""
        return self.inputs // len(self.scales)

    def dequantize(self) -> Tensor:
        """Returns the values, [outputs, inputs] fp32."""
        return self.values.float() * self.scales.t().repeat_interleave(self.group, dim=1)


@triton.jit
def _round_kernel(inputs, values, scales, num_inputs, inputs_stride, group, num_groups, BLOCK: tl.constexpr):
    """Rounds one group of one row's inputs."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = place * group, (place + 1) * group
    source = inputs + row * inputs_stride
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, end, BLOCK):
        items = start + tl.arange(0, BLOCK)
        sizes = tl.abs(tl.load(source + items, items < end, other=0.0).to(tl.float32))
        # NaN is no larger than anything: it counts as an infinity.
        largest = tl.maximum(largest, tl.where(sizes <= _LARGEST_FP32, sizes, float("inf")))
    most = tl.max(largest, 0)
    # A group of zeros has a scale all the same; one that is not finite has NaN, so that its row stays visibly so.
    bounded = tl.div_rn(tl.minimum(tl.maximum(most, 1e-12), _LARGEST_FP32), _LARGEST)
    tl.store(scales + row * num_groups + place, tl.where(most <= _LARGEST_FP32, bounded, float("nan")))
    for start in range(first, end, BLOCK):
        items = start + tl.arange(0, BLOCK)
        numbers = tl.load(source + items, items < end, other=0.0).to(tl.float32)
        tl.store(values + row * num_inputs + items, cached(numbers, bounded, tl.float8e4nv), items < end)


def round_rows(inputs: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns `inputs` ([tokens, inputs]) in e4m3, and the scales of their groups, [tokens, groups] fp32.

    A group with NaN or an infinity has NaN as its scale.
    """
    num_tokens, num_inputs = inputs.shape
    num_groups = num_inputs // group
    values = torch.empty((num_tokens, num_inputs), dtype=torch.float8_e4m3fn, device=inputs.device)
    scales = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=inputs.device)
    _round_kernel[(num_tokens, num_groups)](
        inputs, values, scales, num_inputs, inputs.stride(0), group, num_groups, **_round_constants(group)
    )
    return values, scales


def _round_constants(group: int) -> dict[str, int]:
    block = min(_ROUNDED, block_for(group))
    return {"BLOCK": block, "num_warps": 4 if block > _PIECE else 1}


@triton.jit(do_not_specialize=["num_tokens"])
def _float8_kernel(
    inputs,
    input_scales,
    weight,
    weight_scales,
    bias,
    output,
    num_tokens,
    num_outputs,
    num_inputs,
    group,
    num_groups,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
    GROUPED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Computes one tile of the result. `GROUPED`: pieces have scales of their own; `WHOLE`: `num_inputs` is a multiple
    of a piece."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    piece = tl.arange(0, PIECE)
    output_mask, token_mask = outputs < num_outputs, tokens < num_tokens
    weight_tile = weight + outputs.to(tl.int64)[:, None] * num_inputs + piece[None, :]
    input_tile = inputs + tokens.to(tl.int64)[None, :] * num_inputs + piece[:, None]
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
    for start in range(0, num_inputs, PIECE):
        if WHOLE:
            left = tl.load(weight_tile + start, output_mask[:, None], other=0.0)
            right = tl.load(input_tile + start, token_mask[None, :], other=0.0)
        else:
            there = start + piece < num_inputs
            left = tl.load(weight_tile + start, output_mask[:, None] & there[None, :], other=0.0)
            right = tl.load(input_tile + start, token_mask[None, :] & there[:, None], other=0.0)
        product = dot(left, right, tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32))
        if GROUPED:
            place = start // group
            of_outputs = tl.load(weight_scales + place * num_outputs + outputs, output_mask, other=0.0)
            of_tokens = tl.load(input_scales + tokens.to(tl.int64) * num_groups + place, token_mask, other=0.0)
            product *= of_outputs[:, None] * of_tokens[None, :]
        total += product
    if not GROUPED:
        of_outputs = tl.load(weight_scales + outputs, output_mask, other=0.0)
        of_tokens = tl.load(input_scales + tokens, token_mask, other=0.0)
        total *= of_outputs[:, None] * of_tokens[None, :]
    if bias is not None:
        total += tl.load(bias + outputs, output_mask, other=0.0).to(tl.float32)[:, None]
    target = output + tokens.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(target, rounded(total, output.dtype.element_ty), output_mask[:, None] & token_mask[None, :])


def float8_linear(inputs: Tensor, weight: Float8Weight, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T + b, [tokens, outputs], of `inputs` ([tokens, inputs] in bf16, fp16 or fp32) in their dtype, and
    `bias` ([outputs]) in it too. Nothing waits for the device. Raises `ValueError` on arguments that do not fit.
    """
    check_linear(inputs, (weight.outputs, weight.inputs), weight.values.device, bias)
    if not len(inputs):
        return inputs.new_empty((0, weight.outputs))
    values, scales = round_rows(inputs, weight.group)
    if _takes_scaled(inputs.dtype, weight) and scaled_products_available(inputs.device):
        found: Tensor = torch._scaled_mm(
            values, weight.values.t(), scale_a=scales, scale_b=weight.scales, bias=bias, out_dtype=inputs.dtype
        )
        return found
    return _by_kernel(values, scales, weight, bias, inputs.dtype)


def _takes_scaled(dtype: torch.dtype, weight: Float8Weight) -> bool:
    """Tells whether torch's product takes such a weight: CUDA's, with scales of rows, gives bf16 alone."""
    fits = weight.outputs % _SCALED_ITEMS == 0 and weight.inputs % _SCALED_ITEMS == 0
    return dtype == torch.bfloat16 and fits and len(weight.scales) == 1


@lru_cache
def scaled_products_available(device: torch.device) -> bool:
    """Tells whether this torch multiplies rows of e4m3 by their scales on `device`.

    The operation is private to torch, and which cards and versions have it changes: it is tried once on real numbers.
    """
    ones = torch.ones(32, 32, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.arange(1, 33, dtype=torch.float32, device=device)
    try:
        found = torch._scaled_mm(
            ones, ones.t(), scale_a=scales[:, None], scale_b=scales[None, :], out_dtype=torch.bfloat16
        )
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        logger.info("Octavo's own kernel multiplies by e4m3 on %s: %s", device, error)
        return False
    return torch.equal(found, (32 * scales[:, None] * scales[None, :]).bfloat16())


def _by_kernel(values: Tensor, scales: Tensor, weight: Float8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    num_tokens, num_outputs = len(values), weight.outputs
    output = torch.empty((num_tokens, num_outputs), dtype=dtype, device=values.device)
    tile = fitted(smallest(_TILES, num_tokens), shared_memory(values.device))
    _float8_kernel[(-(-num_outputs // tile.outputs), -(-num_tokens // tile.tokens))](
        values,
        scales,
        weight.values,
        weight.scales,
        bias,
        output,
        num_tokens,
        num_outputs,
        weight.inputs,
        weight.group,
        len(weight.scales),
        **_constants(tile, weight.inputs, weight.group),
        num_warps=tile.num_warps,
        num_stages=tile.loads,
    )
    return output


def fitted(tile: OutputTile, shared: int) -> OutputTile:
    """Returns the tile with as many pieces on their way as `shared` bytes have room for."""
    return tile.fitted((tile.outputs + tile.tokens) * _PIECE, shared)


def _constants(tile: OutputTile, inputs: int, group: int) -> dict[str, int | bool]:
    grouped = group < inputs
    piece = math.gcd(group, _PIECE) if grouped else _PIECE
    whole = inputs % piece == 0
    return {"OUTPUTS": tile.outputs, "TOKENS": tile.tokens, "PIECE": piece, "GROUPED": grouped, "WHOLE": whole}


def variants(capability: int = HOPPER) -> Iterator[Variant]:
    """Yields every tile with groups of 128 inputs and without, and other groups and dtypes in some tiles."""
    shared, bf16 = shared_limit(capability), torch.bfloat16
    for group, dtype in ((128, bf16), (4096, bf16), (4096, torch.float16), (128, torch.float32)):
        yield Variant(
            name=f"fp8: round {POINTERS[dtype][1:]} in groups of {group}",
            kernel=_round_kernel,
            signature={
                "inputs": POINTERS[dtype],
                "values": "*fp8e4nv",
                "scales": "*fp32",
                **dict.fromkeys(("num_inputs", "inputs_stride", "group", "num_groups"), "i32"),
            },
            constants={"BLOCK": _round_constants(group)["BLOCK"]},
            num_warps=_round_constants(group)["num_warps"],
            num_stages=3,
            aligned=frozenset(("num_inputs", "inputs_stride", "group")),
        )
    for tile in _TILES:
        yield _variant(tile, bf16, 4096, 128, shared)
        yield _variant(tile, bf16, 4096, 4096, shared)
    yield _variant(_TILES[0], bf16, 4128, 4128, shared, biased=True)
    yield _variant(_TILES[-1], torch.float16, 4096, 64, shared, biased=True)
    yield _variant(_TILES[1], torch.float32, 4096, 128, shared)


def _variant(
    tile: OutputTile, dtype: torch.dtype, inputs: int, group: int, shared: int, *, biased: bool = False
) -> Variant:
    tile = fitted(tile, shared)
    grouped = f" groups of {group}" if group < inputs else ""
    return Variant(
        name=f"fp8 {tile.outputs}x{tile.tokens} to {POINTERS[dtype][1:]}{' biased' * biased} {inputs} inputs{grouped}",
        kernel=_float8_kernel,
        signature={
            **dict.fromkeys(("inputs", "weight"), "*fp8e4nv"),
            **dict.fromkeys(("input_scales", "weight_scales"), "*fp32"),
            **dict.fromkeys(("bias", "output"), POINTERS[dtype]),
            **dict.fromkeys(("num_tokens", "num_outputs", "num_inputs", "group", "num_groups"), "i32"),
        },
        constants={**_constants(tile, inputs, group), **({} if biased else {"bias": None})},
        num_warps=tile.num_warps,
        num_stages=tile.loads,
        aligned=frozenset(("num_outputs", "num_inputs", "group")),
        requires_wgmma=True,
    )
