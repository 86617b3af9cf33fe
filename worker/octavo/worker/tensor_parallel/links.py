"""What carries tensors from rank to rank, over the process groups of torch.distributed."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from octavo.worker.tensor_parallel.sums import add_in_order

# A frame's length goes first.
_LENGTH = torch.int64


class TensorLink(Protocol):
    """Carries tensors of one kind of device; the collectives are those of
    `octavo.worker.tensor_parallel.group.ShardGroup`. All of it raises `OSError` or `RuntimeError` once a rank is gone,
    or keeps the others waiting for longer than `set_patience` says."""

    def set_patience(self, seconds: float) -> None: ...
    def close(self) -> None: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...
    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None: ...


class HostLink(TensorLink, Protocol):
    """Carries what lies in the CPU's memory, and frames of bytes from rank 0 to all others."""

    def send_frame(self, frame: bytes) -> None: ...
    def receive_frame(self) -> bytes: ...


class Work(Protocol):
    """Something that is under way."""

    def wait(self) -> bool: ...


class Backend(Protocol):
    """The part of torch.distributed's process groups that is used here."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work: ...
    def allreduce(self, tensors: list[Tensor]) -> Work: ...
    def broadcast(self, tensor: Tensor, root: int) -> Work: ...
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work: ...
    def set_timeout(self, timeout: timedelta) -> None: ...


class BackendLink:
    """Adds up as `backend` does: NCCL's way, whose order of terms is its own."""

    def __init__(self, rank: int, size: int, backend: Backend) -> None:
        self._rank = rank
        self._size = size
        self._backend = backend

    def set_patience(self, seconds: float) -> None:
        self._backend.set_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        """Lets go of threads that would else abort this process where it ends."""
        del self._backend

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._backend.allreduce([tensor]).wait()
        return tensor

    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        if self._rank:
            self._backend.send([part.contiguous()], 0, self._rank).wait()
            return None
        parts = [part, *(part.new_empty(len(part), size) for size in sizes[1:])]
        under_way = [self._backend.recv([parts[rank]], rank, rank) for rank in range(1, self._size)]
        for work in under_way:
            work.wait()
        return torch.cat(parts, dim=1)


class GlooLink(BackendLink):
    """Adds up in the order of the ranks: gloo's own order depends on where in a tensor an element stands."""

    def __init__(self, rank: int, size: int, backend: Backend) -> None:
        super().__init__(rank, size, backend)
        self._parts = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return add_in_order(self._gathered(tensor), tensor)

    def exchange(self, number: int) -> list[int]:
        """As `octavo.worker.tensor_parallel.group.ShardGroup.exchange`."""
        numbers: list[int] = self._gathered(torch.tensor([number])).flatten().tolist()
        return numbers

    def send_frame(self, frame: bytes) -> None:
        self._backend.broadcast(torch.tensor([len(frame)], dtype=_LENGTH), 0).wait()
        self._backend.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 0).wait()

    def receive_frame(self) -> bytes:
        length = torch.empty(1, dtype=_LENGTH)
        self._backend.broadcast(length, 0).wait()
        frame = bytearray(int(length))
        self._backend.broadcast(torch.frombuffer(frame, dtype=torch.uint8), 0).wait()
        return bytes(frame)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """[ranks, *tensor.shape]; the next call writes to the same memory."""
        size = self._size * tensor.nbytes
        if len(self._parts) < size:
            self._parts = torch.empty(size, dtype=torch.uint8)
        parts = self._parts[:size].view(tensor.dtype)
        self._backend._allgather_base(parts, tensor.view(-1)).wait()
        return parts.view(self._size, *tensor.shape)
