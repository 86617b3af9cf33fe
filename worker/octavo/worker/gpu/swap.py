"""The swap of blocks between a GPU and pinned CPU memory, and copies of blocks within the GPU."""

import logging
import math
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.native.memory import zeros
from octavo.worker.gpu.transfer import upload

logger = logging.getLogger(__name__)

# Flags: for all of CUDA's contexts, and where kernels read and write the memory themselves.
_PORTABLE_AND_MAPPED = 1 | 2


Pairs = list[tuple[int, int]]
# [num_blocks, layers, 2, ...] each: some layers of all blocks.
Pools = Sequence[Tensor]
# Blocks of so many bytes go through the copy engine, which takes no processor from the model: each lasts much longer
# than the few microseconds that starting a copy costs. Smaller ones go in one launch of a kernel.
_COPY_ENGINE_BYTES = 1 << 20
# Programs of that kernel: they fill the link to the CPU, and leave most of a GPU alone.
_SWAP_PROGRAMS = 16


class PinningError(Exception):
    """Raised if CUDA does not pin the memory asked for."""


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocates a zeroed tensor in pinned memory of its own, and logs how long that takes.

    Pinned pages stay where they are, so that a GPU reads and writes them fastest. Pinning goes page by page and takes
    seconds for many GiB. Torch's own pinned memory comes in powers of two, up to twice what is asked for. The call
    needs CUDA. Raises `OSError` if there is no room, and `PinningError`.
    """
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    began = time.monotonic()
    gib = math.prod(shape) * dtype.itemsize / (1 << 30)
    logger.info("pinning %.1f GiB of the CPU's memory for swapped blocks, which may take a while", gib)
    # In huge pages, which are far fewer to pin.
    tensor = zeros(shape, dtype, touched=True)
    _pin(tensor, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    logger.info("pinned %.1f GiB in %.1f s", gib, time.monotonic() - began)
    return tensor


def _pin(tensor: Tensor, cudart: Any) -> None:
    """Pins `tensor` through `cudart`, torch's binding to CUDA's runtime, until `tensor` is freed."""
    address = tensor.data_ptr()
    if code := int(cudart.cudaHostRegister(address, tensor.nbytes, _PORTABLE_AND_MAPPED)):
        raise PinningError(f"CUDA does not pin {tensor.nbytes} bytes of the CPU's memory (its error {code})")
    weakref.finalize(tensor, cudart.cudaHostUnregister, address)


def swap_blocks(sources: Pools, targets: Pools, pairs: Pairs) -> None:
    """Moves blocks from some pools to others, of which the ones are on a GPU and the others in pinned memory.

    Each pool holds some layers of every block, none more than the first. `pairs` holds (source, target), no target
    twice. Blocks that lie side by side in both pools go as one.
    """
    if sources[0][0].nbytes >= _COPY_ENGINE_BYTES:
        together = runs(pairs)
        for source, target in zip(sources, targets, strict=True):
            for first, into, count in together:
                target[into : into + count].copy_(source[first : first + count], non_blocking=True)
        return
    from octavo.kernels.triton.moves import move_blocks

    on_device = _on_device(pairs, sources[0].device if sources[0].is_cuda else targets[0].device)
    for source, target in zip(sources, targets, strict=True):
        move_blocks(source, target, on_device, programs=_SWAP_PROGRAMS)


def copy_blocks(pools: Pools, pairs: Pairs) -> None:
    """Copies blocks within pools on a GPU as if all were read first.

    That takes one launch for each pool, or two if a block is both read and written. Arguments as in `swap_blocks`.
    """
    from octavo.kernels.triton import moves

    device = pools[0].device
    if {source for source, _ in pairs}.isdisjoint(target for _, target in pairs):
        on_device = _on_device(pairs, device)
        for pool in pools:
            moves.copy_blocks(pool, on_device)
        return
    gathered = _on_device([(source, place) for place, (source, _) in enumerate(pairs)], device)
    scattered = _on_device([(place, target) for place, (_, target) in enumerate(pairs)], device)
    for pool in pools:
        staging = torch.empty((len(pairs), *pool.shape[1:]), dtype=pool.dtype, device=device)
        moves.move_blocks(pool, staging, gathered)
        moves.move_blocks(staging, pool, scattered)


def runs(pairs: Pairs) -> list[tuple[int, int, int]]:
    """Returns `pairs`, of which no two share a target, as (first source, first target, count) of neighbours in both
    pools."""
    found: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        first, into, count = found[-1] if found else (-1, -1, 0)
        if count and (source, target) == (first + count, into + count):
            found[-1] = first, into, count + 1
        else:
            found.append((source, target, 1))
    return found


def _on_device(pairs: Pairs, device: torch.device) -> Tensor:
    """Returns `pairs` on the device, [pairs, 2] int32."""
    return upload(np.array(pairs, dtype=np.int32), device)
