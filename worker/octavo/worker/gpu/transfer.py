"""Small arrays from the host to a device and back, without waiting for either."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, as of the work that is queued there from now on; on the CPU the very same memory."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    # From memory that is not pinned the copy would wait for all that is queued; torch keeps this until it is done.
    return host.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that holds what `tensor` holds now; from a GPU, once that is past a later
    `octavo.worker.gpu.timeline.mark`."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)
