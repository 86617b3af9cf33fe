"""Simulates what each way of preemption costs, by transfer and prefill rates: `python -m
octavo.bench.parts.preemption_costs`.

A capacity simulation: the production scheduler over a pool that is too small, and a replica that computes nothing but
counts what its plans ask of it. A run's time follows from these counts and from rates; so one run of a fixed way is
priced at all rates, while `measured`, which knows them, runs once for each.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.bench.parts.scheduler_alone import SchedulerAlone, make_request
from octavo.bench.table import line
from octavo.scheduler.core.config import Preemption, SchedulerConfig
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts, attended_pairs
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.wire.steps import StepPlan

BLOCK_SIZE = 16
# That of an 8B model: 128 KiB per token.
_BLOCK_BYTES = BLOCK_SIZE << 17
_GB = 1e9
TRANSFER_RATES = (0.5, 5.0, 50.0)
# What `measured` may lose on the better one of recompute and swap.
GOAL = 1.1
_FIXED = (Preemption.RECOMPUTE, Preemption.SWAP, Preemption.AUTO)


@dataclass(frozen=True)
class ReplicaSpeed:
    """Describes a replica's prefill rate in tokens per second, and what a step takes that computes next to nothing."""

    name: str
    prefill_rate: float
    step_s: float

    def costs(self, transfer_rate: float) -> StepCosts:
        """Returns the costs of a machine with `transfer_rate` GB/s each way. After 16k tokens attention takes as long
        as the rest."""
        token_s = 1 / self.prefill_rate
        block_s = _BLOCK_BYTES / _GB / transfer_rate
        return StepCosts(PrefillCosts(self.step_s, token_s, token_s / (1 << 14)), SwapCosts(2e-5, block_s, block_s))


MACHINES = (ReplicaSpeed("CPU", 2_000, 0.008), ReplicaSpeed("GPU", 40_000, 0.004))


@dataclass(frozen=True)
class WaitingRequests:
    """Requests that all wait from the start, for a pool of `num_blocks`. Lengths are drawn evenly from their ranges;
    each prompt begins with `shared` tokens that all have in common."""

    name: str
    num_requests: int
    num_blocks: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0
    parallel: int = 1
    beams: int = 0

    def requests(self, alone: SchedulerAlone) -> Iterator[Request]:
        """Draws the requests, with the same lengths for every run."""
        rng, shared = random.Random(0), alone.draw_tokens(self.shared)
        for index in range(self.num_requests):
            prompt = shared + alone.draw_tokens(rng.randint(*self.prompt))
            yield make_request(str(index), prompt, self._sampling(rng.randint(*self.output)))

    def _sampling(self, max_tokens: int) -> SamplingParams:
        if self.beams:
            beam = BeamSearch(self.beams, length_penalty=1.0, early_stopping=EarlyStopping.OFF)
            return SamplingParams(max_tokens=max_tokens, num_sequences=self.beams, beam=beam)
        return SamplingParams(max_tokens=max_tokens, temperature=1.0, num_sequences=self.parallel)


WORKLOADS = (
    WaitingRequests("long prompts", 24, 200, prompt=(400, 1000), output=(100, 400)),
    WaitingRequests("long outputs", 40, 160, prompt=(20, 60), output=(150, 300)),
    WaitingRequests("shared prefix", 40, 120, prompt=(20, 100), output=(100, 200), shared=400),
    WaitingRequests("four samples", 20, 160, prompt=(100, 300), output=(60, 150), parallel=4),
    WaitingRequests("four beams", 20, 130, prompt=(100, 300), output=(50, 100), beams=4),
)


@dataclass
class ReplicaWork:
    """Counts the work that a run gave its replica. A step with moves one way counts once in `moving_steps` for each
    way."""

    steps: int = 0
    tokens: int = 0
    pairs: float = 0.0
    moving_steps: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    preemptions: int = 0
    swaps: int = 0
    _computed: dict[int, int] = field(default_factory=dict)

    def add(self, plan: StepPlan) -> None:
        """Counts a plan, which comes after those before it."""
        moves, computed = plan.moves, self._computed
        self.steps += bool(plan.work)
        self.moving_steps += bool(moves.swap_out) + bool(moves.swap_in)
        self.blocks_out += len(moves.swap_out)
        self.blocks_in += len(moves.swap_in)
        computed.update((start.sequence_id, start.num_computed) for start in plan.starts)
        for fork in plan.forks:
            computed[fork.sequence_id] = computed[fork.parent_id]
        for work in plan.work:
            self.tokens += work.num_tokens
            self.pairs += attended_pairs(computed[work.sequence_id], work.num_tokens, [0])
            for sequence_id in (work.sequence_id, *work.follower_ids):
                computed[sequence_id] += work.num_tokens

    def seconds(self, costs: StepCosts) -> float:
        """Returns the seconds that the replica takes for the work, one step after the other."""
        prefill, swap = costs.prefill, costs.swap
        computing = self.steps * prefill.step_s + self.tokens * prefill.token_s + self.pairs * prefill.pair_s
        moving = self.blocks_out * swap.block_out_s + self.blocks_in * swap.block_in_s
        return computing + moving + self.moving_steps * swap.moves_s


def run(workload: WaitingRequests, config: SchedulerConfig, costs: StepCosts | None = None) -> ReplicaWork:
    """Runs a workload to its end, with as many CPU blocks as there are others."""
    alone = SchedulerAlone(
        config,
        num_blocks=workload.num_blocks,
        block_size=BLOCK_SIZE,
        num_cpu_blocks=workload.num_blocks,
        costs=costs,
    )
    for request in workload.requests(alone):
        alone.submit(request)
    work = ReplicaWork()
    for plans in alone.run():
        for plan in plans:
            work.add(plan)
    work.preemptions, work.swaps = alone.core.preemptions, alone.core.swaps
    return work


@dataclass(frozen=True)
class CostCell:
    """Seconds that a workload takes on a machine with this transfer rate, by way of preemption; and how many of the
    measured run's preemptions swapped."""

    workload: WaitingRequests
    machine: ReplicaSpeed
    transfer_rate: float
    seconds: dict[Preemption, float]
    measured: ReplicaWork

    @property
    def over_best(self) -> float:
        """Returns the time of `measured` over the time of the better one of recompute and swap."""
        return self.seconds[Preemption.MEASURED] / min(self.seconds[p] for p in _FIXED[:2])


def cells(workload: WaitingRequests) -> Iterator[CostCell]:
    """Runs the workload on all machines, at all transfer rates."""
    fixed = {preemption: run(workload, _config(preemption)) for preemption in _FIXED}
    for machine in MACHINES:
        for transfer_rate in TRANSFER_RATES:
            costs = machine.costs(transfer_rate)
            measured = run(workload, _config(Preemption.MEASURED), costs)
            works = {**fixed, Preemption.MEASURED: measured}
            seconds = {preemption: work.seconds(costs) for preemption, work in works.items()}
            yield CostCell(workload, machine, transfer_rate, seconds, measured)


def _config(preemption: Preemption) -> SchedulerConfig:
    # Without a clock nothing may depend on how long something has waited.
    return SchedulerConfig(preemption=preemption, overtaking_s=0.0)


_WIDTHS = (16, 12, 12, *(12 for _ in Preemption), 10, 11)


def main() -> int:
    """Prints the table; exit status 1 if the goal is missed anywhere."""
    ways = (preemption.value for preemption in Preemption)
    print(line(("", "prefill", "transfers", *ways, "swapped", "over best"), _WIDTHS))
    worst = 0.0
    for workload in WORKLOADS:
        for cell in cells(workload):
            print(_row(cell), flush=True)
            worst = max(worst, cell.over_best)
    print(f"measured takes at most {worst:.3f} times what the better of recompute and swap takes; goal {GOAL}")
    return int(worst > GOAL)


def _row(cell: CostCell) -> str:
    seconds = (f"{cell.seconds[preemption]:.2f} s" for preemption in Preemption)
    swapped = f"{cell.measured.swaps}/{cell.measured.preemptions}"
    rates = f"{cell.machine.prefill_rate:.0f} t/s", f"{cell.transfer_rate:.1f} GB/s"
    return line((cell.workload.name, *rates, *seconds, swapped, f"{cell.over_best:.3f}"), _WIDTHS)


if __name__ == "__main__":
    sys.exit(main())
