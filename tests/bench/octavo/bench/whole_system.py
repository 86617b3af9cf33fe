"""Through all processes: a gRPC client on the same machine, as users have it."""

import asyncio
import os
import time
from pathlib import Path

import grpc

from octavo.bench.measurement import Measurement, Stream, measured
from octavo.bench.workloads import Case, Job
from octavo.testing.stack import Stack, token_request
from octavo.v1 import admin_pb2, generation_pb2, generation_pb2_grpc

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run(stack: Stack, case: Case) -> Measurement:
    """All of the case's requests, sent at once."""
    cpu_before, load_before = _cpu_seconds(stack), stack.load()
    wall, streams = asyncio.run(_send_all(stack.address, case))
    load, cpu = stack.load(), _cpu_seconds(stack)
    times, times_before = _times(load), _times(load_before)
    return measured(
        case,
        "through all processes",
        wall,
        streams,
        load.workers[0].steps - load_before.workers[0].steps,
        {stage: (times[stage] - times_before[stage]) / 1e6 for stage in times},
        {name: cpu[name] - cpu_before[name] for name in cpu},
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
    options = generation_pb2.ResponseOptions(text=True, token_ids=True)
    async for event in stub.Generate(token_request(job.prompt_token_ids, job.num_tokens, response=options)):
        stream.arrived(len(event.delta.token_ids), time.perf_counter() - began)
    return stream


def _times(load: admin_pb2.GetLoadResponse) -> dict[str, int]:
    times = load.workers[0].times
    return {"prepare": times.prepare_us, "model": times.model_us, "sample": times.sample_us}


def _cpu_seconds(stack: Stack) -> dict[str, float]:
    """By process, the client included; and all that ran beside them."""
    ours = {name: _process_cpu_s(process.pid) for name, process in stack.processes.items()}
    ours["client"] = _process_cpu_s(os.getpid())
    return {**ours, "others": _machine_cpu_s() - sum(ours.values())}


def _process_cpu_s(pid: int) -> float:
    # Fields 14 and 15 of proc(5)'s stat, counted after the parenthesised name.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _machine_cpu_s() -> float:
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
