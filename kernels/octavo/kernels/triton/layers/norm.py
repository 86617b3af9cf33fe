"""Computes RMSNorm (Zhang and Sennrich, 2019), alone and fused with the residual addition before it.

One program computes one row, in an order that follows from the row's size: a row's bits do not depend on the others.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.language import POINTERS, block_for, rounded

# A program holds a whole row in registers.
MAX_SIZE = 16384


@triton.jit
def _normed(values, weight, eps, dims, mask, SIZE: tl.constexpr):
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    return values * inverse * tl.load(weight + dims, mask, other=0.0)


@triton.jit
def _norm_kernel(
    hidden,
    update,
    output,
    weight,
    update_weight,
    hidden_stride,
    update_stride,
    output_stride,
    eps,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds and norms one row. Without an `update` it only norms, without a `weight` it only adds; an `update_weight`
    norms the update before it is added."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < SIZE
    hidden_row = hidden + row * hidden_stride + dims
    values = tl.load(hidden_row, mask, other=0.0).to(tl.float32)
    if update is not None:
        added = tl.load(update + row * update_stride + dims, mask, other=0.0).to(tl.float32)
        if update_weight is not None:
            added = _normed(added, update_weight, eps, dims, mask, SIZE)
            added = rounded(added, update.dtype.element_ty).to(tl.float32)
        total = rounded(values + scale * added, hidden.dtype.element_ty)
        tl.store(hidden_row, total, mask)
        values = total.to(tl.float32)
    if weight is not None:
        normed = _normed(values, weight, eps, dims, mask, SIZE)
        tl.store(output + row * output_stride + dims, rounded(normed, output.dtype.element_ty), mask)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Returns x / rms(x) * weight of each row of `hidden` ([tokens, size]; bf16, fp16 or fp32), in its dtype, computed
    in fp32.

    `weight`: [size] fp32. `out` may be `hidden` itself; None: a new tensor. Raises `ValueError` on arguments that do
    not fit.
    """
    _check_rows("hidden", hidden, hidden)
    _check_weight(weight, hidden)
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format) if out is None else out
    _check_rows("out", output, hidden)
    _launch(hidden, None, output, weight, None, eps, 1.0)
    return output


def add_rms_norm(
    residual: Tensor,
    update: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    scale: float = 1.0,
    update_weight: Tensor | None = None,
) -> Tensor:
    """Adds `scale` * `update` to `residual`, in place and rounded to its dtype, and returns the norm of the rounded
    sum.

    `residual`, `update`: [tokens, size] of one dtype; `weight`: [size] fp32, None: there is no norm, and `residual`
    itself is returned. `update_weight` ([size] fp32): the update is normed with it, and rounded, before it is added.
    Raises `ValueError` on arguments that do not fit.
    """
    _check_rows("residual", residual, residual)
    _check_rows("update", update, residual)
    for given in (weight, update_weight):
        if given is not None:
            _check_weight(given, residual)
    output = residual if weight is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    _launch(residual, update, output, weight, update_weight, eps, scale)
    return output


def _launch(
    hidden: Tensor,
    update: Tensor | None,
    output: Tensor,
    weight: Tensor | None,
    update_weight: Tensor | None,
    eps: float,
    scale: float,
) -> None:
    tokens, size = hidden.shape
    if not tokens:
        return
    _norm_kernel[(tokens,)](
        hidden,
        update,
        output,
        weight,
        update_weight,
        hidden.stride(0),
        0 if update is None else update.stride(0),
        output.stride(0),
        eps,
        scale,
        SIZE=size,
        BLOCK=block_for(size),
        num_warps=_num_warps(size),
    )


def _num_warps(size: int) -> int:
    """Returns the warps that give each thread two loads of 16 bytes, but at least one warp and no more than a program
    may have."""
    return max(1, min(16, block_for(size) // 512))


def _check_rows(name: str, rows: Tensor, like: Tensor) -> None:
    if not (rows.dim() == 2 and rows.stride(1) == 1 and rows.dtype in POINTERS and 1 <= rows.shape[1] <= MAX_SIZE):
        raise ValueError(
            f"{name} is [tokens, 1 to {MAX_SIZE}] of bf16, fp16 or fp32, rows without gaps,"
            f" not {list(rows.shape)} {rows.dtype} of strides {rows.stride()}"
        )
    if rows.shape != like.shape or rows.dtype != like.dtype:
        raise ValueError(f"{name} is {list(rows.shape)} {rows.dtype}, beside {list(like.shape)} {like.dtype}")


def _check_weight(weight: Tensor, rows: Tensor) -> None:
    if not (weight.shape == rows.shape[1:] and weight.dtype == torch.float32 and weight.is_contiguous()):
        raise ValueError(f"a norm's weight is {list(weight.shape)} {weight.dtype} for rows {list(rows.shape)}")


def variants() -> Iterator[Variant]:
    """Yields norms alone and after additions, with an odd size and the largest."""
    for dtype, size in (("*bf16", 4096), ("*fp16", 5120), ("*fp32", 576), ("*bf16", MAX_SIZE), ("*bf16", 100)):
        yield _variant("norm", dtype, size, absent=("update", "update_weight"))
        yield _variant("add_norm", dtype, size, absent=("update_weight",))
    yield _variant("norm_add", "*bf16", 4096, absent=("weight",))
    yield _variant("norm_add_norm", "*bf16", 2560, absent=())


def _variant(name: str, dtype: str, size: int, absent: tuple[str, ...]) -> Variant:
    strides = ("hidden_stride", "update_stride", "output_stride")
    return Variant(
        name=f"{name} {dtype[1:]} {size}",
        kernel=_norm_kernel,
        signature={
            **dict.fromkeys(("hidden", "update", "output"), dtype),
            **dict.fromkeys(("weight", "update_weight"), "*fp32"),
            **dict.fromkeys(strides, "i32"),
            **dict.fromkeys(("eps", "scale"), "fp32"),
        },
        constants={"SIZE": size, "BLOCK": block_for(size), **dict.fromkeys(absent)},
        num_warps=_num_warps(size),
        aligned=frozenset(strides) if size % 16 == 0 else frozenset(),
    )
