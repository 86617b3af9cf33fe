"""A pool of blocks that holds some layers of each, in memory of its own on the device and in CPU memory."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape
from octavo.worker.gpu.transfer import download, upload
from octavo.worker.step.block_mover import BlockMover


class LayerPool:
    """Holds the bytes of some layers of all blocks: `blocks` on the device, `cpu_blocks` in CPU memory, both
    [num_blocks, layers, 2, ...] without gaps, between which `mover` moves them.

    A block's bytes are those of its pools, one after the other, and the same however many these are.
    """

    def __init__(self, blocks: Tensor, cpu_blocks: Tensor, shape: CacheShape, mover: BlockMover) -> None:
        self._rows, self._cpu_rows = _rows(blocks), _rows(cpu_blocks)
        self._shape = shape
        self._mover = mover

    @property
    def bytes_per_block(self) -> int:
        return self._rows.shape[1]

    @property
    def is_here(self) -> bool:
        """Tells whether device blocks are in memory that this process reads itself."""
        return self._rows.device.type == "cpu"

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """Returns the bytes of device blocks, [bytes] uint8 each: the blocks themselves where they are `is_here`, else
        copies, valid once the device has done what it was given so far."""
        if self.is_here:
            return [self._rows[block_id] for block_id in block_ids]
        wanted = upload(np.array(block_ids, dtype=np.int64), self._rows.device)
        copies = list(download(self._rows.index_select(0, wanted)))
        self._mover.used([tuple(block_ids)])
        return copies

    def rows(self, *, in_cpu: bool) -> Tensor | None:
        """Returns the bytes of all blocks, [blocks, bytes] uint8, of the device or `in_cpu`; None where they are not in
        this process's memory."""
        return self._cpu_rows if in_cpu else (self._rows if self.is_here else None)

    def fill(self, block_id: int, content: Tensor) -> None:
        """Writes the bytes of a block into a CPU block, once no swap is under way."""
        self._mover.finish_swaps()
        self._cpu_rows[block_id].copy_(content)

    def is_finite(self, content: Tensor) -> bool:
        """Tells whether the bytes of a block are finite numbers all: of int8, its scales."""
        return all(_is_finite(part) for part in self._floats(content))

    def _floats(self, content: Tensor) -> list[Tensor]:
        shape = self._shape
        if shape.dtype == torch.float8_e4m3fn:
            return [content.view(shape.dtype).float()]
        if shape.dtype != torch.int8:
            return [content.view(shape.dtype)]
        # Of each head, all codes come before all scales (`octavo.kernels.backend.int8_scale_bytes`).
        heads = content.view(-1, 2, shape.num_kv_heads, shape.block_size * shape.width)
        scales = heads[..., shape.block_size * shape.head_dim :]
        keys, values = scales[:, 0].contiguous(), scales[:, 1, :, : 4 * shape.block_size].contiguous()
        return [keys.view(torch.bfloat16), values.view(torch.float32)]


def _is_finite(numbers: Tensor) -> bool:
    """Tells whether all numbers of a float type are finite, by their bits, in no memory of its own. NumPy looks at
    them, alone: torch would wake threads of its own, for which the kernels' threads leave no core."""
    bits, unsigned = (torch.int16, np.uint16) if numbers.element_size() == 2 else (torch.int32, np.uint32)
    infinity = int(torch.tensor(math.inf, dtype=numbers.dtype).view(bits))
    signed = numbers.contiguous().view(bits).numpy()
    # As signed numbers the largest is positive, if any is; as unsigned ones negative, if any is.
    sign = torch.iinfo(bits).max + 1
    return int(signed.max()) < infinity and int(signed.view(unsigned).max()) < sign + infinity


def _rows(blocks: Tensor) -> Tensor:
    """Returns the bytes of each block, [num_blocks, bytes]."""
    return blocks.reshape(len(blocks), math.prod(blocks.shape[1:])).view(torch.uint8)
