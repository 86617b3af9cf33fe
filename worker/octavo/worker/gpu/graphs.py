"""A decode step without its launches: captured once for each of some batch sizes, and replayed."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Hidden states and logits of a batch.
Outputs = tuple[Tensor, Tensor]


def graph_sizes(largest: int) -> list[int]:
    """The batch sizes that are captured: close enough that padding costs little beside reading the weights."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1025, 64)]
    return [*(size for size in ladder if size < largest), largest]


class Replay(Protocol):
    """What one captured batch size is."""

    def __call__(self) -> Outputs: ...


class DecodeGraphs:
    """`compute(size)` for padded batch sizes up to `largest`, as graphs if `captured`.

    `compute` queues a decode step over buffers that stay where they are, waits for nothing, and gives tensors that the
    next replay of any size overwrites.
    """

    def __init__(
        self, compute: Callable[[int], Outputs], largest: int, device: torch.device, *, captured: bool
    ) -> None:
        self._compute = compute
        self._sizes = graph_sizes(largest)
        self._device = device
        self._captured = captured
        self._replays: dict[int, Replay] = {}
        self._pool: Any = None
        self._outputs: Outputs | None = None

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def padded(self, size: int) -> int:
        """The captured size for a batch of `size`, at most `largest`."""
        return next(each for each in self._sizes if each >= size)

    def replay(self, size: int) -> Outputs:
        """The outputs of the padded `size`."""
        replay = self._replays.get(size)
        if replay is None:
            replay = self._replays[size] = self._capture(size)
        return replay()

    def capture_all(self) -> None:
        """Largest first: the smaller ones live in its memory."""
        if self._captured:
            for done, size in enumerate(reversed(self._sizes)):
                self._replays[size] = self._capture(size)
                logger.info("captured the decode step of %d sequences (%d of %d)", size, done + 1, len(self._sizes))

    def drop(self) -> None:
        """Forgets what was captured: something that it reads lies elsewhere now."""
        self._replays.clear()
        # Torch takes a pool that no graph has any more for a fault if it still holds a library's workspace.
        self._pool = None

    def _capture(self, size: int) -> Replay:
        if not self._captured:
            return lambda: self._compute(size)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        # Kernels are compiled and libraries make their workspaces before: neither can be captured.
        with torch.cuda.stream(stream):
            outputs = self._room_for(self._compute(size), size)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool), _waiting_refused():
            for kept, made in zip(outputs, self._compute(size), strict=True):
                kept.copy_(made)
        self._pool = self._pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _room_for(self, made: Outputs, size: int) -> Outputs:
        """Where all sizes put what they have `made`: a graph that kept its own would take memory from all others."""
        if self._outputs is None:
            hidden, logits = (each.new_empty((self.largest, *each.shape[1:])) for each in made)
            self._outputs = hidden, logits
        hidden, logits = self._outputs
        return hidden[:size], logits[:size]


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Torch raises `RuntimeError` where it would wait for the device. CUDA would do so too, but a capture that CUDA has
    ended leaves torch's stream, memory and generators in disorder for good."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
