"""What a step leaves on the device, copied back while the host goes on."""

import torch
from torch import Tensor

from octavo.worker.gpu.timeline import Mark, mark


class Readback:
    """One step's copies to the CPU, on the current stream of `device`. They may be read once the device is past them:
    at a mark of one's own, or at the one that `record` sets. On a CPU they may be at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: Mark | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """A tensor on the CPU that will hold what `tensor` holds now."""
        if self._device.type != "cuda":
            return tensor.clone()
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copied.copy_(tensor, non_blocking=True)

    def record(self) -> None:
        """All copies are under way."""
        self._recorded = mark(self._device)

    def ready(self) -> bool:
        """Whether all that was recorded may be read."""
        return self._recorded is not None and self._recorded.passed()

    def wait(self) -> None:
        """Until it may."""
        if self._recorded is not None:
            self._recorded.wait()
