"""Measures what it costs to take a sequence's blocks away and give them back, by swapping and by recomputing (paper
Fig. 19)."""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from octavo.bench.measured.experiment import DEFAULT_BLOCK_SIZE, Findings, Options, Value
from octavo.bench.measured.live import Live, scaled, summed_up
from octavo.scheduler.core.config import Preemption, SchedulerConfig
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.model_runner import ModelRunner
from octavo.workload.measures import Summary
from octavo.workload.synthetic import AtOnce, Workload

_TOKENS = 256
_SEQUENCE_ID = 1
_SCALE, _SLOTS, _REQUESTS = 0.25, 1024, 20
_QUICK_SCALE, _QUICK_SLOTS, _QUICK_REQUESTS = 0.06, 96, 6


def measure(options: Options) -> Iterator[Findings]:
    """Measures the overheads alone, then whole runs that preempt."""
    yield _overheads(options)
    yield _end_to_end(options)


# -- overheads --------------------------------------------------------------------------------------------------------


def _overheads(options: Options) -> Findings:
    runners = {size: options.runner(size, 2 * _TOKENS, 2 * _TOKENS) for size in options.block_sizes}
    calls = {size: _calls(runner) for size, runner in runners.items()}
    seconds = _race(calls, options.rounds(15))
    return Findings(
        name="preemption_overheads",
        title=f"Taking the blocks of {_TOKENS} tokens away and giving them back (paper Fig. 19a)",
        machine=options.machine,
        settings={"model": options.model_name, "tokens": _TOKENS, "rounds": options.rounds(15)},
        notes=["On a CPU both pools are in the same memory: a swap is a copy, and costs no transfer over a bus."],
        rows=[_overhead_row(size, runners[size], times) for size, times in seconds.items()],
    )


def _calls(runner: ModelRunner) -> dict[str, Callable[[], object]]:
    num_blocks = _TOKENS // runner.block_size
    # As in a pool that has been used for a while.
    device, cpu = (random.Random(name).sample(range(2 * num_blocks), num_blocks) for name in ("device", "cpu"))
    out = BlockMoves(swap_out=[BlockMove(*pair) for pair in zip(device, cpu, strict=True)])
    back = BlockMoves(swap_in=[BlockMove(*pair) for pair in zip(cpu, device, strict=True)])
    token_ids = [position % runner.model.vocab_size for position in range(_TOKENS)]
    sequence = WorkerSequence(_SEQUENCE_ID, 0, SamplingParams(max_tokens=1), _TOKENS, token_ids, 0, [device])

    def recompute() -> None:
        runner.execute(BlockMoves(), [WorkItem(sequence, 0, _TOKENS, ())])
        runner.forget([_SEQUENCE_ID])

    return {
        "out": lambda: runner.execute(out, []),
        "in": lambda: runner.execute(back, []),
        "recompute": recompute,
    }


def _race(calls: dict[int, dict[str, Callable[[], object]]], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Returns the seconds by block size and kind. A round before the others warms up."""
    seconds: dict[int, dict[str, list[float]]] = {size: {kind: [] for kind in kinds} for size, kinds in calls.items()}
    for _ in range(rounds + 1):
        for size, kinds in calls.items():
            for kind, call in kinds.items():
                began = time.perf_counter()
                call()
                seconds[size][kind].append(time.perf_counter() - began)
    return {size: {kind: times[1:] for kind, times in kinds.items()} for size, kinds in seconds.items()}


def _overhead_row(size: int, runner: ModelRunner, seconds: dict[str, list[float]]) -> dict[str, Value]:
    both = [out + back for out, back in zip(seconds["out"], seconds["in"], strict=True)]
    ratios = [swap / again for swap, again in zip(both, seconds["recompute"], strict=True)]
    return {
        "block_size": size,
        "kernel": runner.attention.name,
        "swap_out_ms": _median_ms(seconds["out"]),
        "swap_in_ms": _median_ms(seconds["in"]),
        "swap_both_ms": _median_ms(both),
        "recompute_ms": _median_ms(seconds["recompute"]),
        "swap_over_recompute_x": statistics.median(ratios),
    }


def _median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


# -- end to end -------------------------------------------------------------------------------------------------------


def _end_to_end(options: Options) -> Findings:
    scale, slots, num_requests = (
        (_QUICK_SCALE, _QUICK_SLOTS, _QUICK_REQUESTS) if options.quick else (_SCALE, _SLOTS, _REQUESTS)
    )
    workload = Workload(scaled("sharegpt", scale), AtOnce(), num_requests=num_requests)
    rows = [_end_to_end_row(options, workload, slots, size) for size in options.block_sizes if size <= slots // 4]
    return Findings(
        name="preemption",
        title="All requests at once, and too little memory: swapped or recomputed (paper Fig. 19b)",
        machine=options.machine,
        settings={
            "model": options.model_name,
            "dataset": "sharegpt",
            "scale": scale,
            "slots": slots,
            "requests": num_requests,
        },
        notes=["Without prefix cache, as in the paper: it would give recomputed requests much of what they had."],
        rows=rows,
    )


def _end_to_end_row(options: Options, workload: Workload, slots: int, size: int) -> dict[str, Value]:
    """Takes turns in the order swap, recompute, recompute, swap: what drifts counts for both alike."""
    runner = options.runner(size, slots, slots)
    order = (Preemption.SWAP, Preemption.RECOMPUTE)
    runs: dict[Preemption, list[Summary]] = {preemption: [] for preemption in order}
    for seed, preemption in enumerate(order if size < DEFAULT_BLOCK_SIZE else (*order, *reversed(order))):
        runs[preemption].append(_run(runner, workload, preemption, seed))
    swap, again = (_seconds(runs[preemption]) for preemption in order)
    print(f"preemption, block size {size}: {swap:.1f} s swapped, {again:.1f} s recomputed", file=sys.stderr, flush=True)
    return {
        "block_size": size,
        "kernel": runner.attention.name,
        "swap_s": swap,
        "recompute_s": again,
        "swap_normalised_latency_ms": _latency_ms(runs[Preemption.SWAP]),
        "recompute_normalised_latency_ms": _latency_ms(runs[Preemption.RECOMPUTE]),
        "swap_preemptions": runs[Preemption.SWAP][0].preemptions,
        "recompute_preemptions": runs[Preemption.RECOMPUTE][0].preemptions,
        "swap_over_recompute_x": swap / again,
    }


def _run(runner: ModelRunner, workload: Workload, preemption: Preemption, seed: int) -> Summary:
    config = SchedulerConfig(max_steps_in_flight=1, preemption=preemption, prefix_caching=False)
    return summed_up(Live(runner, config).serve_drawn(workload.jobs(seed=0), seed))


def _seconds(runs: list[Summary]) -> float:
    return statistics.fmean(each.seconds for each in runs)


def _latency_ms(runs: list[Summary]) -> float:
    return 1000 * statistics.fmean(each.normalised_latency.mean for each in runs if each.normalised_latency)
