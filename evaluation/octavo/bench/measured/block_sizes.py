"""Measures how long requests take by block size, at a fixed rate and with a fixed amount of KV memory (paper Fig.
18b)."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from octavo.bench.measured.experiment import DEFAULT_BLOCK_SIZE, Findings, Options, Value
from octavo.bench.measured.live import Live, scaled, summed_up
from octavo.workload.job import Job
from octavo.workload.measures import Summary
from octavo.workload.synthetic import AtOnce, Poisson, Workload

# Of what blocks of 16 tokens sustain when all requests come at once.
_LOAD = 0.7


@dataclass(frozen=True)
class _Traffic:
    """Describes requests with `scale` times the lengths of a dataset, for a pool of `slots` tokens."""

    dataset: str
    scale: float
    slots: int
    num_requests: int

    def workload(self, rate: float | None) -> Workload:
        arrivals = Poisson(rate) if rate else AtOnce()
        return Workload(scaled(self.dataset, self.scale), arrivals, num_requests=self.num_requests)


_TRAFFIC = (_Traffic("sharegpt", 0.25, 1536, 24), _Traffic("alpaca", 1.0, 1024, 32))
_QUICK_TRAFFIC = (_Traffic("sharegpt", 0.05, 256, 3), _Traffic("alpaca", 0.3, 256, 3))


@dataclass
class _Runs:
    """Holds the runs of one block size."""

    kernels: str = ""
    summaries: list[Summary] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def measure(options: Options) -> Iterator[Findings]:
    """Measures both datasets, at all block sizes in turns."""
    rows, settings = list[dict[str, Value]](), dict[str, Value]()
    for traffic in _QUICK_TRAFFIC if options.quick else _TRAFFIC:
        rate = _LOAD * _capacity(options, traffic)
        name = traffic.dataset
        settings |= {f"{name}_scale": traffic.scale, f"{name}_slots": traffic.slots, f"{name}_rate_per_s": rate}
        settings |= {f"{name}_requests": traffic.num_requests}
        rows += [_row(traffic, size, runs) for size, runs in _runs(options, traffic, rate).items()]
    yield Findings(
        name="block_sizes",
        title="Latency by block size at a fixed rate and amount of KV memory (paper Fig. 18b)",
        machine=options.machine,
        settings={"model": options.model_name, **settings},
        notes=[
            "over_default_x: normalised latency over that of blocks of 16 in the same round.",
            "Blocks of fewer than 16 tokens are computed by torch, not by our kernels, and are measured in one round.",
        ],
        rows=rows,
    )


def _capacity(options: Options, traffic: _Traffic) -> float:
    """Requests per second."""
    live = Live(options.runner(DEFAULT_BLOCK_SIZE, traffic.slots))
    jobs = traffic.workload(None).jobs(seed=0)
    live.serve_drawn(jobs[:2], seed=-1)
    return summed_up(live.serve_drawn(jobs, seed=0)).requests_per_s


def _runs(options: Options, traffic: _Traffic, rate: float) -> dict[int, _Runs]:
    """Goes up the sizes and down again, so that what drifts counts for all alike."""
    found = {size: _Runs() for size in options.block_sizes}
    jobs = traffic.workload(rate).jobs(seed=0)
    for seed in range(options.rounds(2)):
        sizes = [size for size in found if not seed or size >= DEFAULT_BLOCK_SIZE]
        for size in reversed(sizes) if seed % 2 else sizes:
            _run(options, traffic, jobs, seed, size, found[size])
        default = found[DEFAULT_BLOCK_SIZE].summaries[seed]
        for size in sizes:
            found[size].ratios.append(_latency_s(found[size].summaries[seed]) / _latency_s(default))
    return found


def _run(options: Options, traffic: _Traffic, jobs: list[Job], seed: int, size: int, runs: _Runs) -> None:
    runner = options.runner(size, traffic.slots)
    live = Live(runner)
    live.serve_drawn(traffic.workload(None).jobs(seed=1)[:2], seed=-1)
    running = list[int]()
    run = live.serve_drawn(jobs, seed, lambda: running.append(live.engine.replica.num_running_seqs))
    runs.kernels = runner.attention.name
    runs.summaries.append(summed_up(run))
    runs.running.append(fmean(running))
    print(f"block size {size}, {traffic.dataset}: {run.seconds:.1f} s", file=sys.stderr, flush=True)


def _row(traffic: _Traffic, size: int, runs: _Runs) -> dict[str, Value]:
    return {
        "dataset": traffic.dataset,
        "block_size": size,
        "kernel": runs.kernels,
        "rounds": len(runs.summaries),
        "normalised_latency_ms": 1000 * fmean(map(_latency_s, runs.summaries)),
        "over_default_x": fmean(runs.ratios),
        "running": fmean(runs.running),
        "preemptions": fmean(each.preemptions for each in runs.summaries),
    }


def _latency_s(summary: Summary) -> float:
    assert summary.normalised_latency is not None
    return summary.normalised_latency.mean
