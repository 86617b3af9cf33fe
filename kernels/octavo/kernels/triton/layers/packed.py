"""Multiplies by weights of 4 bits that stay so in memory: y = x W^T + b.

A product of a group's inputs takes codes less 8, whole numbers that bf16 and fp16 hold exactly, and is multiplied by
the group's scale in fp32: no weight is ever rounded. What is left of zero points and mins is a number for each group,
times the sum of its inputs.

Outputs are the rows of the matrix instruction: a weight goes from memory through registers into it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quantized import FORMATS, BlockFormat, Quantized
from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.devices import HOPPER, multiprocessors, shared_limit, shared_memory
from octavo.kernels.triton.language import INTERPRETED, POINTERS, dot, rounded
from octavo.kernels.triton.layers.output_tiles import OutputTile, check_linear, smallest

# What is taken off a code before it is multiplied, so that codes are small on both sides of zero.
_MIDDLE = 8
# Outputs that a packed weight is padded to: no tile has more.
_PANEL = 128
# Rows that are added up by a program where inputs are split.
_COMBINED = 1024


# By the tokens of a step: the first tile that has room for all, else the last. Of the small ones many fit a
# multiprocessor, and what they read is what takes their time.
_TILES = (OutputTile(64, 16, 4, 4), OutputTile(64, 32, 4, 4), OutputTile(64, 64, 4, 4), OutputTile(128, 128, 8, 3))
# Registers hold no more in fp32.
_FP32_TILES = _TILES[:2]
# Programs that a multiprocessor is to have for its memory to be busy; pieces that a program has at least.
_PROGRAMS_EACH, _LEAST_PIECES = 4, 4


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """Holds a weight [outputs, inputs] of 4 bits on a device.

    `codes` are [pieces, padded outputs, half] uint8: a piece of 2 * half inputs has those of its first half in the low
    bits, and those of its second in the high ones. `scales` and, unless all are zero, `shifts` are [groups, padded
    outputs]; a value is scale * (code - 8) + shift. `group` inputs share a scale.
    """

    outputs: int
    inputs: int
    group: int
    codes: Tensor
    scales: Tensor
    shifts: Tensor | None

    @classmethod
    def of(cls, weight: Quantized) -> Self:
        """Packs `weight` where it lies. Raises `ValueError` on a format that `obstacle` names a reason against."""
        if reason := obstacle(weight.format):
            raise ValueError(reason)
        outputs, inputs = weight.shape
        group, scales, shifts = _groups(weight)
        half = half_of(group)
        pieces, padding = -(-inputs // (2 * half)), -outputs % _PANEL
        codes = torch.nn.functional.pad(weight.codes, (0, pieces * 2 * half - inputs, 0, padding))
        low, high = codes.view(outputs + padding, pieces, 2, half).permute(2, 1, 0, 3)
        # A last piece without a group of its own multiplies by zeros, whatever its scale is.
        missing = -(-(pieces * 2 * half) // group) - scales.shape[1]

        def laid(numbers: Tensor) -> Tensor:
            return torch.nn.functional.pad(numbers, (0, missing, 0, padding)).t().contiguous()

        kept = laid(shifts) if shifts.any() else None
        return cls(outputs, inputs, group, (low | high << 4).contiguous(), laid(scales), kept)

    @property
    def half(self) -> int:
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        """Returns how much memory the weight takes."""
        return sum(each.nbytes for each in (self.codes, self.scales, self.shifts) if each is not None)

    def dequantize(self) -> Tensor:
        """Returns the values, [outputs, inputs] fp32."""
        both = torch.stack((self.codes & 0xF, self.codes >> 4)).permute(2, 1, 0, 3)
        codes = both.reshape(both.shape[0], -1)[: self.outputs, : self.inputs].float() - _MIDDLE

        def spread(numbers: Tensor) -> Tensor:
            return numbers.t().float().repeat_interleave(self.group, dim=1)[: self.outputs, : self.inputs]

        values = codes * spread(self.scales)
        return values if self.shifts is None else values + spread(self.shifts)


def obstacle(form: BlockFormat) -> str | None:
    """Returns why the kernel does not multiply by weights of `form`; None if it does."""
    if not _is_served(form):
        served = ", ".join(name for name, each in FORMATS.items() if _is_served(each))
        return f"a GPU multiplies by {served} as they are, not by {form.name}"
    return None


def _is_served(form: BlockFormat) -> bool:
    return form.bits == 4 and not form.blocks and form.values is None


def half_of(group: int) -> int:
    """Returns half of the inputs of a piece: a product has no more inputs than share a scale."""
    return 64 if group % 64 == 0 else 32


def _groups(weight: Quantized) -> tuple[int, Tensor, Tensor]:
    """Returns the inputs that share a scale, scales and shifts, [outputs, groups], in as few groups as hold them."""
    scales = weight.scales
    shifts = scales.float() * (_MIDDLE - weight.format.offset)
    if weight.mins is not None:
        shifts = shifts + weight.mins.float()
    group = weight.group
    # Files of groups of 128 come as groups of 32 where that is smaller on a CPU.
    while scales.shape[1] % 2 == 0 and group < 128 and _paired(scales) and _paired(shifts):
        scales, shifts, group = scales[:, ::2], shifts[:, ::2], 2 * group
    return group, scales, shifts


def _paired(numbers: Tensor) -> bool:
    return torch.equal(numbers[:, ::2], numbers[:, 1::2])


@triton.jit
def _centred(codes, dtype: tl.constexpr):
    """Returns codes of 4 bits less 8 in `dtype`, exactly."""
    if INTERPRETED or dtype == tl.float32:
        values = codes.to(tl.float32) - 8.0
    elif dtype == tl.bfloat16:
        # 128 and more has steps of 1 in bf16: a code is the last bits of 128 + code.
        values = ((codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0).to(dtype)
    else:
        values = ((codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0).to(dtype)
    return values


@triton.jit(do_not_specialize=["num_tokens", "pieces_each"])
def _packed_kernel(
    inputs,
    codes,
    scales,
    shifts,
    bias,
    output,
    num_tokens,
    num_outputs,
    padded_outputs,
    num_inputs,
    inputs_stride,
    group,
    pieces_each,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Computes one tile of the result, or of the sum over `pieces_each` pieces of inputs.

    `TOGETHER`: both halves of a piece have the same scale; `WHOLE`: `num_inputs` is a multiple of a piece.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    half = tl.arange(0, HALF)
    split = tl.program_id(2)
    first = split * pieces_each
    last = tl.minimum(first + pieces_each, tl.cdiv(num_inputs, 2 * HALF))
    token_mask = (tokens < num_tokens)[None, :]
    dtype = inputs.dtype.element_ty
    code_tile = codes + first.to(tl.int64) * padded_outputs * HALF + outputs[:, None] * HALF + half[None, :]
    input_tile = inputs + tokens.to(tl.int64)[None, :] * inputs_stride + half[:, None]
    total = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
    for piece in range(first, last):
        start = piece * 2 * HALF
        packed = tl.load(code_tile)
        if WHOLE:
            low = tl.load(input_tile + start, token_mask, other=0.0)
            high = tl.load(input_tile + start + HALF, token_mask, other=0.0)
        else:
            low = tl.load(input_tile + start, token_mask & (start + half < num_inputs)[:, None], other=0.0)
            high_mask = token_mask & (start + HALF + half < num_inputs)[:, None]
            high = tl.load(input_tile + start + HALF, high_mask, other=0.0)
        zeros = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
        place = (start // group) * padded_outputs + outputs
        product = dot(_centred(packed & 0xF, dtype), low, zeros)
        if TOGETHER:
            product = dot(_centred(packed >> 4, dtype), high, product)
            total += tl.load(scales + place).to(tl.float32)[:, None] * product
            if shifts is not None:
                sums = tl.sum(low.to(tl.float32), 0) + tl.sum(high.to(tl.float32), 0)
                total += tl.load(shifts + place)[:, None] * sums[None, :]
        else:
            next_place = ((start + HALF) // group) * padded_outputs + outputs
            second = dot(_centred(packed >> 4, dtype), high, zeros)
            total += tl.load(scales + place).to(tl.float32)[:, None] * product
            total += tl.load(scales + next_place).to(tl.float32)[:, None] * second
            if shifts is not None:
                total += tl.load(shifts + place)[:, None] * tl.sum(low.to(tl.float32), 0)[None, :]
                total += tl.load(shifts + next_place)[:, None] * tl.sum(high.to(tl.float32), 0)[None, :]
        code_tile += padded_outputs * HALF
    if bias is not None:
        total += tl.load(bias + outputs, outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    row = split.to(tl.int64) * num_tokens + tokens
    target = output + row[None, :] * num_outputs + outputs[:, None]
    tl.store(target, rounded(total, output.dtype.element_ty), (outputs < num_outputs)[:, None] & token_mask)


@triton.jit(do_not_specialize=["num_values", "num_splits"])
def _combine_kernel(parts, bias, output, num_values, num_outputs, num_splits, VALUES: tl.constexpr):
    """Adds up what splits of the inputs gave, in their order."""
    places = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    mask = places < num_values
    total = tl.zeros((VALUES,), dtype=tl.float32)
    part = parts + places
    for _ in range(num_splits):
        total += tl.load(part, mask, other=0.0)
        part += num_values
    if bias is not None:
        total += tl.load(bias + places % num_outputs, mask, other=0.0).to(tl.float32)
    tl.store(output + places, rounded(total, output.dtype.element_ty), mask)


def packed_linear(inputs: Tensor, weight: FourBitWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T + b, [tokens, outputs], of `inputs` ([tokens, inputs] in bf16, fp16 or fp32) in their dtype, and
    `bias` ([outputs]) in it too.

    Sums are fp32. Nothing waits for the device. Raises `ValueError` on arguments that do not fit.
    """
    check_linear(inputs, (weight.outputs, weight.inputs), weight.codes.device, bias)
    num_tokens = len(inputs)
    output = torch.empty((num_tokens, weight.outputs), dtype=inputs.dtype, device=inputs.device)
    if not output.numel():
        return output
    tile = fitted(smallest(_tiles(inputs.dtype), num_tokens), weight.half, inputs.dtype, shared_memory(inputs.device))
    pieces = len(weight.codes)
    across, down = -(-weight.outputs // tile.outputs), -(-num_tokens // tile.tokens)
    splits, pieces_each = choose_splits(across * down, pieces, multiprocessors(inputs.device))
    parts = output if splits == 1 else torch.empty((splits, *output.shape), dtype=torch.float32, device=inputs.device)
    _packed_kernel[(across, down, splits)](
        inputs,
        weight.codes,
        weight.scales,
        weight.shifts,
        bias if splits == 1 else None,
        parts,
        num_tokens,
        weight.outputs,
        weight.codes.shape[1],
        weight.inputs,
        inputs.stride(0),
        weight.group,
        pieces_each,
        **_constants(tile, weight.half, together=weight.group % (2 * weight.half) == 0, inputs=weight.inputs),
        num_warps=tile.num_warps,
        num_stages=tile.loads,
    )
    if splits > 1:
        _combine_kernel[(-(-output.numel() // _COMBINED),)](
            parts, bias, output, output.numel(), weight.outputs, splits, VALUES=_COMBINED
        )
    return output


def _tiles(dtype: torch.dtype) -> tuple[OutputTile, ...]:
    return _FP32_TILES if dtype == torch.float32 else _TILES


def choose_splits(num_programs: int, pieces: int, processors: int) -> tuple[int, int]:
    """Returns into how many parts the inputs are cut so that a device of so many `processors` is busy, and the pieces
    of each."""
    wanted = max(1, min(_PROGRAMS_EACH * processors // num_programs, pieces // _LEAST_PIECES))
    each = -(-pieces // wanted)
    return -(-pieces // each), each


def fitted(tile: OutputTile, half: int, dtype: torch.dtype, shared: int) -> OutputTile:
    """Returns the tile with as many pieces on their way as `shared` bytes have room for, one of them as it is
    multiplied."""
    piece = tile.outputs * half + 2 * half * tile.tokens * dtype.itemsize
    return tile.fitted(piece, shared - 2 * tile.outputs * half * dtype.itemsize)


def _constants(tile: OutputTile, half: int, *, together: bool, inputs: int) -> dict[str, Any]:
    whole = inputs % (2 * half) == 0
    return {"OUTPUTS": tile.outputs, "TOKENS": tile.tokens, "HALF": half, "TOGETHER": together, "WHOLE": whole}


def variants(capability: int = HOPPER) -> Iterator[Variant]:
    """Yields every tile in bf16 for groups of 128, and other groups, dtypes and shapes in some tiles."""
    shared, bf16, fp16 = shared_limit(capability), torch.bfloat16, torch.float16
    for tile in _TILES:
        yield _variant(tile, bf16, 128, shared)
    for tile in (_TILES[0], _TILES[-1]):
        yield _variant(tile, bf16, 128, shared, shifted=True)
        yield _variant(tile, bf16, 32, shared, shifted=True)
        yield _variant(tile, fp16, 128, shared, shifted=True, biased=True)
    for tile in _FP32_TILES:
        yield _variant(tile, torch.float32, 128, shared)
    yield _variant(_TILES[0], bf16, 64, shared)
    yield _variant(_TILES[0], bf16, 128, shared, split=True)
    yield _variant(_TILES[1], bf16, 32, shared, inputs=4128, split=True, shifted=True)
    for biased in (False, True):
        yield Variant(
            name=f"packed: combine{' biased' * biased}",
            kernel=_combine_kernel,
            signature={
                "parts": "*fp32",
                **dict.fromkeys(("bias", "output"), POINTERS[bf16]),
                **dict.fromkeys(("num_values", "num_outputs", "num_splits"), "i32"),
            },
            constants={"VALUES": _COMBINED, **({} if biased else {"bias": None})},
            num_stages=3,
        )


def _variant(
    tile: OutputTile,
    dtype: torch.dtype,
    group: int,
    shared: int,
    *,
    inputs: int = 4096,
    shifted: bool = False,
    biased: bool = False,
    split: bool = False,
) -> Variant:
    half = half_of(group)
    tile = fitted(tile, half, dtype, shared)
    said = f"{POINTERS[dtype][1:]}{' shifted' * shifted}{' biased' * biased}{' split' * split}"
    absent = {name: None for name, there in (("shifts", shifted), ("bias", biased)) if not there}
    numbers = ("num_tokens", "num_outputs", "padded_outputs", "num_inputs", "inputs_stride", "group", "pieces_each")
    return Variant(
        name=f"packed {tile.outputs}x{tile.tokens} {said} {inputs} inputs groups of {group}",
        kernel=_packed_kernel,
        signature={
            "inputs": POINTERS[dtype],
            "codes": "*u8",
            "scales": "*fp16",
            "shifts": "*fp32",
            "bias": POINTERS[dtype],
            "output": "*fp32" if split else POINTERS[dtype],
            **dict.fromkeys(numbers, "i32"),
        },
        constants={**_constants(tile, half, together=group % (2 * half) == 0, inputs=inputs), **absent},
        num_warps=tile.num_warps,
        num_stages=tile.loads,
        aligned=frozenset(("num_outputs", "padded_outputs", "num_inputs", "inputs_stride", "group")),
    )
