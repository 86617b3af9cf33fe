"""What ranks on one machine tell each other: tensors lie in memory that all of them see, sockets only say when.

A sum over loopback takes several times as long: it is copied through the kernel by threads that wake each other.
"""

import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from octavo.worker.tensor_parallel.sums import add_in_order

# What a rank shows the others in one go; more goes in several. Taken only as far as it is used.
_SLOT_BYTES = 8 << 20
_READY = b"!"
_LENGTH = struct.Struct("<q")
_ENDED = "another rank has ended"
# How often a rank looks for another before it sleeps until that is there: some 50 microseconds.
_LOOKS = 40


class SharedMemory:
    """`size` ranks that all show each other a piece of a tensor at a time.

    Each has two slots, used in turn: once all have shown the next piece, all have read the last one. Raises `OSError`
    once a rank is gone, or keeps the others waiting for longer than `set_patience` says.
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
        """That of all ranks who join in the private `directory`; `meet` comes back once all have called it."""
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
        """The others learn of it."""
        for peer in self._peers:
            peer.close()

    def set_patience(self, seconds: float) -> None:
        for peer in self._peers:
            peer.settimeout(seconds)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As `octavo.worker.tensor_parallel.group.ShardGroup.all_reduce`."""
        for piece in torch.split(tensor.view(-1), _SLOT_BYTES // tensor.itemsize):
            add_in_order(self._shown(piece)[:, : len(piece)], piece)
        return tensor

    def gather_columns(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """As `octavo.worker.tensor_parallel.group.ShardGroup.gather_columns`."""
        whole = part.new_empty(len(part), sum(sizes)) if self._rank == 0 else None
        for rows in _row_pieces(len(part), _SLOT_BYTES // (part.itemsize * max(sizes))):
            piece = part[rows]
            shown = self._shown(piece.reshape(-1))
            if whole is not None:
                parts = [each[: len(piece) * size].view(-1, size) for each, size in zip(shown, sizes, strict=True)]
                torch.cat(parts, dim=1, out=whole[rows])
        return whole

    def send_frame(self, frame: bytes) -> None:
        """From rank 0 to all others."""
        for peer in self._peers:
            peer.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive_frame(self) -> bytes:
        """From rank 0."""
        first = self._peers[0]
        [length] = _LENGTH.unpack(_received(first, _LENGTH.size))
        return _received(first, length)

    def _shown(self, piece: Tensor) -> Tensor:
        """The slots of all ranks ([ranks, elements], more than were filled) once each has shown its flat piece."""
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
    """Until it is ready. Most often it is almost: to sleep and be woken would take as long as the rest of a sum."""
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
    """A descriptor of memory for all, which the peers are given too."""
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
