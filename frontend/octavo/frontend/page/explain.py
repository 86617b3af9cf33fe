"""Asks the scheduler's Admin service where single requests stand."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import grpc

from octavo.frontend.errors import NotFound, Overloaded, Reason
from octavo.frontend.page.feed import status_of, unreachable
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services

_TIMEOUT_S: Final = 5.0
# Between two questions of this frontend: for each answer the scheduler plans its workers' next steps, in time that its
# requests lack.
_PAUSE_S: Final = 0.1
# Questions of one tenant that wait or are asked, so that no tenant keeps others from theirs.
_MOST_WAITING: Final = 4


class Explainer:
    """Asks one question at a time, and ten a second at most, whoever asks it to. Belongs to one event loop."""

    def __init__(self, admin_address: str) -> None:
        self._address = admin_address
        self._turn = asyncio.Lock()
        self._next_at = 0.0
        # By tenant.
        self._waiting: Counter[str] = Counter()

    async def explain(self, request_id: str, asker: str) -> Sequence[pb.Explanation]:
        """Returns an explanation for each request that the scheduler holds under that id, each of another frontend.

        `asker` is the tenant that asks. Raises `NotFound`, `Unavailable`; `Overloaded` for a tenant that asks too much.
        """
        if self._waiting[asker] >= _MOST_WAITING:
            raise Overloaded(
                Reason.TOO_MANY_REQUESTS,
                f"{_MOST_WAITING} explanations are under way for this tenant; wait for one of them",
                max=_MOST_WAITING,
            )
        self._waiting[asker] += 1
        try:
            async with self._turn:
                return await self._ask_in_time(request_id)
        finally:
            # Leaves out those that have none.
            self._waiting -= Counter([asker])

    async def _ask_in_time(self, request_id: str) -> Sequence[pb.Explanation]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._next_at - loop.time()))
        try:
            return await self._ask(request_id)
        finally:
            self._next_at = loop.time() + _PAUSE_S

    async def _ask(self, request_id: str) -> Sequence[pb.Explanation]:
        async with grpc.aio.insecure_channel(self._address) as channel:
            asked = pb.ExplainRequestRequest(request_id=request_id)
            try:
                answer = await services.AdminServiceStub(channel).ExplainRequest(asked, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise (_unknown(request_id) if error.code() is grpc.StatusCode.NOT_FOUND else unreachable()) from error
        explanations: Sequence[pb.Explanation] = answer.explanations
        return explanations


def _unknown(request_id: str) -> NotFound:
    return NotFound(
        Reason.REQUEST_NOT_FOUND,
        f"the scheduler holds no request {request_id[:128]!r}: it has ended, or has not come there yet",
        request_id=request_id[:128],
    )


def to_explanation(explanation: pb.Explanation, *, names_others: bool) -> dict[str, Any]:
    """Returns what the page's script reads. The ids of requests that are ahead are others', and named where that is
    allowed."""
    ahead = list(explanation.ahead_request_ids)
    return {
        **status_of(explanation.status),
        "queue_position": explanation.queue_position,
        "ahead": ahead if names_others else [],
        "steps": len(explanation.step_ids),
        "tokens_in_flight": explanation.tokens_in_flight,
        "obstacles": [_obstacle(obstacle) for obstacle in explanation.obstacles],
    }


def _obstacle(obstacle: pb.Obstacle) -> dict[str, Any]:
    return {
        "worker_id": obstacle.worker_id,
        "kind": pb.Obstacle.Kind.Name(obstacle.kind).removeprefix("KIND_").lower(),
        "needed": obstacle.needed,
        "available": obstacle.available,
    }
