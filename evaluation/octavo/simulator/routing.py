"""Routes requests to cells by the frontends' rule, with what one frontend would know of the cells' loads."""

from collections.abc import Sequence
from typing import Final

from octavo.frontend.scheduler.prefix_router import CellLoad, PrefixRouter
from octavo.simulator.shard import Standing
from octavo.wire.requests import Request, answer_work

# How often a scheduler tells what it has to do.
_REPORTED_EVERY_S: Final = 1.0


class CellRoute:
    """Routes as a frontend before `num_cells` cells would: it knows the work that they reported in this second and what
    it has sent to them since, and nothing of what has ended since."""

    def __init__(self, num_cells: int) -> None:
        self._router = PrefixRouter(num_cells)
        self._work = [0] * num_cells
        self._reported_in = -1.0

    def __call__(self, request: Request, now: float, cells: Sequence[Standing]) -> int:
        if (second := now // _REPORTED_EVERY_S) != self._reported_in:
            self._reported_in = second
            self._work = [cell.work_tokens for cell in cells]
        loads = [CellLoad(cell.num_replicas, work) for cell, work in zip(cells, self._work, strict=True)]
        chosen = self._router.choose(request.prompt_token_ids, request.cache_key, loads)
        assert chosen is not None, "every cell has replicas"
        sampling = request.sampling
        self._work[chosen] += len(request.prompt_token_ids) + sampling.parallel * answer_work(sampling.max_tokens, 0)
        return chosen
