"""The side of the other ranks: they hold a share of the model and of its cache, and do what the first rank sends
them."""

import torch
from torch import Tensor

from octavo.worker.health import Liveness
from octavo.worker.runner import DeviceLostError
from octavo.worker.step.forward import PagedModel
from octavo.worker.tensor_parallel.distributed import DistributedGroup
from octavo.worker.tensor_parallel.frames import Beat, Compute, EndFrame, Frame, Logits, Move, batch_of, decode


class Follower:
    """Computes this rank's share of every step. It knows no sequence, and chooses no token."""

    def __init__(self, model: PagedModel, group: DistributedGroup) -> None:
        self._model = model
        self._group = group
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def run(self, liveness: Liveness) -> None:
        """Carries out frames until the first rank ends; every frame is a turn of `liveness`.

        Raises `RankLostError` if the first rank ends without a word, `DeviceLostError` if a step fails here: without
        this rank no other can go on.
        """
        try:
            while not isinstance(frame := decode(self._group.receive_frame()), EndFrame):
                liveness.work()
                liveness.owe()
                self.do(frame)
                liveness.turn()
        except Exception as error:
            raise DeviceLostError(f"this rank failed in a step that the others compute: {error}") from error

    def do(self, frame: Frame) -> None:
        """Carries out one frame. Raises `FrameError` or `ValueError` on a frame that does not fit this rank."""
        match frame:
            case Move(moves):
                self._model.move(moves)
            case Compute():
                self._compute(frame)
            case Logits(first, last):
                self._take_logits(first, last)
            case Beat():
                self._group.exchange(0)
            case EndFrame():
                pass

    def _compute(self, frame: Compute) -> None:
        batch = batch_of(frame, self._model.num_groups, self._model.device)
        self._hidden = self._model.forward(batch, self._model.step(batch))
        self._take_logits(0, frame.num_choosing)

    def _take_logits(self, first: int, last: int) -> Tensor:
        return self._model.logits(self._hidden[first:last])
