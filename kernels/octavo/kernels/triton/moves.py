"""Moves whole blocks of keys and values, all layers of all blocks in one launch (paper §5.1, fused block copy)."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ahead import Variant

# Words of 4 bytes that a program moves at a time: four loads of 16 bytes in each of its threads.
_PIECE = 4096
_NUM_WARPS = 8


# Not of its own for one pair, and for multiples of 16: every other number is the same.
@triton.jit(do_not_specialize=["num_pairs"])
def _move_kernel(source, target, pairs, num_pairs, block_words, PIECE: tl.constexpr):
    """Copies pieces, which are numbered block after block; a program takes every num_programs-th piece."""
    pieces = tl.cdiv(block_words, PIECE)
    for number in range(tl.program_id(0), num_pairs * pieces, tl.num_programs(0)):
        pair = pairs + number // pieces * 2
        read, written = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
        words = number % pieces * PIECE + tl.arange(0, PIECE)
        inside = words < block_words
        piece = tl.load(source + read * block_words + words, mask=inside)
        tl.store(target + written * block_words + words, piece, mask=inside)


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copies blocks within a pool, as copy-on-write asks for. Arguments as in `move_blocks`; no block may be the source
    of one pair and the target of another, for who comes first is not fixed."""
    move_blocks(pool, pool, pairs)


def move_blocks(source: Tensor, target: Tensor, pairs: Tensor, *, programs: int | None = None) -> None:
    """Copies blocks of the pool `source` to blocks of the pool `target`, in place, in one launch on the current stream.

    Pools: [num_blocks, ...], without gaps, alike but for `num_blocks`; on a GPU, or in the CPU's pinned memory, which a
    GPU reads and writes as its own. `pairs`: [pairs, 2] int32 on the GPU, block ids in `source` and in `target`, which
    are not checked. At most `programs` run at a time, if given, and leave the GPU's other processors alone: a few are
    faster than a link to the CPU. Raises `ValueError` on other shapes and dtypes.
    """
    _check_pools(source, target)
    if not (pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.dtype == torch.int32 and pairs.is_contiguous()):
        raise ValueError(f"pairs are [pairs, 2] torch.int32 without gaps, not {list(pairs.shape)} {pairs.dtype}")
    if not len(pairs):
        return
    words = source[0].nbytes // 4
    grid = len(pairs) * triton.cdiv(words, _PIECE)
    _move_kernel[(grid if programs is None else min(grid, programs),)](
        source.view(torch.int32),
        target.view(torch.int32),
        pairs,
        len(pairs),
        words,
        PIECE=_PIECE,
        num_warps=_NUM_WARPS,
    )


def _check_pools(source: Tensor, target: Tensor) -> None:
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"blocks cannot move from {list(source.shape)} {source.dtype} to {list(target.shape)} {target.dtype}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError(
            f"pools of strides {source.stride()} and {target.stride()} have gaps; blocks move as one piece"
        )
    if source.shape[-1] * source.itemsize % 4:
        raise ValueError(f"heads of {source.shape[-1]} {source.dtype} are no multiple of 4 bytes, in which blocks move")


def variants() -> Iterator[Variant]:
    """Blocks of a multiple of 64 bytes, as all common models have, and others."""
    for name, aligned in (("blocks", frozenset({"block_words"})), ("odd blocks", frozenset[str]())):
        yield Variant(
            name=f"move {name}",
            kernel=_move_kernel,
            signature={"source": "*i32", "target": "*i32", "pairs": "*i32", "num_pairs": "i32", "block_words": "i32"},
            constants={"PIECE": _PIECE},
            num_warps=_NUM_WARPS,
            num_stages=3,
            aligned=aligned,
        )
