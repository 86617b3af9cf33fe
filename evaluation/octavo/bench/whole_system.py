"""Through all processes: a gRPC client on the same machine, as users have it."""

import asyncio
import os
import time

import grpc

from octavo.bench.measurement import Measurement, Stream, measured
from octavo.bench.whole.processes import Meter
from octavo.bench.workloads import Case, Job
from octavo.testbed.stack import Stack
from octavo.v1 import admin_pb2, generation_pb2, generation_pb2_grpc


def run(stack: Stack, case: Case) -> Measurement:
    """All of the case's requests, sent at once."""
    before = stack.load()
    meter = Meter({"client": os.getpid(), **{name: process.pid for name, process in stack.processes.items()}})
    wall, streams = asyncio.run(_send_all(stack.address, case))
    cpu, load = meter.cpu_s(), stack.load()
    times, times_before = _times(load), _times(before)
    return measured(
        case,
        wall,
        streams,
        load.workers[0].steps - before.workers[0].steps,
        {stage: (times[stage] - times_before[stage]) / 1e6 for stage in times},
        cpu,
    )


async def _send_all(address: str, case: Case) -> tuple[float, list[Stream]]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await channel.channel_ready()
        began = time.perf_counter()
        streams = await asyncio.gather(*(_receive(stub, job, began) for job in case.jobs))
        return time.perf_counter() - began, streams


async def _receive(stub: generation_pb2_grpc.GenerationServiceStub, job: Job, began: float) -> Stream:
    stream = Stream()
    async for event in stub.Generate(_request(job)):
        stream.arrived(len(event.delta.token_ids), time.perf_counter() - began)
    return stream


def _request(job: Job) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=job.prompt_token_ids),
        sampling=generation_pb2.SamplingParams(
            temperature=job.temperature, top_k=0, top_p=1.0, num_sequences=job.num_sequences, seed=1
        ),
        stopping=generation_pb2.StoppingCriteria(max_new_tokens=job.num_tokens, ignore_eos=True),
        response=generation_pb2.ResponseOptions(text=True, token_ids=True),
    )


def _times(load: admin_pb2.GetLoadResponse) -> dict[str, int]:
    times = load.workers[0].times
    return {"prepare": times.prepare_us, "model": times.model_us, "sample": times.sample_us}
