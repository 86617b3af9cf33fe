"""Serves jobs as they arrive, by the production scheduler's core and a real runner in this process."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.bench.in_process import ONE_STEP, LocalReplica
from octavo.bench.parts.scheduler_alone import make_request
from octavo.loadgen.servers import AnswerRecorder, Record
from octavo.loadgen.session import LoadRun
from octavo.scheduler.core.config import SchedulerConfig
from octavo.wire.costs import StepCosts
from octavo.wire.requests import Delta, Prefix
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.worker.runner import Runner
from octavo.workload.job import Job, prompt_token_ids
from octavo.workload.measures import Summary, summarise
from octavo.workload.synthetic import DATASETS, Dataset, Lengths, LogNormal


def scaled(name: str, scale: float) -> Dataset:
    """Returns the dataset of that name with `scale` times its lengths: means and bounds."""
    dataset = DATASETS[name]
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{name} has no lengths of its own that could be scaled")
    inputs, outputs = (_scaled(lengths, scale) for lengths in (dataset.inputs, dataset.outputs))
    return replace(dataset, inputs=inputs, outputs=outputs, max_total=round(dataset.max_total * scale))


def _scaled(lengths: Lengths, scale: float) -> Lengths:
    if not isinstance(lengths, LogNormal):
        raise ValueError(f"{lengths} cannot be scaled")
    return replace(lengths, mean=lengths.mean * scale, high=round(lengths.high * scale))


class Live:
    """Runs one replica with its scheduler; a later run finds what earlier runs left in the prefix cache."""

    def __init__(self, runner: Runner, config: SchedulerConfig = ONE_STEP, costs: StepCosts | None = None) -> None:
        self.engine = LocalReplica(runner, self._hear, config, costs)
        self._vocab_size = runner.model.vocab_size
        self._answers: dict[str, AnswerRecorder] = {}
        self._left: dict[str, int] = {}

    def serve_drawn(self, jobs: Sequence[Job], seed: int, after_step: Callable[[], None] | None = None) -> LoadRun:
        """Serves `jobs` with prompts of random tokens."""
        prompts = [prompt_token_ids(job, index, self._vocab_size, seed) for index, job in enumerate(jobs)]
        return self.serve(jobs, prompts, after_step)

    def serve(
        self, jobs: Sequence[Job], prompts: Sequence[list[int]], after_step: Callable[[], None] | None = None
    ) -> LoadRun:
        """Serves each job, in order of arrival, with its prompt; until all are done."""
        engine, began = self.engine, self.engine.now()
        run = LoadRun([Record(job) for job in jobs])
        coming = deque(enumerate(zip(run.records, prompts, strict=True)))
        while coming or not engine.is_idle:
            now = engine.now() - began
            while coming and coming[0][1][0].job.arrival_s <= now:
                index, (record, prompt) = coming.popleft()
                answer = AnswerRecorder(record, run.gaps, lambda: engine.now() - began)
                self._submit(str(index), answer, prompt)
            if engine.is_idle:
                time.sleep(max(0.0, coming[0][1][0].job.arrival_s - (engine.now() - began)))
                continue
            engine.step()
            if after_step:
                after_step()
        run.seconds = engine.now() - began
        return run

    def pin(self, name: str, token_ids: list[int]) -> None:
        """Computes a prefix and keeps it."""
        self.engine.pin(Prefix(name, token_ids))
        while not self.engine.replica.kv.num_pinned:
            self.engine.step()

    def _submit(self, request_id: str, answer: AnswerRecorder, prompt: list[int]) -> None:
        job = answer.record.job
        answer.record.sent_s = job.arrival_s
        self._answers[request_id], self._left[request_id] = answer, job.n
        self.engine.submit(make_request(request_id, prompt, _sampling(job), self.engine.fingerprint))

    def _hear(self, delta: Delta) -> None:
        answer = self._answers[delta.request_id]
        if delta.token_ids:
            answer.tokens(delta.sequence_index, len(delta.token_ids))
        record = answer.record
        record.preemptions, record.cached_tokens = delta.preemptions, delta.cached_prompt_tokens
        if delta.finish_reason is not None:
            self._left[delta.request_id] -= 1
            if not self._left[delta.request_id]:
                answer.end()


def _sampling(job: Job) -> SamplingParams:
    """Makes sampling parameters without any token that ends a sequence before its length."""
    if job.beam_width:
        beam = BeamSearch(job.beam_width, length_penalty=1.0, early_stopping=EarlyStopping.OFF)
        return SamplingParams(max_tokens=job.output_tokens, num_sequences=job.n, beam=beam)
    return SamplingParams(max_tokens=job.output_tokens, num_sequences=job.n, temperature=float(job.n > 1), seed=1)


def summed_up(run: LoadRun) -> Summary:
    """Raises `RuntimeError` if a request failed or got fewer tokens than it asked for: then the figures are worth
    nothing."""
    for record in run.records:
        if record.failure or record.is_short or record.finished_s is None:
            raise RuntimeError(f"a request came to {record.num_tokens} tokens of {record.job}: {record.failure}")
    return summarise([record.served() for record in run.records], run.gaps, run.seconds)
