"""Measures the throughput of translations that share an instruction with one example, or with five (paper Fig. 16)."""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.bench.measured.experiment import DEFAULT_BLOCK_SIZE, Findings, Options, Value
from octavo.bench.measured.live import Live, summed_up
from octavo.scheduler.core.config import SchedulerConfig
from octavo.worker.step.model_runner import ModelRunner
from octavo.workload.job import prompt_token_ids
from octavo.workload.synthetic import AtOnce, Dataset, LogNormal, Workload

# The paper gives the lengths of its two prefixes, but not those of the sentences.
_SENTENCES = Dataset("sentences", LogNormal(30.0, 0.5), LogNormal(30.0, 0.5))
_PREFIXES = {"one-shot": 80, "few-shot": 341}
_SLOTS, _REQUESTS = 4096, 48
_QUICK_REQUESTS = 4


@dataclass(frozen=True)
class _Variant:
    """Describes how a prefix is shared: under a name, by the prefix cache, or not."""

    name: str
    pins: bool
    caches: bool


_UNSHARED = _Variant("unshared", pins=False, caches=False)
_VARIANTS = (_UNSHARED, _Variant("pinned", pins=True, caches=False), _Variant("cached", pins=False, caches=True))


def measure(options: Options) -> Iterator[Findings]:
    """Measures both prefixes; the variants take turns."""
    runner = options.runner(DEFAULT_BLOCK_SIZE, _SLOTS)
    num_requests = _QUICK_REQUESTS if options.quick else _REQUESTS
    yield Findings(
        name="prefixes",
        title="Throughput of requests that share a prefix (paper Fig. 16)",
        machine=options.machine,
        settings={
            "model": options.model_name,
            "requests": num_requests,
            "slots": _SLOTS,
            "mean_sentence": _SENTENCES.inputs.mean,
            "mean_translation": _SENTENCES.outputs.mean,
        },
        notes=["over_unshared_x is over our own engine without sharing; the paper's 1.67 and 3.58 are over Orca."],
        rows=[
            row
            for name, length in _PREFIXES.items()
            for row in _rows(runner, name, length, num_requests, options.rounds(2))
        ],
    )


def _rows(runner: ModelRunner, prefix: str, length: int, num_requests: int, rounds: int) -> Iterator[dict[str, Value]]:
    workload = Workload(_SENTENCES, AtOnce(), num_requests=num_requests, prefix_tokens=length)
    rates: dict[_Variant, list[float]] = {variant: [] for variant in _VARIANTS}
    cached: dict[_Variant, float] = {}
    for seed in range(rounds):
        for variant in _VARIANTS:
            rate, cached[variant] = _run(runner, workload, variant, seed)
            rates[variant].append(rate)
            print(f"prefixes, {prefix} {variant.name}: {rate:.2f} requests/s", file=sys.stderr, flush=True)
    for variant, several in rates.items():
        ratios = [rate / base for rate, base in zip(several, rates[_UNSHARED], strict=True)]
        yield {
            "prefix": prefix,
            "prefix_tokens": length,
            "variant": variant.name,
            "requests_per_s": statistics.fmean(several),
            "cached_share": cached[variant],
            "over_unshared_x": statistics.fmean(ratios),
        }


def _run(runner: ModelRunner, workload: Workload, variant: _Variant, seed: int) -> tuple[float, float]:
    """Requests per second, and the share of prompt tokens that were not computed anew."""
    live = Live(runner, SchedulerConfig(max_steps_in_flight=1, prefix_caching=variant.caches))
    jobs = workload.jobs(seed=0)
    if variant.pins:
        first = prompt_token_ids(jobs[0], 0, runner.model.vocab_size, seed)
        live.pin("prefix", first[: workload.prefix_tokens])
    run = live.serve_drawn(jobs, seed)
    cached = sum(record.cached_tokens for record in run.records)
    return summed_up(run).requests_per_s, cached / sum(job.prompt_tokens for job in jobs)
