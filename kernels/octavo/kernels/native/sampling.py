"""Choosing tokens takes weights and sums of rows of logits, with the same bits on every instruction set."""

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary

# The neighbouring ids whose weights are first added up together, in fp32; as in the kernel.
SPAN = 256
# Fewer logits are not worth waking threads for.
_FEW = 8 * SPAN


def weigh(library: NativeLibrary, logits: Tensor, largest: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e^((logit - largest) / divisor) of each of `logits`, [rows, size] fp32, and its sums over every `SPAN`
    neighbours, [rows, spans] fp64.

    `logits`: [rows, size] fp32 without gaps, on the CPU, none above its row's `largest` and none a NaN; `largest` and
    `divisors`: [rows] fp32. Raises `ValueError` on others.
    """
    rows, size = logits.shape
    given = (logits, largest, divisors)
    if any(each.dtype != torch.float32 or not each.is_contiguous() for each in given) or not size:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not rows of fp32 without gaps")
    if largest.shape != (rows,) or divisors.shape != (rows,):
        raise ValueError(f"{list(largest.shape)} largest and {list(divisors.shape)} divisors for {rows} rows")
    weights, sums = torch.empty_like(logits), torch.empty(rows, -(-size // SPAN), dtype=torch.float64)
    library.functions.octavo_weigh(
        logits.data_ptr(),
        rows,
        size,
        largest.data_ptr(),
        divisors.data_ptr(),
        weights.data_ptr(),
        sums.data_ptr(),
        _threads(logits),
    )
    return weights, sums


def softcap(library: NativeLibrary, logits: Tensor, cap: float) -> Tensor:
    """Bounds `logits` to cap * tanh(logits / cap), in place, and returns them; fp32 without gaps, on the CPU. Raises
    `ValueError` on others."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not fp32 without gaps")
    library.functions.octavo_softcap(logits.data_ptr(), logits.numel(), cap, _threads(logits))
    return logits


def _threads(logits: Tensor) -> int:
    return torch.get_num_threads() if logits.numel() > _FEW else 1
