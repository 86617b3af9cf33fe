"""Computes the gate of a gated MLP, activation(gate) * up, in one pass."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.language import POINTERS, rounded

# By the names that config.json gives them.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")

_BLOCK = 1024
# sqrt(1/2), and 2 * sqrt(2/pi), for the two forms of GELU (Hendrycks and Gimpel, 2016).
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _sigmoid(x):
    # No exponential of what is above zero: none overflows.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * _sigmoid(x)
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    # (1 + tanh(y / 2)) / 2 is the sigmoid of y.
    return x * _sigmoid((x + 0.044715 * x * x * x) * _TWICE_SQRT_2_OVER_PI)


@triton.jit
def _gate_kernel(gate_up, output, gate_up_stride, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + size + columns, mask, other=0.0).to(tl.float32)
    gated = _activated(gate, ACTIVATION) * up
    tl.store(output + row * size + columns, rounded(gated, output.dtype.element_ty), mask)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Returns activation(gate) * up, [tokens, n], of `gate_up` ([tokens, 2 * n]: gate, then up; bf16, fp16 or fp32).

    The kernel computes in fp32 and rounds once; torch's operations round the activation's result too. Raises
    `ValueError` on another shape or dtype, and on an `activation` that is not one of `ACTIVATIONS`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{activation!r} is none of the activations {', '.join(ACTIVATIONS)}")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1 or gate_up.dtype not in POINTERS:
        raise ValueError(f"gate and up are [tokens, 2 * n], not {list(gate_up.shape)} {gate_up.dtype}")
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens and size:
        grid = (tokens, -(-size // _BLOCK))
        _gate_kernel[grid](gate_up, output, gate_up.stride(0), size, ACTIVATION=activation, BLOCK=_BLOCK)
    return output


def variants() -> Iterator[Variant]:
    """Yields each activation in each dtype, and rows of an odd size."""
    for activation in ACTIVATIONS:
        for dtype in POINTERS.values():
            yield _variant(activation, dtype, aligned=True)
    yield _variant("silu", "*bf16", aligned=False)


def _variant(activation: str, dtype: str, *, aligned: bool) -> Variant:
    sizes = ("gate_up_stride", "size")
    return Variant(
        name=f"gate {activation} {dtype[1:]}{'' if aligned else ' odd'}",
        kernel=_gate_kernel,
        signature={**dict.fromkeys(("gate_up", "output"), dtype), **dict.fromkeys(sizes, "i32")},
        constants={"ACTIVATION": activation, "BLOCK": _BLOCK},
        aligned=frozenset(sizes) if aligned else frozenset(),
    )
