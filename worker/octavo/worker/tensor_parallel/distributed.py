"""The ranks of one replica: tensors between their devices, frames from the first to the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from octavo.worker.runner import DeviceLostError
from octavo.worker.tensor_parallel.links import GlooLink, HostLink, TensorLink


class RankLostError(DeviceLostError):
    """Another rank does not answer any more: nothing can be computed without it, so this process must end."""


class DistributedGroup:
    """A `ShardGroup`, and frames of bytes that rank 0 sends to all others.

    `host` carries what lies in the CPU's memory, `device`, if there is one, what lies on GPUs, `control` a few numbers.
    All of it raises `RankLostError` once a rank is gone, or keeps the others waiting for longer than `set_patience`
    says.
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
        """How long another rank may let this one wait from now on."""
        for link in self._links():
            link.set_patience(seconds)

    def close(self) -> None:
        """This rank takes part in nothing more."""
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
        """To all other ranks; only for rank 0."""
        with _or_lost("sending a step to the other ranks"):
            self._host.send_frame(frame)

    def receive_frame(self) -> bytes:
        """The next that rank 0 sends; only for the others."""
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
