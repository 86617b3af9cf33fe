"""Runs one system on one trace, described by everything that decides the result."""

import math
from statistics import fmean

from msgspec import Struct

from octavo.paper.accounting import MemoryProbe, Shares
from octavo.paper.setups import SETUPS, with_lengths
from octavo.paper.systems import run as run_system
from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.simulator.cell import Probe
from octavo.simulator.device import BEAM_GAP
from octavo.simulator.engine import SimulationOutcome
from octavo.wire.requests import Prefix
from octavo.workload.job import Job, prompt_token_ids
from octavo.workload.synthetic import Poisson, Workload


class SharingProbe:
    """Counts blocks at every sample from `skip_s` on: those taken, and those that would be if nothing were shared."""

    def __init__(self, skip_s: float = 0.0) -> None:
        self._skip_s = skip_s
        self._taken = self._unshared = 0

    def __call__(self, time: float, core: Scheduler) -> None:
        if time >= self._skip_s:
            for replica in core.replicas.values():
                self._taken += replica.kv.num_blocks - replica.kv.num_free
                self._unshared += sum(_unshared_blocks(replica, group) for group in replica.running)

    @property
    def saved(self) -> float | None:
        """Returns the blocks that sharing saved, as a share of what would be taken; None if nothing ever was."""
        return 1.0 - self._taken / self._unshared if self._unshared else None


def _unshared_blocks(replica: Replica, group: SequenceGroup) -> int:
    """A beam search is one sequence at first; its copies would be as many as its beams then too."""
    blocks = [len(replica.kv.block_table(sequence.placement.leader or sequence)[0]) for sequence in group.live]
    return sum(blocks) * group.parallel // len(blocks)


_SAMPLE_EVERY_S = 1.0
# Of a trace, the beginning in which the server fills.
_WARM_UP_SHARE = 0.1


class Trial(Struct, frozen=True):
    """Describes a run of `seconds` of requests at `rate` per second. It ends with that, or, if it is `drained`, when
    all are answered.

    Lengths are drawn from `dataset`, with `sigma` times its spread; every prompt has the same first `prefix_tokens`,
    kept computed if they are `pinned`. `blockwise_reads`: blocks cost time to read, beside their bytes. `preemption` is
    vLLM's (None: as it comes).
    """

    system: str
    setup: str
    dataset: str
    rate: float
    seconds: float
    n: int = 1
    beam_width: int = 0
    prefix_tokens: int = 0
    pinned: bool = False
    sigma: float = 1.0
    block_size: int = 16
    blockwise_reads: bool = False
    preemption: Preemption | None = None
    beam_gap: float = BEAM_GAP
    drained: bool = True
    seed: int = 0

    def jobs(self) -> list[Job]:
        lengths = with_lengths(self.dataset, self.sigma)
        return Workload(
            lengths,
            Poisson(self.rate),
            seconds=self.seconds,
            n=self.n,
            beam_width=self.beam_width,
            prefix_tokens=self.prefix_tokens,
        ).jobs(self.seed)


class TrialResult(Struct, frozen=True):
    """Holds the figures of a trial. `batched`: requests that ran, on average over the trace but for its beginning.
    `memory`: the shares while requests waited for memory (None: none did). `saved`: the share of blocks that sharing
    saved (None: nothing can be shared)."""

    requests: int
    failed: int
    normalised_latency_s: float
    batched: float
    output_tokens_per_s: float
    seconds: float
    steps: int
    preemptions: int
    swaps: int
    memory: Shares | None
    saved: float | None


def run(trial: Trial) -> TrialResult:
    """Simulates it. Raises `SimulationError`, and `ValueError` if it is so short that nothing comes of it."""
    warm_up_s = trial.seconds * _WARM_UP_SHARE
    memory = MemoryProbe(warm_up_s)
    sharing = SharingProbe(warm_up_s) if _shares(trial) else None
    spec = SETUPS[trial.setup].spec(trial.block_size, blockwise_reads=trial.blockwise_reads, beam_gap=trial.beam_gap)
    jobs = trial.jobs()
    if not jobs:
        raise ValueError(f"no request comes in {trial.seconds:g} s at {trial.rate:g} requests/s: make the trace longer")
    outcome = run_system(
        trial.system,
        spec,
        jobs,
        seed=trial.seed,
        sample_every_s=_SAMPLE_EVERY_S,
        probe=_until(trial.seconds, memory, sharing),
        horizon_s=math.inf if trial.drained else trial.seconds,
        preemption=trial.preemption,
        pinned=[_prefix(jobs[0], spec.vocab_size, trial.seed)] if trial.pinned else [],
    )
    return _result(outcome, warm_up_s, trial.seconds, memory, sharing)


def _shares(trial: Trial) -> bool:
    return trial.system == "vLLM" and (trial.n > 1 or trial.beam_width > 0)


def _until(end_s: float, *probes: Probe | None) -> Probe:
    """Returns a probe that calls all `probes` while requests still come."""
    present = [probe for probe in probes if probe is not None]

    def look(time: float, core: Scheduler) -> None:
        if time <= end_s:
            for probe in present:
                probe(time, core)

    return look


def _prefix(job: Job, vocab_size: int, seed: int) -> Prefix:
    """Returns the prefix of all jobs."""
    return Prefix(job.prefix, prompt_token_ids(job, 0, vocab_size, seed)[: job.prefix_tokens])


def _result(
    outcome: SimulationOutcome, warm_up_s: float, end_s: float, memory: MemoryProbe, sharing: SharingProbe | None
) -> TrialResult:
    latencies = [each.normalised_latency for each in outcome.served if each.normalised_latency is not None]
    if not latencies:
        raise ValueError(f"no request was answered within {end_s:g} s: make the trace longer, or let it drain")
    batched = [sample.running for sample in outcome.samples if warm_up_s <= sample.time <= end_s]
    return TrialResult(
        requests=len(outcome.served),
        failed=sum(bool(each.error) for each in outcome.served),
        normalised_latency_s=fmean(latencies),
        batched=fmean(batched) if batched else 0.0,
        output_tokens_per_s=sum(each.num_tokens for each in outcome.served) / max(outcome.seconds, 1e-9),
        seconds=outcome.seconds,
        steps=outcome.steps,
        preemptions=outcome.preemptions,
        swaps=outcome.swaps,
        memory=memory.saturated,
        saved=None if sharing is None else sharing.saved,
    )
