"""Steps as CUDA graphs: captured once for each of some sizes, and replayed without launches."""

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

# Hidden states, and logits where a step makes them.
Outputs = tuple[Tensor, ...]


def graph_sizes(largest: int) -> list[int]:
    """Returns the batch sizes that are captured: close enough that padding costs little beside reading the weights."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1025, 64)]
    return [*(size for size in ladder if size < largest), largest]


def chunk_sizes(largest: int) -> list[int]:
    """Returns the numbers of tokens for which steps with chunks of prompts are captured; none where `largest` is 0. A
    step of so few tokens takes the time of reading the weights, so padding up to the next costs little."""
    ladder = [32, 64, *range(128, 513, 64), *range(640, 2049, 128)]
    return [*(size for size in ladder if size < largest), largest] if largest else []


class CapturePlace:
    """Holds the one stream and the one pool of memory for all graphs of a device: libraries keep a workspace for every
    stream that they have seen, and graphs that are replayed one after the other may share memory.

    The device `is_watched` if other threads of this process ask it what is done, as torch's watchdog of NCCL does:
    CUDA would else end a capture for that.
    """

    def __init__(self, device: torch.device, *, is_watched: bool = False) -> None:
        self.device = device
        self.error_mode = "thread_local" if is_watched else "global"
        self.pool: Any = None
        self._stream: Any = None

    @property
    def stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream


class GraphReplay(Protocol):
    """Replays the graph of one captured batch size."""

    def __call__(self) -> Outputs: ...


class StepGraphs:
    """Computes `compute(size)` for the padded `sizes`, in rising order, as graphs if `captured`.

    `compute` queues a step over buffers that stay where they are, waits for nothing, and returns tensors that the next
    replay of any size overwrites.
    """

    def __init__(
        self, compute: Callable[[int], Outputs], sizes: list[int], place: CapturePlace, *, captured: bool
    ) -> None:
        self._compute = compute
        self._sizes = sizes
        self._place = place
        self._captured = captured
        self._replays: dict[int, GraphReplay] = {}
        self._outputs: Outputs | None = None

    @property
    def largest(self) -> int:
        """Returns the largest size, 0 if there is none."""
        return self._sizes[-1] if self._sizes else 0

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
                self.capture(size)
                logger.info("captured the step of %d tokens (%d of %d)", size, done + 1, len(self._sizes))

    def capture(self, size: int) -> None:
        """Captures one of the sizes, the largest before all others."""
        self._replays[size] = self._capture(size)

    def drop(self) -> None:
        """Forgets the captured graphs, because something that they read has moved."""
        self._replays.clear()
        # Torch takes a pool that no graph has any more for a fault if it still holds a library's workspace.
        self._place.pool = None

    def _capture(self, size: int) -> GraphReplay:
        if not self._captured:
            return lambda: self._compute(size)
        place, stream = self._place, self._place.stream
        stream.wait_stream(torch.cuda.current_stream(place.device))
        # Kernels are compiled and libraries make their workspaces before: neither can be captured.
        with torch.cuda.stream(stream):
            outputs = self._room_for(self._compute(size))
        torch.cuda.current_stream(place.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _recorded(graph, place):
            for kept, made in zip(outputs, self._compute(size), strict=True):
                kept.copy_(made)
        place.pool = place.pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _room_for(self, made: Outputs) -> Outputs:
        """Returns the tensors where all sizes put their outputs: a graph with outputs of its own would take memory from
        the others. The largest size is captured first."""
        if self._outputs is None:
            self._outputs = tuple(each.new_empty(each.shape) for each in made)
        return tuple(kept[: len(each)] for kept, each in zip(self._outputs, made, strict=True))


@contextmanager
def _recorded(graph: "torch.cuda.CUDAGraph", place: CapturePlace) -> Iterator[None]:
    """Records the work that is queued within the block into `graph`, and makes the stream from before current again.

    Torch leaves the stream of `place` current where it cannot end a capture.
    """
    before = torch.cuda.current_stream(place.device)
    capture = torch.cuda.graph(graph, pool=place.pool, stream=place.stream, capture_error_mode=place.error_mode)
    try:
        with _expecting(_EXPECTED_WARNINGS), capture, waiting_refused():
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
