"""The CPU's memory as a GPU reads and writes it fastest: pinned, so that its pages stay where they are."""

import logging
import math
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.native.memory import zeros

logger = logging.getLogger(__name__)

# For all of CUDA's contexts, and where kernels read and write it themselves.
_PORTABLE_AND_MAPPED = 1 | 2


class PinningError(Exception):
    """CUDA does not pin this memory."""


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in pinned memory of its own. Pinning goes page by page and takes seconds for many GiB; the log says so.

    Torch's own pinned memory comes in powers of two, up to twice what is asked for. Needs CUDA. Raises `OSError` if
    there is no room, and `PinningError`.
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
    """By `cudart`, torch's binding to CUDA's runtime; until `tensor` is gone."""
    address = tensor.data_ptr()
    if code := int(cudart.cudaHostRegister(address, tensor.nbytes, _PORTABLE_AND_MAPPED)):
        raise PinningError(f"CUDA does not pin {tensor.nbytes} bytes of the CPU's memory (its error {code})")
    weakref.finalize(tensor, cudart.cudaHostUnregister, address)
