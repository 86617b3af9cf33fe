"""The side of the first rank: it sends every forward pass to the other ranks, which compute their shares beside it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from octavo.wire.steps import BlockMoves
from octavo.worker.runner import DeviceLostError
from octavo.worker.step.batch import Batch
from octavo.worker.tensor_parallel.distributed import DistributedGroup
from octavo.worker.tensor_parallel.frames import Beat, Compute, EndFrame, Frame, Logits, Move, compute_frame, encode


class Followers(Protocol):
    """Receives what this rank computes, for the other ranks."""

    def move(self, moves: BlockMoves) -> None:
        """Reports that this rank has moved these blocks."""

    def computing(self, batch: Batch) -> AbstractContextManager[None]:
        """Sends `batch` to the other ranks. Within the block this rank computes its forward pass and the logits of the
        rows to choose from."""

    def taking_logits(self, first: int, last: int) -> AbstractContextManager[None]:
        """Asks the other ranks for the logits of the wanted rows `first` to `last` - 1, which this rank takes within
        the block."""


class NoFollowers:
    """The `Followers` of a rank that is alone."""

    def move(self, moves: BlockMoves) -> None:
        """Does nothing: no other rank has blocks."""

    def computing(self, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext()

    def taking_logits(self, first: int, last: int) -> AbstractContextManager[None]:
        return nullcontext()


NO_FOLLOWERS = NoFollowers()


class Leader:
    """Sends the other ranks of `group` the work to do.

    After that they wait for this rank's part: an error in it then raises `DeviceLostError`, for the ranks are not
    together any more.
    """

    def __init__(self, group: DistributedGroup) -> None:
        self._group = group

    def move(self, moves: BlockMoves) -> None:
        if moves:
            self._send(Move(moves))

    def computing(self, batch: Batch) -> AbstractContextManager[None]:
        return self._together(compute_frame(batch))

    def taking_logits(self, first: int, last: int) -> AbstractContextManager[None]:
        return self._together(Logits(first, last))

    def beat(self) -> None:
        """Sends a sign of life and waits for the answers. Call it several times within the others' patience.

        If one of the others hangs, this rank hangs too and so looks no better.
        """
        self._send(Beat())
        self._group.exchange(0)

    def end(self) -> None:
        """Tells the other ranks that nothing more will be sent."""
        self._send(EndFrame())

    @contextmanager
    def _together(self, frame: Compute | Logits) -> Iterator[None]:
        self._send(frame)
        try:
            yield
        except Exception as error:
            raise DeviceLostError(f"this rank failed in a step that the others compute: {error}") from error

    def _send(self, frame: Frame) -> None:
        self._group.send_frame(encode(frame))
