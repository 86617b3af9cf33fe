"""Moving whole blocks of keys and values, all layers and all blocks at once (paper §5.1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.checks import check_moves
from octavo.kernels.native.library import NativeUnavailable, find
from octavo.kernels.native.moves import move_blocks

_BLOCK_DIM = 2


def copy_blocks(cache: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copies blocks within a cache, as copy-on-write asks for. Arguments as in `swap_blocks`."""
    swap_blocks(cache, cache, moves)


def swap_blocks(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copies blocks from one cache to another, which may be on another device, in place: one gather, one transfer, one
    scatter, or on the CPU one pass over the blocks. All blocks are read before any is written. Arguments as in
    `octavo.kernels.reference.move_blocks`."""
    if not moves:
        return
    check_moves(source, target, moves)
    if not _move_natively(source, target, moves):
        _gather_and_scatter(source, target, moves)


def _move_natively(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> bool:
    """Whether the native kernel could do it, and did."""
    if source.device.type != "cpu" or target.device.type != "cpu":
        return False
    if not (source.is_contiguous() and target.is_contiguous()):
        return False
    if source is target and not {read for read, _ in moves}.isdisjoint(written for _, written in moves):
        return False
    library = find()
    if isinstance(library, NativeUnavailable):
        return False
    move_blocks(library, source, target, moves)
    return True


def _gather_and_scatter(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    sources, targets = torch.tensor(moves, dtype=torch.int64).unbind(1)
    shape = (*source.shape[:_BLOCK_DIM], len(moves), *source.shape[_BLOCK_DIM + 1 :])
    gathered = _staging(shape, source, target)
    torch.index_select(source, _BLOCK_DIM, sources.to(source.device), out=gathered)
    if source.device != target.device:
        gathered = _staging(shape, target, source).copy_(gathered)
    target.index_copy_(_BLOCK_DIM, targets.to(target.device), gathered)


def _staging(shape: tuple[int, ...], cache: Tensor, other: Tensor) -> Tensor:
    """Room on the device of `cache`; pinned, if that is the CPU, where `other` is on a GPU that reads or fills it."""
    pinned = other.is_cuda and not cache.is_cuda
    return torch.empty(shape, dtype=cache.dtype, device=cache.device, pin_memory=pinned)
