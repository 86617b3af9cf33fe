"""When a device came to some points of its work."""

import time
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a device's queue."""

    def passed(self) -> bool:
        """Whether the device has come there."""

    def wait(self) -> None:
        """Until it has."""

    def microseconds_since(self, earlier: "Mark") -> int:
        """Between two marks that it has passed."""


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
    """A CPU has done what it was told to."""

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
    """The point that `device` comes to when all is done that it has been given so far."""
    return _CudaMark(device) if device.type == "cuda" else _CpuMark()
