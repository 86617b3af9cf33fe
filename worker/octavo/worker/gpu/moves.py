"""Moving blocks within a GPU's memory, and between it and the CPU's: given to the current stream, nobody waits."""

import numpy as np
import torch
from torch import Tensor

from octavo.worker.gpu.transfer import upload

Pairs = list[tuple[int, int]]

# Blocks of so many bytes go through the copy engine, which takes no processor from the model: each lasts much longer
# than the few microseconds that starting a copy costs. Smaller ones go in one launch of a kernel.
_COPY_ENGINE_BYTES = 1 << 20
# Programs of that kernel: they fill the link to the CPU, and leave most of a GPU alone.
_SWAP_PROGRAMS = 16


def swap_blocks(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """Moves blocks from one pool to another, of which one is on a GPU and the other in pinned memory. `pairs`: (source,
    target), no target twice. What lies side by side in both pools goes as one."""
    if source[0].nbytes >= _COPY_ENGINE_BYTES:
        for first, into, count in runs(pairs):
            target[into : into + count].copy_(source[first : first + count], non_blocking=True)
        return
    from octavo.kernels.triton.moves import move_blocks

    device = source.device if source.is_cuda else target.device
    move_blocks(source, target, _on_device(pairs, device), programs=_SWAP_PROGRAMS)


def copy_blocks(pool: Tensor, pairs: Pairs) -> None:
    """Copies blocks within a pool on a GPU as if all were read first: one launch, or two if a block is both read and
    written. `pairs` as in `swap_blocks`."""
    from octavo.kernels.triton import moves

    if {source for source, _ in pairs}.isdisjoint(target for _, target in pairs):
        moves.copy_blocks(pool, _on_device(pairs, pool.device))
        return
    staging = torch.empty((len(pairs), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    gathered = [(source, place) for place, (source, _) in enumerate(pairs)]
    scattered = [(place, target) for place, (_, target) in enumerate(pairs)]
    moves.move_blocks(pool, staging, _on_device(gathered, pool.device))
    moves.move_blocks(staging, pool, _on_device(scattered, pool.device))


def runs(pairs: Pairs) -> list[tuple[int, int, int]]:
    """`pairs`, of which no two share a target, as (first source, first target, count) of neighbours in both."""
    found: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        first, into, count = found[-1] if found else (-1, -1, 0)
        if count and (source, target) == (first + count, into + count):
            found[-1] = first, into, count + 1
        else:
            found.append((source, target, 1))
    return found


def _on_device(pairs: Pairs, device: torch.device) -> Tensor:
    """[pairs, 2] int32."""
    return upload(np.array(pairs, dtype=np.int32), device)
