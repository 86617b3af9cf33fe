"""Moving whole blocks in the CPU's memory: `octavo.kernels.cache_ops` without a copy in between."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary


def move_blocks(library: NativeLibrary, source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Arguments as in `octavo.kernels.reference.move_blocks`, checked by the caller; caches without gaps, and no block
    that is read may be written."""
    pairs = torch.tensor(moves, dtype=torch.int64)
    library.functions.octavo_move_blocks(
        source.data_ptr(),
        target.data_ptr(),
        pairs.data_ptr(),
        len(moves),
        source[0].nbytes,
        torch.get_num_threads(),
    )
