"""Host arrays to the device, behind what it was given before: nobody waits."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def uploaded(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, as of the work queued there after this; on the CPU the very same memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From memory that is not pinned the copy would wait for all that is under way; torch keeps this until it is done.
    return tensor.pin_memory().to(device, non_blocking=True)
