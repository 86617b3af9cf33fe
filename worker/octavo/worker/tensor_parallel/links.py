"""The links between ranks, which carry tensors and add them up: shared memory on one machine, else torch.distributed.

Sums on a CPU are added in the order of the ranks, so that their bits depend on the terms alone.

Ranks on one machine share memory: tensors lie where all of them see them, and sockets carry only signals. A sum over
loopback takes several times as long: it is copied through the kernel by threads that wake each other.
"""

import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

# The bytes that a rank shows the others in one go; larger tensors go in several. Memory is taken only as far as it is
# used.
_SLOT_BYTES = 8 << 20
_READY = b"!"
_LENGTH = struct.Struct("<q")
_ENDED = "another rank has ended"
# How often a rank polls for another before it sleeps until that is there: some 50 microseconds.
_LOOKS = 40
# The dtype of a frame's length, which goes first.
_FRAME_LENGTH = torch.int64


def add_in_order(parts: Tensor, total: Tensor) -> Tensor:
    """Writes the sum of `parts` ([ranks, *shape], two ranks or more) to `total` ([*shape]), added one after the other
    in float32."""
    if total.dtype == torch.float32:
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part
        return total
    wide = parts[0].float()
    for part in parts[1:]:
        wide += part
    return total.copy_(wide)


class SharedMemory:
    """Lets `size` ranks show each other a piece of a tensor at a time.

    Each rank has two slots, used in turn: once all have shown the next piece, all have read the last one. Raises
    `OSError` once a rank is gone, or keeps the others waiting for longer than `set_patience` allows.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], memory: int) -> None:
        size = len(peers) + 1
        view = mmap.mmap(memory, 2 * size * _SLOT_BYTES)
        self._rank = rank
        self._peers = [peers[rank] for rank in sorted(peers)]
        self._slots = torch.frombuffer(view, dtype=torch.uint8).view(2, size, _SLOT_BYTES)
        self._turn = 0

    @classmethod
    def joined(cls, directory: Path, rank: int, size: int, meet: Callable[[], object]) -> Self:
        """Joins the memory of all ranks in the private `directory`; `meet` returns once all ranks have called it."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / f"rank-{rank}"))
            listener.listen(size)
            meet()
            peers = {other: _connected(directory / f"rank-{other}", rank) for other in range(rank)}
            for _ in range(rank + 1, size):
                peer, _ = listener.accept()
                peers[_received(peer, 1)[0]] = peer
        memory = _made(size, peers) if rank == 0 else _given(peers[0])
        try:
            return cls(rank, peers, memory)
        finally:
            os.close(memory)

    def close(self) -> None:
        """Closes the sockets to the other ranks, which notice it."""
        for peer in self._peers:
            peer.close()

    def set_patience(self, seconds: float) -> None:
        for peer in self._peers:
            peer.settimeout(seconds)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Adds up as `octavo.worker.tensor_parallel.group.ShardGroup.all_reduce`."""
        for piece in torch.split(tensor.view(-1), _SLOT_BYTES // tensor.itemsize):
            add_in_order(self._shown(piece)[:, : len(piece)], piece)
        return tensor

    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Gathers as `octavo.worker.tensor_parallel.group.ShardGroup.gather_columns`."""
        whole = part.new_empty(len(part), sum(sizes)) if self._rank == 0 else None
        for rows in _row_pieces(len(part), _SLOT_BYTES // (part.itemsize * max(sizes))):
            piece = part[rows]
            shown = self._shown(piece.reshape(-1))
            if whole is not None:
                parts = [each[: len(piece) * size].view(-1, size) for each, size in zip(shown, sizes, strict=True)]
                torch.cat(parts, dim=1, out=whole[rows])
        return whole

    def send_frame(self, frame: bytes) -> None:
        """Sends a frame from rank 0 to all others."""
        for peer in self._peers:
            peer.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive_frame(self) -> bytes:
        """Receives a frame from rank 0."""
        first = self._peers[0]
        [length] = _LENGTH.unpack(_received(first, _LENGTH.size))
        return _received(first, length)

    def _shown(self, piece: Tensor) -> Tensor:
        """Returns the slots of all ranks ([ranks, elements], more than were filled) once each has shown its flat
        piece."""
        slots = self._slots[self._turn].view(piece.dtype)
        self._turn = 1 - self._turn
        slots[self._rank, : len(piece)] = piece
        for peer in self._peers:
            peer.send(_READY)
        for peer in self._peers:
            _await(peer)
        return slots


def _received(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionResetError(_ENDED)
        data += part
    return bytes(data)


def _await(peer: socket.socket) -> None:
    """Waits until `peer` is ready. Mostly it almost is: to sleep and be woken would take as long as the rest of a
    sum."""
    poller = select.poll()
    poller.register(peer, select.POLLIN)
    for _ in range(_LOOKS):
        if poller.poll(0):
            break
        os.sched_yield()
    if peer.recv(1) != _READY:
        raise ConnectionResetError(_ENDED)


def _row_pieces(rows: int, most: int) -> Iterator[slice]:
    for first in range(0, rows, most):
        yield slice(first, min(first + most, rows))


def _connected(path: Path, rank: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(path))
    peer.send(bytes([rank]))
    return peer


def _made(size: int, peers: dict[int, socket.socket]) -> int:
    """Makes memory for all ranks, sends its descriptor to the peers and returns it."""
    memory = os.memfd_create("octavo-ranks")
    os.ftruncate(memory, 2 * size * _SLOT_BYTES)
    for peer in peers.values():
        socket.send_fds(peer, [_READY], [memory])
    return memory


def _given(first: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(first, 1, 1)
    if not descriptors:
        raise ConnectionResetError(_ENDED)
    return descriptors[0]


class TensorLink(Protocol):
    """Carries tensors of one kind of device by the collectives of `octavo.worker.tensor_parallel.group.ShardGroup`.

    All methods raise `OSError` or `RuntimeError` once a rank is gone, or keeps the others waiting for longer than
    `set_patience` allows.
    """

    def set_patience(self, seconds: float) -> None: ...
    def close(self) -> None: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...
    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None: ...


class HostLink(TensorLink, Protocol):
    """Carries tensors in CPU memory, and frames of bytes from rank 0 to all others."""

    def send_frame(self, frame: bytes) -> None: ...
    def receive_frame(self) -> bytes: ...


class PendingWork(Protocol):
    """An operation under way."""

    def wait(self) -> bool: ...


class Backend(Protocol):
    """The part of torch.distributed's process groups that is used here."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> PendingWork: ...
    def allreduce(self, tensors: list[Tensor]) -> PendingWork: ...
    def broadcast(self, tensor: Tensor, root: int) -> PendingWork: ...
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> PendingWork: ...
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> PendingWork: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def abort(self) -> None: ...


class BackendLink:
    """Adds up as `backend` does, in an order of its own: NCCL, for one."""

    def __init__(self, rank: int, size: int, backend: Backend) -> None:
        self._rank = rank
        self._size = size
        self._backend = backend

    def set_patience(self, seconds: float) -> None:
        self._backend.set_timeout(timedelta(seconds=seconds))

    def close(self) -> None:
        """Ends the backend's threads, which would else abort this process at its exit."""
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


class NcclLink(BackendLink):
    """Carries tensors between GPUs. Its sums are queued: a rank that is gone shows when the device is waited for."""

    def close(self) -> None:
        """Ends what is queued, whether or not the other ranks are still there: an orderly end would wait for them."""
        self._backend.abort()
        super().close()


class GlooLink(BackendLink):
    """Adds up in the order of the ranks: gloo's own order depends on where in a tensor an element stands."""

    def __init__(self, rank: int, size: int, backend: Backend) -> None:
        super().__init__(rank, size, backend)
        self._parts = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return add_in_order(self._gathered(tensor), tensor)

    def exchange(self, number: int) -> list[int]:
        """Exchanges as `octavo.worker.tensor_parallel.group.ShardGroup.exchange`."""
        numbers: list[int] = self._gathered(torch.tensor([number])).flatten().tolist()
        return numbers

    def send_frame(self, frame: bytes) -> None:
        self._backend.broadcast(torch.tensor([len(frame)], dtype=_FRAME_LENGTH), 0).wait()
        self._backend.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 0).wait()

    def receive_frame(self) -> bytes:
        length = torch.empty(1, dtype=_FRAME_LENGTH)
        self._backend.broadcast(length, 0).wait()
        frame = bytearray(int(length))
        self._backend.broadcast(torch.frombuffer(frame, dtype=torch.uint8), 0).wait()
        return bytes(frame)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, [ranks, *tensor.shape]; the next call writes to the same memory."""
        size = self._size * tensor.nbytes
        if len(self._parts) < size:
            self._parts = torch.empty(size, dtype=torch.uint8)
        parts = self._parts[:size].view(tensor.dtype)
        self._backend._allgather_base(parts, tensor.view(-1)).wait()
        return parts.view(self._size, *tensor.shape)
