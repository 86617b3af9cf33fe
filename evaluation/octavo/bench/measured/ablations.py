"""Measures what each choice of the design is worth, on real processes: one setting is changed at a time.

Variants that are compared are all started, and then take turns, so that what drifts on the machine meets them alike. A
ratio is that of two runs of the same round, with the same requests. They come somewhat faster than they can be served,
and begin with one of a few system prompts; where ways of preemption are compared, they outgrow the KV memory.
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.bench.measured.experiment import DEFAULT_BLOCK_SIZE, Findings, Options, Value
from octavo.bench.measured.live import scaled, summed_up
from octavo.loadgen.grpc_transport import GrpcTransport
from octavo.loadgen.servers import Asking, Secrets, ServerAddress
from octavo.loadgen.session import LoadRun, OpenLoop
from octavo.testbed.stack import Stack
from octavo.workload.job import Job
from octavo.workload.measures import Spread, Summary
from octavo.workload.synthetic import AtOnce, Poisson, Workload

_TIMEOUT_S = 300.0
# Of what the default sustains when all requests come at once.
_LOAD = 1.5


@dataclass(frozen=True)
class _Variant:
    """Settings of the processes, which are not the default's."""

    ablation: str
    name: str
    environment: dict[str, str]
    block_size: int = DEFAULT_BLOCK_SIZE


@dataclass(frozen=True)
class _Load:
    """ShareGPT's lengths times `scale`, each prompt behind one of four prefixes of `prefix_tokens`; `slots` is the KV
    memory in tokens, on the device and again on the CPU."""

    scale: float
    prefix_tokens: int
    slots: int
    num_requests: int

    def jobs(self, rate: float | None = None) -> list[Job]:
        return Workload(
            scaled("sharegpt", self.scale),
            Poisson(rate) if rate else AtOnce(),
            num_requests=self.num_requests,
            prefix_tokens=self.prefix_tokens,
            num_prefixes=4,
        ).jobs(seed=0)


_ROOMY = _Load(scale=0.25, prefix_tokens=64, slots=1280, num_requests=20)
_TIGHT = replace(_ROOMY, slots=640)
_QUICK = _Load(scale=0.06, prefix_tokens=16, slots=256, num_requests=3)
_DEFAULT = _Variant("default", "default", {})


@dataclass(frozen=True)
class Ring:
    """Variants that take turns with the default, all under the same load."""

    load: _Load
    variants: list[_Variant]
    rounds: int


def _block_size(size: int) -> _Variant:
    return _Variant("block size", f"{size}", {}, block_size=size)


def _preemption(name: str) -> _Variant:
    return _Variant("preemption", name, {"OCTAVO_PREEMPTION": name})


_SCHEDULING = [
    _Variant("prefix cache", "off", {"OCTAVO_PREFIX_CACHE": "false"}),
    _Variant("policy", "paper", {"OCTAVO_POLICY": "paper"}),
    _Variant("steps in flight", "1", {"OCTAVO_MAX_STEPS_IN_FLIGHT": "1"}),
]
RINGS = [
    Ring(_ROOMY, _SCHEDULING, rounds=3),
    Ring(_TIGHT, [_preemption(name) for name in ("swap", "recompute", "measured")], rounds=3),
    Ring(_ROOMY, [_block_size(size) for size in (32, 64, 128, 256)], rounds=3),
    # These are computed by torch, and take long.
    Ring(_ROOMY, [_block_size(size) for size in (1, 2, 4, 8)], rounds=1),
]
_QUICK_RINGS = [Ring(_QUICK, [_preemption("swap")], rounds=1)]


def measure(options: Options) -> Iterator[Findings]:
    """Measures all variants and yields one table."""
    rings = _QUICK_RINGS if options.quick else RINGS
    rows = [row for ring in rings for row in _ring_rows(options, ring)]
    load = rings[0].load
    yield Findings(
        name="ablations",
        title="One setting changed at a time, on real processes",
        machine=options.machine,
        settings={
            "model": options.model_name,
            "dataset": "sharegpt",
            "scale": load.scale,
            "prefix_tokens": load.prefix_tokens,
            "requests": load.num_requests,
        },
        notes=[
            f"The default: blocks of {DEFAULT_BLOCK_SIZE}, auto preemption, prefix cache, chunked policy, two steps in"
            " flight. It runs again among each group of variants; throughput_x and latency_x are over its runs there.",
            "Single sequences are recomputed by auto preemption. Blocks of fewer than 16 tokens are computed by torch.",
        ],
        rows=rows,
    )


def _ring_rows(options: Options, ring: Ring) -> list[dict[str, Value]]:
    summaries: dict[str, list[Summary]] = {}
    load, variants = ring.load, [_DEFAULT, *ring.variants]
    with ExitStack() as stacks:
        directory = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
        running = [
            stacks.enter_context(_stack(options, each, load, directory / str(i))) for i, each in enumerate(variants)
        ]
        for stack in running:
            stack.start_all()
            asyncio.run(_run(stack, load.jobs()[:2], seed=-1))
        rate = _LOAD * summed_up(asyncio.run(_run(running[0], load.jobs(), seed=-2))).requests_per_s
        for seed in range(ring.rounds):
            for variant, stack in zip(variants, running, strict=True):
                summary = summed_up(asyncio.run(_run(stack, load.jobs(rate), seed)))
                summaries.setdefault(variant.name, []).append(summary)
                print(f"{variant.ablation} {variant.name}: {summary.seconds:.1f} s", file=sys.stderr, flush=True)
    base = summaries[_DEFAULT.name]
    asked: dict[str, Value] = {"slots": load.slots, "rate_per_s": rate}
    return [_row(each, asked, summaries[each.name], base) for each in variants]


def _stack(options: Options, variant: _Variant, load: _Load, directory: Path) -> Stack:
    environment = {
        "OCTAVO_DTYPE": options.dtype,
        "OCTAVO_THREADS": str(options.threads),
        "OCTAVO_BLOCK_SIZE": str(variant.block_size),
        "OCTAVO_NUM_BLOCKS": str(load.slots // variant.block_size),
        "OCTAVO_NUM_CPU_BLOCKS": str(load.slots // variant.block_size),
        **variant.environment,
    }
    return Stack(options.model, directory, environment)


async def _run(stack: Stack, jobs: list[Job], seed: int) -> LoadRun:
    """Sends all jobs when they are due, with prompts of this seed."""
    transport = GrpcTransport(ServerAddress.parse(stack.address), Asking(seed=seed, temperature=0.0), Secrets())
    await transport.open()
    try:
        return await OpenLoop(jobs, transport.prepare, timeout_s=_TIMEOUT_S).serve()
    finally:
        await transport.aclose()


def _row(variant: _Variant, asked: dict[str, Value], runs: list[Summary], base: list[Summary]) -> dict[str, Value]:
    throughputs, base_throughputs = ([each.output_tokens_per_s for each in several] for several in (runs, base))
    latencies, base_latencies = (list(map(_latency_s, several)) for several in (runs, base))
    return {
        "ablation": variant.ablation,
        "setting": variant.name,
        "rounds": len(runs),
        **asked,
        "output_tokens_per_s": statistics.fmean(throughputs),
        "normalised_latency_ms": 1000 * statistics.fmean(latencies),
        **{
            f"{metric}_{point}_ms": 1000 * statistics.fmean(_point_s(each, metric, point) for each in runs)
            for metric in ("ttft", "itl")
            for point in ("p50", "p99")
        },
        "preemptions": statistics.fmean(each.preemptions for each in runs),
        "throughput_x": _median_ratio(throughputs, base_throughputs),
        "latency_x": _median_ratio(latencies, base_latencies),
    }


def _latency_s(summary: Summary) -> float:
    return _point_s(summary, "normalised_latency", "mean")


def _point_s(summary: Summary, metric: str, point: str) -> float:
    spread: Spread = getattr(summary, metric)
    return float(getattr(spread, point))


def _median_ratio(ours: list[float], base: list[float]) -> float:
    """Returns the median of the ratios of runs of the same round."""
    return statistics.median(mine / other for mine, other in zip(ours, base, strict=True))
