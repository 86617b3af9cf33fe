"""Linear layers: by Octavo's own kernels on the CPU, else by oneDNN's prepacked weights, else by `F.linear`.

Octavo's kernels give a row the same result whatever rows are beside it. The oneDNN operations are private to torch:
they stay in this file and are tried before they are trusted.
"""

import functools
from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.native.library import NativeUnavailable, load
from octavo.kernels.native.linear import NativeLinear
from octavo.kernels.native.structs import Activation

# The batch size oneDNN lays a weight out for. Measured: good from 1 to 64 rows.
_PREPACK_ROWS = 64

# The activations, by the names that config.json gives them.
ACTIVATIONS = MappingProxyType[str, Callable[[Tensor], Tensor]](
    {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh")}
)
_NATIVE_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


class LinearKind(Enum):
    """Names the kernels that multiply."""

    NATIVE = "native"
    ONEDNN = "onednn"
    PLAIN = "plain"


class Weights(NamedTuple):
    """Holds `weight`, [out_features, in_features], and `bias`, [out_features]."""

    weight: Tensor
    bias: Tensor | None


def best_kind(weight: Tensor) -> LinearKind:
    """Returns the fastest kind that this machine has for `weight`."""
    if weight.device.type != "cpu":
        return LinearKind.PLAIN
    matrix_unit = weight.dtype == torch.bfloat16 and _has_matrix_unit()
    if not matrix_unit and _native_takes(weight):
        return LinearKind.NATIVE
    return LinearKind.ONEDNN if prepacking_available(weight.dtype) else LinearKind.PLAIN


def _native_takes(weight: Tensor) -> bool:
    try:
        load()
    except NativeUnavailable:
        return False
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[1] % 2 == 0


@functools.cache
def _has_matrix_unit() -> bool:
    """Tells whether this CPU has a unit for bf16 matrices (AMX), which oneDNN uses and Octavo's kernels do not."""
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
    `kind` is `NATIVE`, and `plain` where it is `PLAIN`, for kernels that multiply in its place.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, kind: LinearKind | None = None) -> None:
        """Takes `weight`, [out_features, in_features], and `bias`, [out_features]. `kind` None: `best_kind`."""
        self.kind = best_kind(weight) if kind is None else kind
        self.native = NativeLinear(load(), weight, bias) if self.kind is LinearKind.NATIVE else None
        self.plain = Weights(weight, bias) if self.kind is LinearKind.PLAIN else None
        self._multiply = self.native or _torch_linear(self.kind, weight, bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs)

    def to_float(self, inputs: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Computes the result in fp32, without rounding it to the weight's dtype before, where a kernel can.

        The result is written to `out`, if given: [tokens, out_features] fp32.
        """
        if self.native:
            return self.native.to_float(inputs, out=out)
        result = self._multiply(inputs)
        return result.float() if out is None else out.copy_(result)


class GatedLinear:
    """Computes activation(gate(x)) * up(x) for x of [tokens, in_features], gate and up fused.

    `native` and `plain` are as in `Linear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, *, kind: LinearKind | None = None) -> None:
        """Takes `weight`, [2 * out_features, in_features], rows of gate, then of up; `activation` is one of
        `ACTIVATIONS`."""
        native = _NATIVE_ACTIVATIONS.get(activation)
        chosen = best_kind(weight) if kind is None else kind
        if chosen is LinearKind.NATIVE and native is None:
            chosen = LinearKind.ONEDNN if prepacking_available(weight.dtype) else LinearKind.PLAIN
        self.kind = chosen
        self.activation = activation
        self.native = NativeLinear(load(), weight, bias, native) if chosen is LinearKind.NATIVE else None
        self.plain = Weights(weight, bias) if chosen is LinearKind.PLAIN else None
        self._multiply = self.native or _torch_linear(chosen, weight, bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        products = self._multiply(inputs)
        if self.native:
            return products
        gate, up = products.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate).mul_(up)


def _torch_linear(kind: LinearKind, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
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
