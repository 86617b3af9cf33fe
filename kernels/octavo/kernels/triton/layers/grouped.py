"""Multiplies rows by the weights of the experts that they were sent to: y[i] = W[e(i)] x[i] + b[e(i)].

Rows are sorted by expert in tensors whose shapes do not depend on the routing, and a program finds out on the device
which expert's rows it computes: nothing waits for the host, and a step may be captured. Rows are read from where they
lie and written to where they belong, so no sorted copy of them is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.devices import HOPPER, shared_limit, shared_memory
from octavo.kernels.triton.language import POINTERS, block_for, dot, rounded
from octavo.kernels.triton.layers.output_tiles import OutputTile, smallest

_PIECE = 64
_FP32_PIECE = 32


# By the rows that an expert has on average: the first tile that has room for them, else the last.
_TILES = (OutputTile(64, 16, 4, 4), OutputTile(64, 64, 4, 4), OutputTile(128, 128, 8, 3))
# Registers hold no more in fp32.
_FP32_TILES = (OutputTile(64, 16, 4, 3), OutputTile(64, 32, 4, 3))


@dataclass(frozen=True, slots=True)
class Routing:
    """Holds which rows go to which expert, on the device.

    `order`: [rows] int64, the numbers of the rows, sorted by expert; `starts`: [experts + 1] int32, where the rows of
    each begin in `order`. Rows from `starts[-1]` on go to none.
    """

    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> "Routing":
        """Sorts the rows by `experts` ([rows], 0 to `num_experts` - 1; more: none)."""
        sorted_experts, order = torch.sort(experts, stable=True)
        wanted = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
        return cls(order, torch.searchsorted(sorted_experts, wanted, out_int32=True))

    @property
    def num_rows(self) -> int:
        return len(self.order)

    @property
    def num_experts(self) -> int:
        return len(self.starts) - 1


@triton.jit
def _tile_of(starts, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns the expert of this program's tile, the place in the order where its rows begin, and where they end.

    Tiles of the experts follow each other; programs beyond the last tile have none (their rows end where they begin).
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    mask = experts < num_experts
    first = tl.load(starts + experts, mask, other=0)
    last = tl.load(starts + experts + 1, mask, other=0)
    tiles = (last - first + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    mine = mask & (ends - tiles <= tile) & (tile < ends)
    expert = tl.sum(tl.where(mine, experts, 0), 0)
    begin = tl.sum(tl.where(mine, first + (tile - ends + tiles) * ROWS, 0), 0)
    end = tl.sum(tl.where(mine, last, 0), 0)
    return expert, begin, tl.minimum(end, begin + ROWS)


@triton.jit(do_not_specialize=["num_experts"])
def _grouped_kernel(
    inputs,
    weight,
    bias,
    output,
    order,
    starts,
    num_experts,
    num_outputs,
    num_inputs,
    inputs_stride,
    expert_stride,
    output_stride,
    input_stride,
    copies,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    EXPERTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Computes one tile: some outputs of some rows of one expert. Row i is the inputs' row i // `copies`; an expert's
    weight has `output_stride` from output to output, and `input_stride` from input to input."""
    expert, begin, end = _tile_of(starts, num_experts, ROWS, EXPERTS)
    if begin >= end:
        return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    output_mask = outputs < num_outputs
    places = begin + tl.arange(0, ROWS)
    row_mask = places < end
    rows = tl.load(order + places, row_mask, other=0)
    piece = tl.arange(0, PIECE)
    weight_tile = weight + expert.to(tl.int64) * expert_stride
    weight_tile += outputs.to(tl.int64)[:, None] * output_stride + piece.to(tl.int64)[None, :] * input_stride
    input_tile = inputs + (rows // copies)[None, :] * inputs_stride + piece[:, None]
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for start in range(0, num_inputs, PIECE):
        if WHOLE:
            left = tl.load(weight_tile, output_mask[:, None], other=0.0)
            right = tl.load(input_tile, row_mask[None, :], other=0.0)
        else:
            there = start + piece < num_inputs
            left = tl.load(weight_tile, output_mask[:, None] & there[None, :], other=0.0)
            right = tl.load(input_tile, row_mask[None, :] & there[:, None], other=0.0)
        total = dot(left, right, total)
        weight_tile += PIECE * input_stride
        input_tile += PIECE
    if bias is not None:
        added = tl.load(bias + expert.to(tl.int64) * num_outputs + outputs, output_mask, other=0.0)
        total += added.to(tl.float32)[:, None]
    target = output + rows[None, :] * num_outputs + outputs[:, None]
    tl.store(target, rounded(total, output.dtype.element_ty), output_mask[:, None] & row_mask[None, :])


def grouped_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    *,
    copies: int = 1,
    transposed: bool = False,
) -> Tensor:
    """Returns the products of each row with the weight of its expert, [rows, outputs], in the rows' own order.

    `inputs` are [rows / `copies`, inputs]: each stands for so many rows that follow each other. `weight` is [experts,
    outputs, inputs], or [experts, inputs, outputs] if it is `transposed`; `bias` [experts, outputs] or None. All are of
    one dtype (bf16, fp16 or fp32). Rows of no expert are zeros. Raises `ValueError` on arguments that do not fit.
    """
    _check(inputs, weight, bias, routing, copies=copies, transposed=transposed)
    num_experts, num_outputs, num_inputs = weight.mT.shape if transposed else weight.shape
    output = torch.zeros((routing.num_rows, num_outputs), dtype=inputs.dtype, device=inputs.device)
    if not output.numel():
        return output
    tile = fitted(choose_tile(routing.num_rows, num_experts, inputs.dtype), inputs.dtype, shared_memory(inputs.device))
    expert_stride, *strides = weight.mT.stride() if transposed else weight.stride()
    _grouped_kernel[(most_tiles(routing.num_rows, num_experts, tile.tokens), -(-num_outputs // tile.outputs))](
        inputs,
        weight,
        bias,
        output,
        routing.order,
        routing.starts,
        num_experts,
        num_outputs,
        num_inputs,
        inputs.stride(0),
        expert_stride,
        *strides,
        copies,
        **_constants(tile, inputs.dtype, num_experts, num_inputs),
        num_warps=tile.num_warps,
        num_stages=tile.loads,
    )
    return output


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Returns the tiles that rows have at most, however they are shared out: each expert's last one may be cut."""
    return min(num_rows, num_rows // tile_rows + num_experts)


def choose_tile(num_rows: int, num_experts: int, dtype: torch.dtype) -> OutputTile:
    """Returns the smallest tile with room for the rows of an expert that has its even share, or else the largest."""
    return smallest(_FP32_TILES if dtype == torch.float32 else _TILES, -(-num_rows // num_experts))


def fitted(tile: OutputTile, dtype: torch.dtype, shared: int) -> OutputTile:
    """Returns the tile with as many pieces on their way as `shared` bytes have room for."""
    return tile.fitted(_piece(dtype) * dtype.itemsize * (tile.outputs + tile.tokens), shared)


def _piece(dtype: torch.dtype) -> int:
    return _FP32_PIECE if dtype == torch.float32 else _PIECE


def _constants(tile: OutputTile, dtype: torch.dtype, num_experts: int, num_inputs: int) -> dict[str, int | bool]:
    return {
        "OUTPUTS": tile.outputs,
        "ROWS": tile.tokens,
        "PIECE": _piece(dtype),
        "EXPERTS": block_for(num_experts),
        "WHOLE": num_inputs % _piece(dtype) == 0,
    }


def _check(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, *, copies: int, transposed: bool
) -> None:
    if weight.dim() != 3 or inputs.dim() != 2 or inputs.shape[1] != weight.shape[1 if transposed else 2]:
        raise ValueError(f"inputs {list(inputs.shape)} for weights {list(weight.shape)}")
    if inputs.dtype not in POINTERS or weight.dtype != inputs.dtype:
        raise ValueError(f"inputs of {inputs.dtype} and weights of {weight.dtype}; both are bf16, fp16 or fp32")
    if inputs.stride(1) != 1 or (bias is not None and not bias.is_contiguous()):
        raise ValueError(f"rows have gaps: strides {inputs.stride()}, or the bias has")
    if len(weight) != routing.num_experts or len(inputs) * copies != routing.num_rows:
        raise ValueError(
            f"{routing.num_rows} rows to {routing.num_experts} experts are sent; there are {len(inputs)} inputs"
            f" {copies} times and {len(weight)} weights"
        )
    outputs = weight.shape[2 if transposed else 1]
    if bias is not None and not (bias.shape == (len(weight), outputs) and bias.dtype == inputs.dtype):
        raise ValueError(f"a bias {list(bias.shape)} {bias.dtype} for weights {list(weight.shape)} {weight.dtype}")


def variants(capability: int = HOPPER) -> Iterator[Variant]:
    """Yields every tile in bf16 for 128 experts, and other dtypes and layouts in some tiles."""
    shared, bf16 = shared_limit(capability), torch.bfloat16
    for tile in _TILES:
        yield _variant(tile, bf16, shared)
    for tile in (_TILES[0], _TILES[-1]):
        yield _variant(tile, bf16, shared, experts=32, inputs=2880, transposed=True, biased=True)
    yield _variant(_TILES[-1], torch.float16, shared, experts=8)
    for tile in _FP32_TILES:
        yield _variant(tile, torch.float32, shared, experts=8, inputs=100)


def _variant(
    tile: OutputTile,
    dtype: torch.dtype,
    shared: int,
    *,
    experts: int = 128,
    inputs: int = 2048,
    transposed: bool = False,
    biased: bool = False,
) -> Variant:
    tile = fitted(tile, dtype, shared)
    said = f"{POINTERS[dtype][1:]}{' transposed' * transposed}{' biased' * biased}"
    strides = ("inputs_stride", "expert_stride", "output_stride", "input_stride")
    return Variant(
        name=f"grouped {tile.outputs}x{tile.tokens} {said} {experts} experts {inputs} inputs",
        kernel=_grouped_kernel,
        signature={
            **dict.fromkeys(("inputs", "weight", "bias", "output"), POINTERS[dtype]),
            "order": "*i64",
            "starts": "*i32",
            **dict.fromkeys(("num_experts", "num_outputs", "num_inputs", *strides, "copies"), "i32"),
        },
        constants={
            **_constants(tile, dtype, experts, inputs),
            **({} if biased else {"bias": None}),
            # A stride of one is a constant wherever it is launched.
            ("output_stride" if transposed else "input_stride"): 1,
        },
        num_warps=tile.num_warps,
        num_stages=tile.loads,
        aligned=frozenset(("num_outputs", "num_inputs", *strides)) if inputs % 16 == 0 else frozenset(),
    )
