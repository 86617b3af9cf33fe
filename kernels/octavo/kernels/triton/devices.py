"""Tells the limits of a device. On a CPU, where an interpreter runs the kernels, the limits are those of an H200."""

from functools import lru_cache

import torch

_H200_MULTIPROCESSORS = 132
# Shared memory that one program may have, in KiB, by compute capability.
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
HOPPER = 90
# From here on kernels convert to and from fp8 (e4m3).
FP8_FROM = 89


def shared_limit(capability: int) -> int:
    """Returns the bytes of shared memory that a program may have at this compute capability, such as 90."""
    return _SHARED_KIB[capability] << 10


def takes_fp8(capability: int) -> bool:
    """Returns whether a cache may be of fp8 on a GPU of this compute capability."""
    return capability >= FP8_FROM


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have on `device`."""
    if device.type != "cuda":
        return shared_limit(HOPPER)
    from triton.runtime import driver

    # What Triton holds a launch against.
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
