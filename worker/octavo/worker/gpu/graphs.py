"""Decode steps as CUDA graphs: captured once for each of some batch sizes, and replayed without launches."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# What torch warns of where waiting is refused, once, and where a capture fails before anything was queued.
_EXPECTED_WARNINGS = ("Synchronization debug mode", "The CUDA Graph is empty")

# Hidden states and logits of a batch.
Outputs = tuple[Tensor, Tensor]


def graph_sizes(largest: int) -> list[int]:
    """Returns the batch sizes that are captured: close enough that padding costs little beside reading the weights."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1025, 64)]
    return [*(size for size in ladder if size < largest), largest]


class GraphReplay(Protocol):
    """Replays the graph of one captured batch size."""

    def __call__(self) -> Outputs: ...


class DecodeGraphs:
    """Computes `compute(size)` for padded batch sizes up to `largest`, as graphs if `captured`.

    `compute` queues a decode step over buffers that stay where they are, waits for nothing, and returns tensors that
    the next replay of any size overwrites.
    """

    def __init__(
        self, compute: Callable[[int], Outputs], largest: int, device: torch.device, *, captured: bool
    ) -> None:
        self._compute = compute
        self._sizes = graph_sizes(largest)
        self._device = device
        self._captured = captured
        self._replays: dict[int, GraphReplay] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._outputs: Outputs | None = None

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def padded(self, size: int) -> int:
        """Returns the captured size for a batch of `size`, at most `largest`."""
        return next(each for each in self._sizes if each >= size)

    def replay(self, size: int) -> Outputs:
        """Returns the outputs of a step of the padded `size`."""
        replay = self._replays.get(size)
        if replay is None:
            replay = self._replays[size] = self._capture(size)
        return replay()

    def capture_all(self) -> None:
        """Captures all sizes, the largest first: the smaller ones live in its memory."""
        if self._captured:
            for done, size in enumerate(reversed(self._sizes)):
                self._replays[size] = self._capture(size)
                logger.info("captured the decode step of %d sequences (%d of %d)", size, done + 1, len(self._sizes))

    def drop(self) -> None:
        """Forgets the captured graphs, because something that they read has moved."""
        self._replays.clear()
        # Torch takes a pool that no graph has any more for a fault if it still holds a library's workspace.
        self._pool = None

    def _capture(self, size: int) -> GraphReplay:
        if not self._captured:
            return lambda: self._compute(size)
        stream = self._own_stream()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        # Kernels are compiled and libraries make their workspaces before: neither can be captured.
        with torch.cuda.stream(stream):
            outputs = self._room_for(self._compute(size), size)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _recorded(graph, self._pool, stream):
            for kept, made in zip(outputs, self._compute(size), strict=True):
                kept.copy_(made)
        self._pool = self._pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _own_stream(self) -> Any:
        """Returns the one stream for all sizes: libraries keep a workspace for every stream that they have seen."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream

    def _room_for(self, made: Outputs, size: int) -> Outputs:
        """Returns the tensors where all sizes put their outputs: a graph with outputs of its own would take memory from
        the others."""
        if self._outputs is None:
            hidden, logits = (each.new_empty((self.largest, *each.shape[1:])) for each in made)
            self._outputs = hidden, logits
        hidden, logits = self._outputs
        return hidden[:size], logits[:size]


@contextmanager
def _recorded(graph: "torch.cuda.CUDAGraph", pool: Any, stream: Any) -> Iterator[None]:
    """Records the work that is queued within the block into `graph`, and makes the stream from before current again.

    Torch leaves `stream` current where it cannot end a capture.
    """
    before = torch.cuda.current_stream(stream.device)
    try:
        with _expecting(_EXPECTED_WARNINGS), torch.cuda.graph(graph, pool=pool, stream=stream), waiting_refused():
            yield
    finally:
        torch.cuda.set_stream(before)


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Makes torch raise `RuntimeError` within the block where it would wait for the device.

    CUDA would raise too, but a capture that CUDA has ended leaves torch's stream, memory and generators in disorder for
    good.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        # Torch warns after it has set the mode, which an error must not leave behind.
        with _expecting(_EXPECTED_WARNINGS):
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        with _expecting(_EXPECTED_WARNINGS):
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _expecting(messages: Iterable[str]) -> Iterator[None]:
    with warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message)
        yield
