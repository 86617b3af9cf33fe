"""Moves whole blocks of keys and values in the CPU's memory, all layers and all blocks at once (paper §5.1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.checks import check_moves
from octavo.kernels.native.library import NativeLibrary, NativeUnavailable, find


def move_blocks(library: NativeLibrary, source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copies blocks with the native kernel.

    The arguments are those of `octavo.kernels.reference.move_blocks`, checked by the caller. The caches have no gaps,
    and no block that is read may be written.
    """
    pairs = torch.tensor(moves, dtype=torch.int64)
    library.functions.octavo_move_blocks(
        source.data_ptr(),
        target.data_ptr(),
        pairs.data_ptr(),
        len(moves),
        source[0].nbytes,
        torch.get_num_threads(),
    )


def copy_blocks(cache: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copies blocks within a cache, as copy-on-write asks for. Arguments as in `swap_blocks`."""
    swap_blocks(cache, cache, moves)


def swap_blocks(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copies blocks from one cache to another, in place, in one pass over the blocks. All are read before any is
    written. Arguments as in `octavo.kernels.reference.move_blocks`."""
    if not moves:
        return
    check_moves(source, target, moves)
    if not _move_natively(source, target, moves):
        sources, targets = torch.tensor(moves, dtype=torch.int64).unbind(1)
        # As bytes: of narrow floats torch copies none by index.
        target.view(torch.uint8).index_copy_(0, targets, source.view(torch.uint8).index_select(0, sources))


def _move_natively(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> bool:
    """Copies the blocks with the native kernel if it can; returns whether it did."""
    if not (source.is_contiguous() and target.is_contiguous()):
        return False
    if source is target and not {read for read, _ in moves}.isdisjoint(written for _, written in moves):
        return False
    library = find()
    if isinstance(library, NativeUnavailable):
        return False
    move_blocks(library, source, target, moves)
    return True
