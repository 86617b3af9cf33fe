"""Runs a client process that is to be killed: it asks for many streams at once, and reads them until it dies.

It writes a line once every stream has begun.
"""

import asyncio
import sys
from random import Random
from typing import Any

import grpc

from octavo.testbed.stack import token_request
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_TIMEOUT_S = 120.0


def endless(random: Random, name: str, num_tokens: int) -> pb.GenerateRequest:
    """Makes a request that nobody waits out."""
    request = token_request(random.choices(range(250), k=random.randint(8, 30)), num_tokens, request_id=name)
    request.sampling.temperature = 1.0
    request.sampling.seed = random.getrandbits(32)
    request.sampling.num_sequences = random.choice((1, 1, 1, 2))
    return request


async def _read(stub: Any, request: pb.GenerateRequest, begun: asyncio.Semaphore) -> None:
    async for response in stub.Generate(request, timeout=_TIMEOUT_S):
        if response.HasField("delta"):
            begun.release()


async def _main(address: str, first: str, count: int, num_tokens: int) -> None:
    random, begun = Random(first), [asyncio.Semaphore(0) for _ in range(count)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = services.GenerationServiceStub(channel)
        requests = [endless(random, f"{first}-{number}", num_tokens) for number in range(count)]
        streams = [asyncio.create_task(_read(stub, *each)) for each in zip(requests, begun, strict=True)]
        for each in begun:
            await each.acquire()
        print("begun", flush=True)
        await asyncio.gather(*streams)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
