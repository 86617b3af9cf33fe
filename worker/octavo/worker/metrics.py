"""The worker's metrics: plain numbers that the main loop writes and that scrapers read on threads of their own."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.runtime.telemetry.numbers import SHORT_S, SIZES, Histogram, Tally, counter, counters, gauge
from octavo.wire.steps import FailureReason, StepOutcome, StepPlan, StepResult
from octavo.worker.block_disk import BlockDisk
from octavo.worker.runner import Runner


class WorkerMetrics(Collector):
    """Collects the worker's metrics: the main loop alone writes them, any thread reads them.

    Until `loaded` is called, there is no information about a model.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered_at = clock()
        self._about: dict[str, str] = {}
        self._blocks = self._cpu_blocks = 0
        self._disk: BlockDisk | None = None
        self._sequences = self._tokens = 0
        self._outcomes, self._failures = Tally(*StepOutcome), Tally(*FailureReason)
        self._stages = Tally("prepare", "model", "sample")
        self._step_s, self._step_tokens = Histogram(SHORT_S), Histogram(SIZES)

    def loaded(self, worker_id: str, runner: Runner, disk: BlockDisk | None = None) -> None:
        """Records the model and the sizes of the loaded `runner`, and its disk if there is one."""
        self._disk = disk
        model = runner.model
        self._blocks, self._cpu_blocks = runner.num_blocks, runner.num_cpu_blocks
        self._about = {"worker": worker_id, "device": runner.device, "model": model.name, "dtype": model.dtype}

    def received(self, plan: StepPlan) -> None:
        """Counts the tokens of a received `plan`."""
        num_tokens = sum(work.num_tokens for work in plan.work)
        self._tokens += num_tokens
        self._step_tokens.observe(num_tokens)

    def answered(self, result: StepResult, num_sequences: int) -> None:
        """Counts the `result` of a plan, after which the worker holds `num_sequences` sequences."""
        self._answered_at = self._clock()
        self._sequences = num_sequences
        self._outcomes.add(result.outcome.value)
        for failure in result.failed:
            self._failures.add(failure.reason.value)
        if result.outcome is StepOutcome.DONE:
            times = result.times
            stages = {"prepare": times.prepare_us, "model": times.model_us, "sample": times.sample_us}
            for stage, microseconds in stages.items():
                self._stages.add(stage, microseconds / 1e6)
            self._step_s.observe(sum(stages.values()) / 1e6)

    def collect(self) -> Iterator[Metric]:
        if about := self._about:
            yield gauge("octavo_worker_model_info", "Always 1; the labels say what is computed where.", 1, about)
        yield gauge("octavo_worker_kv_blocks", "KV blocks on the device.", self._blocks)
        yield gauge("octavo_worker_cpu_kv_blocks", "KV blocks in CPU memory to swap to.", self._cpu_blocks)
        if self._disk is not None:
            ends = [((end,), float(count)) for end, count in sorted(self._disk.stats().counts.items())]
            yield counters("octavo_worker_disk_moves", "Blocks read and written, by how it ended.", ["end"], ends)
        yield gauge("octavo_worker_sequences", "Sequences held, after the last step.", self._sequences)
        yield self._outcomes.family("octavo_worker_steps", "Steps answered, by how they ended.", "outcome")
        yield self._failures.family("octavo_worker_failed_sequences", "Sequences that could not go on.", "reason")
        yield counter("octavo_worker_tokens", "Tokens of the steps that came.", self._tokens)
        yield self._stages.family("octavo_worker_stage_seconds", "Time of steps that were done, by stage.", "stage")
        yield self._step_s.family("octavo_worker_step_seconds", "Of a step that was done.")
        yield self._step_tokens.family("octavo_worker_step_tokens", "Tokens of a step.")
        age = self._clock() - self._answered_at
        yield gauge("octavo_worker_last_step_age_seconds", "Since the last answer to a step, or the start.", age)
