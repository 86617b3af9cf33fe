"""Moving whole blocks in the CPU's memory: `octavo.kernels.cache_ops` without a copy in between."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary


def move_blocks(library: NativeLibrary, source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Arguments as in `octavo.kernels.reference.move_blocks`, checked by the caller, but no block that is read may be
    written."""
    pairs = torch.tensor(moves, dtype=torch.int64)
    layers, parts, num_blocks = source.shape[:3]
    block_bytes = source[0, 0, 0].nbytes
    library.functions.octavo_move_blocks(
        source.data_ptr(),
        target.data_ptr(),
        pairs.data_ptr(),
        len(moves),
        layers * parts,
        num_blocks * block_bytes,
        target.shape[2] * block_bytes,
        block_bytes,
        torch.get_num_threads(),
    )
