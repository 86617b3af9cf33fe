"""Computes linear layers whose rows do not depend on how many rows there are: to the last bit.

Each element is one sum over the inputs, in one order: pieces of `_PIECE` inputs one after the other, by the same matrix
instruction of 64 rows and 16 inputs whatever the tile (tiles are at least as high, and a warp group computes 64 rows of
them). So tiles may follow from the number of rows, and nothing else may: no sum is split between programs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.devices import HOPPER, shared_limit, shared_memory
from octavo.kernels.triton.language import POINTERS, dot, rounded

# Inputs that are added up at a time. Another number for another tile would be another order.
_PIECE = 64
_FP32_PIECE = 32
# Rows of tiles whose programs follow each other: they share weights in the L2 cache.
_TILES_TOGETHER = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class Tile:
    """Describes one program's part of the result, `rows` x `columns`, its warps, and the `loads` of the inputs that are
    under way at once."""

    rows: int
    columns: int
    num_warps: int
    loads: int


# From the largest, which re-reads least, to the smallest, of which there are most. Shared memory: (rows + columns) *
# piece * 2 bytes * loads. Of all but the first, two programs fit a multiprocessor: one computes while one loads.
_TILES = (Tile(128, 256, 8, 4), Tile(128, 128, 4, 3), Tile(64, 128, 4, 4), Tile(64, 64, 4, 6))
# Its programs read little of the weights at a time and all of the rows: only few rows are worth that.
_NARROW_TILE, _NARROW_ROWS = Tile(64, 32, 4, 8), 32
_FP32_TILE = Tile(64, 64, 4, 3)
# Fewer programs than this leave much of a GPU idle (an H200 has 132 multiprocessors).
_ENOUGH_PROGRAMS = 96


def choose_tile(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tile:
    """Returns the largest tile that keeps a GPU busy with a result of `num_rows` x `num_columns`."""
    if dtype == torch.float32:
        return _FP32_TILE
    for tile in _TILES:
        half_empty = 2 * num_rows <= tile.rows and tile.rows > 64
        if not half_empty and _num_programs(tile, num_rows, num_columns) >= _ENOUGH_PROGRAMS:
            return tile
    return _NARROW_TILE if num_rows <= _NARROW_ROWS else _TILES[-1]


def fitted(tile: Tile, dtype: torch.dtype, shared: int) -> Tile:
    """Returns the tile with as many pieces on their way as `shared` bytes have room for: that changes no bit."""
    piece = _FP32_PIECE if dtype == torch.float32 else _PIECE
    loads = shared // ((tile.rows + tile.columns) * piece * dtype.itemsize)
    return replace(tile, loads=max(1, min(tile.loads, loads)))


def _num_programs(tile: Tile, num_rows: int, num_columns: int) -> int:
    return -(-num_rows // tile.rows) * -(-num_columns // tile.columns)


@triton.jit
def _tile_place(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns row and column of this program's tile; programs go down through some rows of tiles, then one column
    on."""
    program = tl.program_id(0)
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    band = program // (_TILES_TOGETHER * across)
    first = band * _TILES_TOGETHER
    height = tl.minimum(down - first, _TILES_TOGETHER)
    within = program % (_TILES_TOGETHER * across)
    return first + within % height, within // height


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    inputs,
    weight,
    bias,
    output,
    num_rows,
    num_columns,
    num_inputs,
    inputs_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Computes one tile of the result. `WHOLE`: `num_inputs` is a multiple of `PIECE`."""
    row_tile, column_tile = _tile_place(num_rows, num_columns, ROWS, COLUMNS)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    piece = tl.arange(0, PIECE)
    row_mask, column_mask = (rows < num_rows)[:, None], (columns < num_columns)[None, :]
    input_tile = inputs + rows.to(tl.int64)[:, None] * inputs_stride + piece[None, :]
    weight_tile = weight + columns.to(tl.int64)[None, :] * weight_stride + piece[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, num_inputs, PIECE):
        if WHOLE:
            left = tl.load(input_tile, row_mask, other=0.0)
            right = tl.load(weight_tile, column_mask, other=0.0)
        else:
            left = tl.load(input_tile, row_mask & (start + piece < num_inputs)[None, :], other=0.0)
            right = tl.load(weight_tile, column_mask & (start + piece < num_inputs)[:, None], other=0.0)
        total = dot(left, right, total)
        input_tile += PIECE
        weight_tile += PIECE
    if bias is not None:
        total += tl.load(bias + columns, columns < num_columns, other=0.0).to(tl.float32)[None, :]
    target = output + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(target, rounded(total, output.dtype.element_ty), row_mask & column_mask)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_float: bool = False) -> Tensor:
    """Returns x W^T + b, [tokens, out], of `inputs` ([tokens, in]), `weight` ([out, in]) and `bias` ([out]), all of one
    dtype (bf16, fp16 or fp32).

    Products are added up in fp32 and rounded once, to that dtype, or not at all if `out_float`. A row's bits do not
    depend on the other rows, nor on how many there are. Raises `ValueError` on arguments that do not fit.
    """
    _check(inputs, weight, bias)
    num_rows, num_inputs, num_columns = *inputs.shape, len(weight)
    dtype = torch.float32 if out_float else inputs.dtype
    output = torch.empty((num_rows, num_columns), dtype=dtype, device=inputs.device)
    if not output.numel():
        return output
    tile = fitted(choose_tile(num_rows, num_columns, inputs.dtype), inputs.dtype, shared_memory(inputs.device))
    _linear_kernel[(_num_programs(tile, num_rows, num_columns),)](
        inputs,
        weight,
        bias,
        output,
        num_rows,
        num_columns,
        num_inputs,
        inputs.stride(0),
        weight.stride(0),
        **_constants(tile, inputs.dtype, num_inputs),
        num_warps=tile.num_warps,
        num_stages=tile.loads,
    )
    return output


def _constants(tile: Tile, dtype: torch.dtype, num_inputs: int) -> dict[str, int | bool]:
    piece = _FP32_PIECE if dtype == torch.float32 else _PIECE
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "PIECE": piece, "WHOLE": num_inputs % piece == 0}


def _check(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not (inputs.dim() == 2 and weight.dim() == 2 and inputs.shape[1] == weight.shape[1]):
        raise ValueError(f"inputs {list(inputs.shape)} for a weight {list(weight.shape)}")
    if inputs.dtype not in POINTERS or weight.dtype != inputs.dtype:
        raise ValueError(f"inputs of {inputs.dtype} and a weight of {weight.dtype}; both are bf16, fp16 or fp32")
    if not (inputs.stride(1) == weight.stride(1) == 1 and (bias is None or bias.is_contiguous())):
        raise ValueError(f"rows have gaps: strides {inputs.stride()} and {weight.stride()}, or the bias has")
    if bias is not None and not (
        bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_contiguous()
    ):
        raise ValueError(f"a bias {list(bias.shape)} {bias.dtype} for a weight {list(weight.shape)} {weight.dtype}")


def variants(capability: int = HOPPER) -> Iterator[Variant]:
    """Yields every tile in bf16, and the other dtypes and shapes in some tiles."""
    shared, bf16, fp16 = shared_limit(capability), torch.bfloat16, torch.float16
    for tile in (*_TILES, _NARROW_TILE):
        yield _variant(tile, bf16, 4096, shared)
    yield _variant(_NARROW_TILE, bf16, 4096, shared, biased=True)
    yield _variant(_NARROW_TILE, bf16, 4096, shared, out_float=True)
    yield _variant(_TILES[0], fp16, 4096, shared, biased=True)
    yield _variant(_TILES[-1], fp16, 4096, shared)
    yield _variant(_TILES[1], bf16, 4112, shared, out_float=True)
    yield _variant(_TILES[-1], bf16, 4095, shared, out_float=True)
    yield _variant(_FP32_TILE, torch.float32, 4096, shared)
    yield _variant(_FP32_TILE, torch.float32, 100, shared, biased=True)


def _variant(
    tile: Tile, dtype: torch.dtype, num_inputs: int, shared: int, *, biased: bool = False, out_float: bool = False
) -> Variant:
    tile = fitted(tile, dtype, shared)
    strides = ("inputs_stride", "weight_stride")
    said = f"{POINTERS[dtype][1:]}{' biased' * biased}{' to fp32' * out_float}"
    return Variant(
        name=f"linear {tile.rows}x{tile.columns} {said} {num_inputs} inputs",
        kernel=_linear_kernel,
        signature={
            **dict.fromkeys(("inputs", "weight", "bias"), POINTERS[dtype]),
            "output": "*fp32" if out_float else POINTERS[dtype],
            **dict.fromkeys(("num_rows", "num_columns", "num_inputs", *strides), "i32"),
        },
        constants={**_constants(tile, dtype, num_inputs), **({} if biased else {"bias": None})},
        num_warps=tile.num_warps,
        num_stages=tile.loads,
        aligned=frozenset(("num_columns", "num_inputs", *strides)) if num_inputs % 16 == 0 else frozenset(),
        requires_wgmma=dtype != torch.float32,
    )
