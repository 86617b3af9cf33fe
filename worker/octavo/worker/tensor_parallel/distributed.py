"""The group of a replica's ranks: tensors go between their devices, frames from the first rank to the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from octavo.worker.runner import DeviceLostError
from octavo.worker.tensor_parallel.links import GlooLink, HostLink, TensorLink


class RankLostError(DeviceLostError):
    """Raised if another rank does not answer any more: nothing can be computed without it, so this process must end."""


class DistributedGroup:
    """A `ShardGroup` that can also send frames of bytes from rank 0 to all others.

    `host` carries tensors in CPU memory, `device`, if there is one, tensors on GPUs, `control` a few numbers. All
    methods raise `RankLostError` once a rank is gone, or keeps the others waiting for longer than `set_patience`
    allows.
    """

    def __init__(
        self, rank: int, size: int, control: GlooLink, host: HostLink, device: TensorLink | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._control = control
        self._host = host
        self._device = device

    def set_patience(self, seconds: float) -> None:
        """Sets how many seconds another rank may let this one wait from now on."""
        for link in self._links():
            link.set_patience(seconds)

    def close(self) -> None:
        """Ends this rank's part in the group."""
        for link in self._links():
            link.close()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with _or_lost("adding up what the ranks computed"):
            return self._link_of(tensor).all_reduce(tensor)

    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        with _or_lost("gathering columns"):
            return self._link_of(part).gather_columns(part, sizes)

    def exchange(self, number: int) -> list[int]:
        with _or_lost("agreeing on a number"):
            return self._control.exchange(number)

    def send_frame(self, frame: bytes) -> None:
        """Sends a frame to all other ranks; only for rank 0."""
        with _or_lost("sending a step to the other ranks"):
            self._host.send_frame(frame)

    def receive_frame(self) -> bytes:
        """Returns the next frame from rank 0; only for the other ranks."""
        with _or_lost("waiting for the first rank"):
            return self._host.receive_frame()

    def _link_of(self, tensor: Tensor) -> TensorLink:
        return self._device if tensor.is_cuda and self._device else self._host

    def _links(self) -> set[TensorLink]:
        return {self._control, self._host} | ({self._device} if self._device else set())


@contextmanager
def _or_lost(doing: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise RankLostError(f"{doing} failed, because a rank is gone or hangs: {error}") from error
