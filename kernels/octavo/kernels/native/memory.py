"""Allocates the memory of large arrays: zero, untouched until it is written, in huge pages where the system has
them."""

import errno
import math
import mmap

import torch
from torch import Tensor

# Linux 5.14; Python does not name it yet.
_MADV_POPULATE_WRITE = 23


def zeros(shape: tuple[int, ...], dtype: torch.dtype, *, touched: bool = False) -> Tensor:
    """Returns a tensor in memory of its own. The system provides its pages when they are first touched, or now if
    `touched`: a step would wait for every new page.

    Raises `OSError` if there is no room.
    """
    count = math.prod(shape)
    memory = _map(max(1, count * dtype.itemsize))
    if touched:
        _advise(memory, _MADV_POPULATE_WRITE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


class Arena:
    """Places tensors side by side in large pieces of memory, so that small ones share huge pages. Nothing is freed
    before all that shares its piece is."""

    _PIECE = 64 << 20
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count], not written yet. Raises `OSError` if there is no room."""
        size = count * dtype.itemsize
        if self._used + size > len(self._piece):
            self._piece, self._used = zeros((max(size, self._PIECE),), torch.uint8), 0
        start = self._used
        self._used += -(-size // self._ALIGNMENT) * self._ALIGNMENT
        return self._piece[start : start + size].view(dtype)


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory, mmap.MADV_HUGEPAGE)
    return memory


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError as error:
        # A kernel that does not know the advice: nothing is lost but speed.
        if error.errno != errno.EINVAL:
            raise
