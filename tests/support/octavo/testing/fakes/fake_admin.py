"""An Admin service that says what a test puts into it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services


class FakeAdmin(services.AdminServiceServicer):
    """A call gets what `answers` holds and what is put there later; None ends it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: asyncio.Queue[pb.WatchBlocksResponse | None] = asyncio.Queue()
        self.calls = 0
        self.open_calls = 0
        # What is told of a request, by its id, and which were asked for; questions wait while `may_explain` is clear.
        self.explanations: dict[str, list[pb.Explanation]] = {}
        self.explained: list[str] = []
        self.askers: list[str] = []
        self.explained_at: list[float] = []
        self.may_explain = asyncio.Event()
        self.may_explain.set()

    def put(self, waiting: int) -> None:
        """An answer that tells of so many requests."""
        self.answers.put_nowait(pb.WatchBlocksResponse(load=pb.GetLoadResponse(waiting=waiting)))

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: Any) -> None:
        self.calls += 1
        self.open_calls += 1
        try:
            while (answer := await self.answers.get()) is not None:
                await context.write(answer)
        finally:
            self.open_calls -= 1

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Any) -> pb.ExplainRequestResponse:
        self.explained.append(request.request_id)
        self.askers.append(request.asker)
        self.explained_at.append(asyncio.get_running_loop().time())
        await self.may_explain.wait()
        if request.request_id not in self.explanations:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request is held")
        return pb.ExplainRequestResponse(explanations=self.explanations[request.request_id])


@asynccontextmanager
async def fake_admin() -> AsyncIterator[FakeAdmin]:
    """One that serves inside the block."""
    # Not in pytest's directory, whose path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        admin, server = FakeAdmin(f"unix:{Path(directory)}/admin.sock"), grpc.aio.server()
        services.add_AdminServiceServicer_to_server(admin, server)
        server.add_insecure_port(admin.address)
        await server.start()
        yield admin
        await server.stop(None)
