"""The first rank's side: every forward pass is announced to the other ranks, which compute their shares beside it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from octavo.wire.steps import BlockMoves
from octavo.worker.runner import DeviceLostError
from octavo.worker.step.batch import Batch
from octavo.worker.tensor_parallel.distributed import DistributedGroup
from octavo.worker.tensor_parallel.frames import Beat, Compute, End, Frame, Logits, Move, compute_frame, encode


class Followers(Protocol):
    """Whom a step must be told of that this rank computes."""

    def move(self, moves: BlockMoves) -> None:
        """This rank has moved these blocks."""

    def computing(self, batch: Batch) -> AbstractContextManager[None]:
        """Within it, this rank runs the forward pass of `batch` and takes the logits of the rows to choose from."""

    def taking_logits(self, first: int, last: int) -> AbstractContextManager[None]:
        """Within it, this rank takes the logits of these of the wanted rows, too."""


class NoFollowers:
    """Those of a rank that is alone."""

    def move(self, moves: BlockMoves) -> None:
        """Nobody has other blocks."""

    def computing(self, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext()

    def taking_logits(self, first: int, last: int) -> AbstractContextManager[None]:
        return nullcontext()


NO_FOLLOWERS = NoFollowers()


class Leader:
    """Tells the other ranks of `group` what to do.

    Once they were told, they wait for this rank's part: what fails it then raises `DeviceLostError`, for the ranks are
    not together any more.
    """

    def __init__(self, group: DistributedGroup) -> None:
        self._group = group

    def move(self, moves: BlockMoves) -> None:
        if moves:
            self._tell(Move(moves))

    def computing(self, batch: Batch) -> AbstractContextManager[None]:
        return self._together(compute_frame(batch))

    def taking_logits(self, first: int, last: int) -> AbstractContextManager[None]:
        return self._together(Logits(first, last))

    def beat(self) -> None:
        """To be called several times while the others wait as long as they do. It waits for them: where one of them
        hangs, this rank is to look no better."""
        self._tell(Beat())
        self._group.exchange(0)

    def end(self) -> None:
        """Nothing more will be told."""
        self._tell(End())

    @contextmanager
    def _together(self, frame: Compute | Logits) -> Iterator[None]:
        self._tell(frame)
        try:
            yield
        except Exception as error:
            raise DeviceLostError(f"this rank failed in a step that the others compute: {error}") from error

    def _tell(self, frame: Frame) -> None:
        self._group.send_frame(encode(frame))
