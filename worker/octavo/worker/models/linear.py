"""Linear layers: by Octavo's own kernels on the CPU, else by oneDNN's prepacked weights, else by `F.linear`.

Quantised weights stay quantised where Octavo's kernels multiply by them, on a CPU or a GPU, and are dequantised
elsewhere.

Octavo's kernels give a row the same result whatever rows are beside it. The oneDNN operations are private to torch:
they stay in this file and are tried before they are trusted.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.native.library import NativeUnavailable, load
from octavo.kernels.native.linear import NativeLinear
from octavo.kernels.native.quantized_linear import NativeQuantizedLinear
from octavo.kernels.native.structs import Activation, LinearOp, QuantizedLinearOp
from octavo.kernels.quantized import BlockFormat, Quantized, stacked
from octavo.worker.models import gpu_linear
from octavo.worker.models.gpu_linear import QuantizedProduct

_CPU = torch.device("cpu")
# The batch size oneDNN lays a weight out for. Measured: good from 1 to 64 rows.
_PREPACK_ROWS = 64

# The activations, by the names that config.json gives them.
ACTIVATIONS = MappingProxyType[str, Callable[[Tensor], Tensor]](
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
    }
)
NATIVE_ACTIVATIONS = MappingProxyType(
    {"silu": Activation.SILU, "gelu": Activation.GELU, "gelu_pytorch_tanh": Activation.GELU_TANH}
)


class LinearKind(Enum):
    """Names the kernels that multiply."""

    NATIVE = "native"
    QUANTIZED = "native quantized"
    GPU_QUANTIZED = "a GPU's quantized"
    ONEDNN = "onednn"
    PLAIN = "plain"


# A weight [out_features, in_features] as it may come, and what multiplies natively by one.
Weight = Tensor | Quantized
NativePart = NativeLinear | NativeQuantizedLinear
NativeOp = LinearOp | QuantizedLinearOp


class Weights(NamedTuple):
    """Holds `weight`, [out_features, in_features], and `bias`, [out_features]."""

    weight: Tensor
    bias: Tensor | None


def best_kind(weight: Tensor) -> LinearKind:
    """Returns the fastest kind that this machine has for `weight`."""
    if weight.device.type != "cpu":
        return LinearKind.PLAIN
    if _native_takes(weight) and not (
        weight.dtype == torch.bfloat16 and _has_matrix_unit() and not _native_has_tiles()
    ):
        return LinearKind.NATIVE
    return LinearKind.ONEDNN if prepacking_available(weight.dtype) else LinearKind.PLAIN


def _native_takes(weight: Tensor) -> bool:
    try:
        load()
    except NativeUnavailable:
        return False
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[1] % 2 == 0


def _native_has_tiles() -> bool:
    """Tells whether Octavo's kernels use the CPU's unit for bf16 matrices; they may be held to another variant."""
    return load().variant == "amx"


@functools.cache
def _has_matrix_unit() -> bool:
    """Tells whether this CPU has a unit for bf16 matrices (AMX), which oneDNN uses."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported and supported())


@functools.cache
def prepacking_available(dtype: torch.dtype) -> bool:
    """Tells whether this torch and this CPU take prepacked weights of `dtype`.

    The operations are private to torch, so they are tried once on real numbers instead of trusted.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    inputs, weight = torch.eye(2, 32, dtype=dtype), torch.ones(32, 32, dtype=dtype)
    try:
        return torch.equal(_prepacked_linear(inputs, _prepack(weight), None), F.linear(inputs, weight))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


class Linear:
    """Computes y = x W^T + b for x of [tokens, in_features].

    Unless `kind` is `PLAIN`, a row of the result does not depend on the number of rows. `native` holds the weight where
    Octavo's kernels multiply, in parts whose outputs stand side by side: several where a quantised weight has several
    formats. `plain` holds it where `kind` is `PLAIN`, for kernels that multiply in its place; `product` is what
    multiplies by it where it stays quantised on a GPU.
    """

    def __init__(
        self, weight: Weight | Sequence[Weight], bias: Tensor | None = None, *, kind: LinearKind | None = None
    ) -> None:
        """Takes `weight`, [out_features, in_features], or parts of its rows, and `bias`, [out_features]. `kind` None:
        `QUANTIZED` or `GPU_QUANTIZED` for what is quantised and can stay so where it lies, else `best_kind`."""
        weights = _joined(weight)
        self.native: tuple[NativePart, ...] = ()
        self.plain: Weights | None = None
        self.product: QuantizedProduct | None = None
        self._multiply: Callable[[Tensor], Tensor]
        quantized, quantized_kind = _quantized(weights)
        if quantized and kind in (None, quantized_kind):
            self.kind = quantized_kind
            if self.kind is LinearKind.GPU_QUANTIZED:
                self._multiply = self.product = QuantizedProduct(quantized, bias)
                return
            ends = list(itertools.accumulate(part.shape[0] for part in quantized))
            biases = [None] * len(ends) if bias is None else bias.tensor_split(ends[:-1])
            pairs = zip(quantized, biases, strict=True)
            self.native = tuple(NativeQuantizedLinear(load(), part, some) for part, some in pairs)
            return
        whole = _dequantized(weights)
        self.kind = best_kind(whole) if kind is None else kind
        if self.kind is LinearKind.NATIVE:
            self.native = (NativeLinear(load(), whole, bias),)
            return
        self.plain = Weights(whole, bias) if self.kind is LinearKind.PLAIN else None
        self._multiply = _torch_linear(self.kind, whole, bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        return _side_by_side([part(inputs) for part in self.native]) if self.native else self._multiply(inputs)

    def to_float(self, inputs: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Computes the result in fp32, without rounding it to the weight's dtype before, where a kernel can.

        The result is written to `out`, if given: [tokens, out_features] fp32.
        """
        if len(self.native) == 1:
            return self.native[0].to_float(inputs, out=out)
        parts = [part.to_float(inputs) for part in self.native]
        result = _side_by_side(parts) if parts else self._multiply(inputs)
        return result.float() if out is None else out.copy_(result)

    def operations(self, *, added: float | None = None) -> list[tuple[int, NativeOp]]:
        """Returns the operations of `native`, each with the place of its outputs in a row; `added` as `NativeLinear.op`
        has it."""
        sizes = [part.outputs for part in self.native]
        places = itertools.accumulate(sizes[:-1], initial=0)
        ops = [part.op(added=added, y_stride=sum(sizes)) for part in self.native]
        return list(zip(places, ops, strict=True))

    def rows(self, which: Tensor) -> Tensor:
        """Returns the rows `which` ([count] int64) of a weight that stayed quantised, [count, in_features] fp32, to the
        bit as `Quantized.dequantize` gives them. Raises `ValueError` on another weight."""
        if len(self.native) != 1 or not isinstance(part := self.native[0], NativeQuantizedLinear):
            raise ValueError(
                f"rows are read from a quantised weight of one format, not from {len(self.native)} of {self.kind.value}"
            )
        return part.unpacked(which).dequantize()


class ActivatedLinear:
    """Computes activation(x W^T + b) for x of [tokens, in_features]. `native` holds the weight where Octavo's kernels
    multiply."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, *, kind: LinearKind | None = None) -> None:
        """Takes `weight`, [out_features, in_features]; `activation` is one of `ACTIVATIONS`."""
        native = NATIVE_ACTIVATIONS.get(activation)
        self._activate = ACTIVATIONS[activation]
        self.native: tuple[NativePart, ...] = ()
        self.kind = best_kind(weight) if kind is None else kind
        if self.kind is LinearKind.NATIVE and native is not None:
            self.native = (NativeLinear(load(), weight, bias, native, gated=False),)
            return
        if self.kind is LinearKind.NATIVE:
            self.kind = LinearKind.PLAIN
        self._multiply = _torch_linear(self.kind, weight, bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.native[0](inputs) if self.native else self._activate(self._multiply(inputs))


class GatedLinear:
    """Computes activation(gate(x)) * up(x) for x of [tokens, in_features], gate and up fused.

    `native`, `plain` and `product` are as in `Linear`; but where gate and up have several formats, `native` holds up,
    then gate.
    """

    def __init__(
        self,
        weight: Weight | Sequence[Weight],
        bias: Tensor | None,
        activation: str,
        *,
        kind: LinearKind | None = None,
    ) -> None:
        """Takes `weight`, [2 * out_features, in_features], rows of gate, then of up, or the two apart; `activation` is
        one of `ACTIVATIONS`."""
        native = NATIVE_ACTIVATIONS.get(activation)
        weights = _joined(weight)
        self.activation = activation
        self.native: tuple[NativePart, ...] = ()
        self.plain: Weights | None = None
        self.product: QuantizedProduct | None = None
        self._multiply: Callable[[Tensor], Tensor]
        quantized, quantized_kind = _quantized(weights)
        if quantized and quantized_kind is LinearKind.GPU_QUANTIZED and kind in (None, quantized_kind):
            self.kind: LinearKind = quantized_kind
            self._multiply = self.product = QuantizedProduct(quantized, bias)
            return
        if quantized and native is not None and kind in (None, LinearKind.QUANTIZED):
            self.kind = LinearKind.QUANTIZED
            self.native = _gated_parts(quantized, bias, native)
            return
        whole = _dequantized(weights)
        chosen = best_kind(whole) if kind is None else kind
        if chosen is LinearKind.NATIVE and native is None:
            chosen = LinearKind.ONEDNN if prepacking_available(whole.dtype) else LinearKind.PLAIN
        self.kind = chosen
        if chosen is LinearKind.NATIVE:
            self.native = (NativeLinear(load(), whole, bias, native),)
            return
        self.plain = Weights(whole, bias) if chosen is LinearKind.PLAIN else None
        self._multiply = _torch_linear(chosen, whole, bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.native:
            gate, up = self._multiply(inputs).chunk(2, dim=-1)
            return ACTIVATIONS[self.activation](gate).mul_(up)
        outputs = self.native[0](inputs)
        for part in self.native[1:]:
            assert isinstance(part, NativeQuantizedLinear), "a gate beside its up is quantised"
            outputs = part.gate(inputs, NATIVE_ACTIVATIONS[self.activation], outputs)
        return outputs

    def operations(self) -> list[tuple[int, NativeOp]]:
        """Returns the operations of `native`, each with the place of its outputs in a row."""
        first, *gates = self.native
        activation = NATIVE_ACTIVATIONS[self.activation]
        ops: list[NativeOp] = [first.op()]
        ops += [gate.op(multiplied=activation) for gate in gates if isinstance(gate, NativeQuantizedLinear)]
        return [(0, op) for op in ops]


def obstacle_to_quantized(device: torch.device = _CPU, form: BlockFormat | None = None) -> str | None:
    """Returns why quantised weights, or those of `form`, cannot stay so in `device`'s memory; None if they can."""
    if gpu_linear.on_gpu(device):
        return gpu_linear.obstacle(device, form)
    if form is not None and form.floats:
        return "no CPU multiplies 8-bit floats"
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None


def _joined(weight: Weight | Sequence[Weight]) -> list[Weight]:
    """Returns `weight` in as few parts as its formats allow, in the order of its rows."""
    parts = [weight] if isinstance(weight, Tensor | Quantized) else list(weight)
    result = list[Weight]()
    for _, several in itertools.groupby(
        parts, lambda part: (part.format.name, part.group) if isinstance(part, Quantized) else None
    ):
        alike = list(several)
        quantized = [part for part in alike if isinstance(part, Quantized)]
        tensors = [part for part in alike if isinstance(part, Tensor)]
        result.append(stacked(quantized) if quantized else torch.cat(tensors) if len(tensors) > 1 else tensors[0])
    return result


def _quantized(weights: list[Weight]) -> tuple[list[Quantized], LinearKind]:
    """Returns `weights` if all of them are quantised and can stay so, else none; and the kind that multiplies by
    them."""
    quantized = [
        each
        for each in weights
        if isinstance(each, Quantized) and not obstacle_to_quantized(each.codes.device, each.format)
    ]
    if not quantized or len(quantized) < len(weights):
        return [], LinearKind.QUANTIZED
    gpu = gpu_linear.on_gpu(quantized[0].codes.device)
    return quantized, LinearKind.GPU_QUANTIZED if gpu else LinearKind.QUANTIZED


def _dequantized(weights: list[Weight]) -> Tensor:
    """Returns all `weights` as one, in the dtype of those that are not quantised."""
    dtype = next((each.dtype for each in weights if isinstance(each, Tensor)), torch.float32)
    numbers = [each.dequantize().to(dtype) if isinstance(each, Quantized) else each for each in weights]
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)


def _gated_parts(weights: list[Quantized], bias: Tensor | None, activation: Activation) -> tuple[NativePart, ...]:
    if len(weights) == 1:
        return (NativeQuantizedLinear(load(), weights[0], bias, activation),)
    gate, up = weights
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    return NativeQuantizedLinear(load(), up, up_bias), NativeQuantizedLinear(load(), gate, gate_bias)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _torch_linear(kind: LinearKind, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if kind in (LinearKind.QUANTIZED, LinearKind.GPU_QUANTIZED):
        raise ValueError(f"a weight {list(weight.shape)} {weight.dtype} is not multiplied as quantised")
    if kind is LinearKind.PLAIN:
        return lambda inputs: F.linear(inputs, weight, bias)
    packed = _prepack(weight)
    return lambda inputs: _invariant_linear(inputs, packed, bias)


def _invariant_linear(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if len(inputs) > 1:
        return _prepacked_linear(inputs, packed, bias)
    # oneDNN multiplies a single row in another order, and so to other last bits, than the same row among others.
    return _prepacked_linear(inputs.expand(2, -1), packed, bias)[:1]


def _prepack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PREPACK_ROWS)
    return packed


def _prepacked_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return outputs
