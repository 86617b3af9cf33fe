"""The weights of single linear layers as compressed-tensors, GPTQ, AWQ and transformers store them, unpacked without
loss.

The layouts: https://github.com/vllm-project/compressed-tensors (compressors), https://github.com/AutoGPTQ/AutoGPTQ
(QuantLinear), https://github.com/casper-hansen/AutoAWQ (WQLinear_GEMM). In all of them a value is scale * (code - zero
point), and codes of 4 or 8 bits lie in int32 from the lowest bits up; or it is scale * a number of e4m3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.kernels.quantized import FORMATS, GROUP, Quantized
from octavo.worker.loading.quantization_config import Layout, Packing
from octavo.worker.loading.weights import WeightsError

# The outputs that AWQ puts into an int32, from the lowest bits up.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Parts:
    """Names the tensors of a layer: those of codes, scales and zero points; the order of inputs; and those that do not
    change the weight."""

    codes: str
    scales: str
    zeros: str
    order: str
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.codes, self.scales, self.zeros, self.order, *self.others


# Scales of activations are of no use here: they are quantised anew for every group of inputs, which is finer.
_ACTIVATIONS = ("input_scale", "input_zero_point")
# Names of a layer's scale of all inputs, where there is one.
_INPUTS = ("input_scale", "activation_scale")
_GPTQ = Parts("qweight", "scales", "qzeros", "g_idx")
PARTS = MappingProxyType[Layout, Parts](
    {
        "int-quantized": Parts("weight", "weight_scale", "weight_zero_point", "weight_g_idx", _ACTIVATIONS),
        "pack-quantized": Parts(
            "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", ("weight_shape", *_ACTIVATIONS)
        ),
        "float-quantized": Parts("weight", "weight_scale", "weight_zero_point", "weight_g_idx", _INPUTS),
        "fp8": Parts("weight", "weight_scale_inv", "weight_zero_point", "weight_g_idx", _INPUTS),
        "gptq": _GPTQ,
        "awq": _GPTQ,
    }
)


def weight_shape(packing: Packing, codes: tuple[int, ...]) -> tuple[int, int]:
    """Returns (outputs, inputs) of a layer whose codes are stored as a tensor of shape `codes`. Raises
    `ValueError`."""
    first, second = codes
    each = _WORD_BITS // packing.bits
    match packing.layout:
        case "int-quantized" | "float-quantized" | "fp8":
            return first, second
        case "pack-quantized":
            return first, second * each
        case "gptq":
            return second, first * each
        case "awq":
            return second * each, first


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Reads the weight of the layer called `module`, [outputs, inputs], of `packing`.

    `take` reads the stored tensor of a name and shape; `shapes` are those of all that are stored.
    """

    module: str
    packing: Packing
    shape: tuple[int, int]
    shapes: Mapping[str, tuple[int, ...]]
    take: Callable[[str, tuple[int, ...]], Tensor]

    def read(self) -> Quantized:
        """Reads all tensors of the layer. Raises `WeightsError`, which names the tensor that is not right."""
        outputs, inputs = self.shape
        if self.packing.floats:
            return self._floats(outputs, inputs)
        groups, rest = divmod(inputs, self.packing.group or inputs)
        if rest or inputs % GROUP:
            raise WeightsError(
                f"{self.module} has {inputs} inputs, no multiple of {self.packing.group or GROUP}, the inputs of a"
                " group"
            )
        self._check_order(inputs)
        scales = self._scales(outputs, groups)
        codes = self._codes()
        if not self.packing.symmetric:
            zeros = self._zeros(outputs, groups)
            wide = scales.float()
            return Quantized(FORMATS["int4"], codes, wide, -wide * zeros)
        self._check_symmetric(outputs, groups)
        return _symmetric(codes, scales, self.packing.bits)

    def _floats(self, outputs: int, inputs: int) -> Quantized:
        """Returns a weight of 8-bit floats, of whose blocks each output has the scales for itself."""
        if inputs % GROUP:
            raise WeightsError(f"{self.module} has {inputs} inputs, no multiple of {GROUP}")
        group, together = self.packing.group or inputs, self.packing.outputs
        scales = self._scales(-(-outputs // together), -(-inputs // group)).float()
        # The last block may end beyond the weight, and so may its groups.
        each = group if inputs % group == 0 else math.gcd(group, inputs)
        of_outputs = scales.repeat_interleave(together, dim=0)[:outputs] if len(scales) != outputs else scales
        places = torch.arange(0, inputs, each) // group
        return Quantized(FORMATS["fp8"], self._codes(), of_outputs[:, places].contiguous())

    @property
    def _parts(self) -> Parts:
        return PARTS[self.packing.layout]

    def _take(self, part: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        name = f"{self.module}.{part}"
        tensor = self.take(name, shape)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise WeightsError(f"tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')}; it must be {wanted}")
        return tensor

    def _stored(self, part: str) -> tuple[int, ...] | None:
        return self.shapes.get(f"{self.module}.{part}")

    def _scales(self, outputs: int, groups: int) -> Tensor:
        """Returns the scales, [outputs, groups], in their stored dtype."""
        part, floats = self._parts.scales, (torch.float16, torch.bfloat16, torch.float32)
        if self.packing.layout in ("gptq", "awq"):
            scales = self._take(part, (groups, outputs), *floats).t()
        elif self.packing.group is None and self._stored(part) in ((), (1,)):
            scales = self._take(part, self._stored(part) or (), *floats).reshape(1, 1).expand(outputs, 1)
        elif self.packing.group is None and self._stored(part) == (outputs,):
            scales = self._take(part, (outputs,), *floats)[:, None]
        else:
            scales = self._take(part, (outputs, groups), *floats)
        if not scales.isfinite().all():
            raise WeightsError(f"tensor '{self.module}.{part}' has scales that are not finite")
        return scales.contiguous()

    def _codes(self) -> Tensor:
        """Returns the codes, [outputs, inputs] uint8."""
        outputs, inputs = self.shape
        part, bits = self._parts.codes, self.packing.bits
        words = _WORD_BITS // bits
        match self.packing.layout:
            case "int-quantized":
                stored = self._take(part, self.shape, torch.int8).view(torch.uint8).bitwise_xor_(0x80)
                return stored if bits == 8 else self._narrow(stored)
            case "pack-quantized":
                return unpacked(self._take(part, (outputs, inputs // words), torch.int32), bits)
            case "gptq":
                return unpacked(self._take(part, (inputs // words, outputs), torch.int32).t(), bits)
            case "awq":
                packed = unpacked(self._take(part, (inputs, outputs // words), torch.int32), bits)
                return _awq_ordered(packed).t().contiguous()
            case "float-quantized" | "fp8":
                return self._take(part, self.shape, torch.float8_e4m3fn).view(torch.uint8)

    def _narrow(self, codes: Tensor) -> Tensor:
        """Returns 4-bit codes of bytes that hold them."""
        low, high = codes.aminmax()
        if low < 120 or high > 135:
            raise WeightsError(f"tensor '{self.module}.{self._parts.codes}' has values beyond 4 bits")
        return codes - 120

    def _zeros(self, outputs: int, groups: int) -> Tensor:
        """Returns the zero points, [outputs, groups]: what a code that stands for zero would be."""
        part, bits, step = self._parts.zeros, self.packing.bits, self.packing.zero_step
        words = _WORD_BITS // bits
        match self.packing.layout:
            case "int-quantized":
                shape = self._stored(part) if self._stored(part) in ((), (1,), (outputs,)) else (outputs, groups)
                stored = self._take(part, shape or (), torch.int8)
                return (stored.short() + (1 << bits - 1)).reshape(-1, groups).expand(outputs, groups)
            case "pack-quantized":
                packed = self._take(part, (math.ceil(outputs / words), groups), torch.int32).t()
                zeros = unpacked(packed, bits)[:, :outputs]
            case "gptq":
                zeros = unpacked(self._take(part, (groups, math.ceil(outputs / words)), torch.int32), bits)[:, :outputs]
            case "awq":
                zeros = _awq_ordered(unpacked(self._take(part, (groups, outputs // words), torch.int32), bits))
        if step and int(zeros.max()) + step >= 1 << bits:
            raise WeightsError(
                f"tensor '{self.module}.{part}' has zero points of {(1 << bits) - 1}, to which {step} is added, beyond"
                f" what {bits} bits count to: readers disagree on what is meant; take another checkpoint"
            )
        return zeros.t() + step

    def _check_symmetric(self, outputs: int, groups: int) -> None:
        """Checks that zero points, where they are stored all the same, are in the middle."""
        if self._stored(self._parts.zeros) is None:
            return
        if (self._zeros(outputs, groups) != 1 << self.packing.bits - 1).any():
            raise WeightsError(
                f"tensor '{self.module}.{self._parts.zeros}' has zero points, and quantization_config says that there"
                " are none (symmetric)"
            )

    def _check_order(self, inputs: int) -> None:
        part = self._parts.order
        if self._stored(part) is None:
            return
        order = self._take(part, (inputs,), torch.int32, torch.int64)
        if (order != torch.arange(inputs) // (self.packing.group or inputs)).any():
            raise WeightsError(
                f"tensor '{self.module}.{part}' puts inputs into groups that are not neighbours (activation order,"
                " desc_act), which is not served; take a checkpoint without it, or a GGUF file of the model"
            )


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the codes (uint8) of `bits` in each of `words` ([rows, n] int32), from the lowest up, row by row."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).view(len(codes), -1)


def _awq_ordered(codes: Tensor) -> Tensor:
    """Returns `codes` ([rows, outputs], as they lie in int32) in the order of the outputs."""
    places = torch.tensor([_AWQ_ORDER.index(output) for output in range(len(_AWQ_ORDER))])
    return codes.view(len(codes), -1, len(_AWQ_ORDER))[..., places].view(codes.shape)


def _symmetric(codes: Tensor, scales: Tensor, bits: int) -> Quantized:
    """Returns the weight in a format of GGUF files, whose fp16 scales are the stored ones, where that takes no more
    memory; else with scales in fp32."""
    times = codes.shape[1] // GROUP // scales.shape[1]
    # Scales are fp32, and so are the mins that 4 bits take.
    wide_bytes = 4 if bits == 8 else 8
    if scales.dtype == torch.float16 and 2 * times <= wide_bytes:
        return Quantized(FORMATS["q8_0" if bits == 8 else "q4_0"], codes, scales.repeat_interleave(times, dim=1))
    wide = scales.float()
    if bits == 8:
        return Quantized(FORMATS["int8"], codes, wide)
    return Quantized(FORMATS["int4"], codes, wide, wide * -8)
