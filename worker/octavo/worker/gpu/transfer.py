"""Transfers of small arrays between host and device that wait for neither, and marks in a device's queue."""

import time
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns `array` on `device`, for work that is queued there from now on; on the CPU it shares the memory."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    # From memory that is not pinned the copy would wait for all that is queued; torch keeps this until it is done.
    return host.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU that holds what `tensor` holds now.

    From a GPU, it is valid once the device is past a later `octavo.worker.gpu.transfer.mark`.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


class Mark(Protocol):
    """A point in a device's queue."""

    def passed(self) -> bool:
        """Tells whether the device has come to this point."""

    def wait(self) -> None:
        """Waits until the device has come to this point."""

    def microseconds_since(self, earlier: "Mark") -> int:
        """Returns the time between two marks that the device has passed."""


class _CudaMark:
    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _CudaMark)
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return round(1000 * milliseconds)


class _CpuMark:
    """The mark of a CPU, which has done its work when the mark is made."""

    def __init__(self) -> None:
        self._ns = time.monotonic_ns()

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _CpuMark)
        return (self._ns - earlier._ns) // 1000


def mark(device: torch.device) -> Mark:
    """Returns the point that `device` reaches once all its work so far is done."""
    return _CudaMark(device) if device.type == "cuda" else _CpuMark()
