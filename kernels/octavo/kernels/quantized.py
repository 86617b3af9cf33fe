"""Weights in blocks of small integers with scales: their formats, and what any of them is as numbers.

The formats are those of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and, with scales in
fp32 of any width, those of compressed-tensors, GPTQ and AWQ. Values here lie one code to a byte, so that tensors can be
cut and joined; how kernels lay them out is the kernels' affair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

# Inputs that share a scale in most formats, and that kernels take together in all.
GROUP = 32
# Inputs of a k-quant's block, whose groups have small integers as scales.
BLOCK = 256


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Describes a format: a value is scale * (code - offset) + min, or scale * values[code] where `values` are given.

    Codes have `bits` bits, and are numbers of e4m3 themselves with `floats`. `group` inputs share a scale; 0: each
    tensor says how many. Scales are fp16; with `blocks` they are integers (uint8, of `group` 16 int8), which one fp16
    for each `BLOCK` inputs multiplies; where `group` is 0 they are fp32. `mins`: groups have mins too.
    """

    name: str
    bits: int
    offset: int = 0
    group: int = GROUP
    blocks: bool = False
    mins: bool = False
    values: tuple[int, ...] | None = None
    floats: bool = False

    @property
    def unit(self) -> int:
        """Returns the least number of inputs that can be cut off: those of a block, or else of a group."""
        return BLOCK if self.blocks else GROUP


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

FORMATS = MappingProxyType(
    {
        each.name: each
        for each in (
            BlockFormat("q4_0", 4, offset=8),
            BlockFormat("q4_1", 4, mins=True),
            BlockFormat("q5_0", 5, offset=16),
            BlockFormat("q5_1", 5, mins=True),
            BlockFormat("q8_0", 8, offset=128),
            BlockFormat("iq4_nl", 4, values=_IQ4_NL),
            BlockFormat("q4_k", 4, blocks=True, mins=True),
            BlockFormat("q5_k", 5, blocks=True, mins=True),
            BlockFormat("q6_k", 6, offset=32, group=16, blocks=True),
            # Of checkpoints that are no GGUF: symmetric 8 bits, 4 bits with zero points as mins, and floats.
            BlockFormat("int8", 8, offset=128, group=0),
            BlockFormat("int4", 4, group=0, mins=True),
            BlockFormat("fp8", 8, group=0, floats=True),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Holds a weight [outputs, inputs] of `format`.

    `codes` are uint8 [outputs, inputs]. `scales` and, where the format has them, `mins` are [outputs, groups]: fp16;
    uint8 (of groups of 16 int8) in blocks, whose fp16 factors are `block_scales` and `block_mins`, [outputs, blocks];
    or fp32 in groups of as many inputs as divide `inputs` into them. In blocks, mins are taken away: the value is
    block_scale * scale * code - block_min * min. Raises `ValueError` on tensors that do not fit each other.
    """

    format: BlockFormat
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None
    block_scales: Tensor | None = None
    block_mins: Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if inputs % self.format.unit:
            raise ValueError(f"{inputs} inputs are no multiple of {self.format.unit}, as {self.format.name} wants them")
        groups = self.scales.shape[1] if self.format.group == 0 else inputs // self.format.group
        if inputs % groups or (inputs // groups) % (self.format.group or GROUP):
            raise ValueError(f"{groups} groups for {inputs} inputs of {self.format.name}")
        blocks = (outputs, inputs // BLOCK)
        small = (torch.int8 if self.format.group < GROUP else torch.uint8) if self.format.blocks else torch.float16
        dtype = torch.float32 if self.format.group == 0 else small
        for name, wanted, shape, kind in (
            ("codes", True, (outputs, inputs), torch.uint8),
            ("scales", True, (outputs, groups), dtype),
            ("mins", self.format.mins, (outputs, groups), dtype),
            ("block_scales", self.format.blocks, blocks, torch.float16),
            ("block_mins", self.format.blocks and self.format.mins, blocks, torch.float16),
        ):
            tensor = getattr(self, name)
            if (tensor is not None) != wanted:
                raise ValueError(f"{self.format.name} {'wants' if wanted else 'has no'} {name}")
            if tensor is not None and (tensor.shape != shape or tensor.dtype != kind):
                raise ValueError(
                    f"{name} {list(tensor.shape)} {tensor.dtype} of {self.format.name}: {list(shape)} {kind}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (outputs, inputs)."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def group(self) -> int:
        """Returns how many inputs share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def rows(self, which: Tensor | slice) -> Self:
        """Returns the outputs that `which` names, in its order."""
        return self._with({name: tensor[which] for name, tensor in self.tensors().items()})

    def columns(self, which: range) -> Self:
        """Returns the inputs `which`. Where they begin or end inside of a group, its parts have its scale.

        Raises `ValueError` where they cut the least unit of the format.
        """
        unit = self.format.unit
        if which.start % unit or which.stop % unit:
            raise ValueError(f"inputs {which.start} to {which.stop} cut a group of {unit}")
        inputs, group = self.codes.shape[1], self.group
        within = which.start // group == (which.stop - 1) // group
        # The inputs that share a scale in what is cut out of fp32 scales.
        left = len(which) if within else math.gcd(group, which.start, which.stop)
        cut = {}
        for name, tensor in self.tensors().items():
            each = inputs // tensor.shape[1]
            if self.format.group or each == 1:
                cut[name] = tensor[:, which.start // each : which.stop // each]
            else:
                cut[name] = tensor[:, torch.arange(which.start, which.stop, left) // each]
        return self._with(cut)

    def dequantize(self) -> Tensor:
        """Returns the values, [outputs, inputs] fp32, each rounded as seldom as fp32 allows."""
        scales, mins = self.scales.float(), None if self.mins is None else self.mins.float()
        if self.block_scales is not None:
            scales = scales * _repeated(self.block_scales.float(), scales)
        if self.block_mins is not None and mins is not None:
            mins = -mins * _repeated(self.block_mins.float(), mins)
        codes = self.codes.float() - self.format.offset
        if self.format.values is not None:
            codes = torch.tensor(self.format.values, dtype=torch.float32, device=self.codes.device)[self.codes.int()]
        if self.format.floats:
            codes = self.codes.view(torch.float8_e4m3fn).float()
        values = codes * _repeated(scales, codes)
        return values if mins is None else values + _repeated(mins, codes)

    def to(self, device: torch.device) -> Self:
        """Returns the same weight on `device`."""
        return self._with({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that the format has, by their names."""
        pairs = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return {name: value for name, value in pairs if isinstance(value, Tensor)}

    def contiguous(self) -> Self:
        """Returns the same weight with tensors without gaps."""
        return self._with({name: tensor.contiguous() for name, tensor in self.tensors().items()})

    def _with(self, tensors: dict[str, Tensor]) -> Self:
        changed: dict[str, Any] = dict(tensors)
        return replace(self, **changed)


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """Returns the outputs of all `parts`, one after the other. Raises `ValueError` where formats or groups differ."""
    first = parts[0]
    if any(part.format is not first.format or part.group != first.group for part in parts):
        raise ValueError(f"weights of {', '.join(part.format.name for part in parts)} are no single weight")
    joined: dict[str, Any] = {name: torch.cat([part.tensors()[name] for part in parts]) for name in first.tensors()}
    return replace(first, **joined)


def _repeated(few: Tensor, like: Tensor) -> Tensor:
    """Returns `few` ([outputs, n]) with each column as often as `like` ([outputs, n * times]) has more of them."""
    return few.repeat_interleave(like.shape[1] // few.shape[1], dim=1)
