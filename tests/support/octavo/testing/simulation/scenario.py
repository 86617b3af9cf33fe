"""Draws the scenario of a seed: a cluster that is always a little too small, clients, and faults, all at random."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from msgspec import structs

from octavo.scheduler.core.config import Policy, Preemption, SchedulerConfig
from octavo.testing.simulation.device import Hardware
from octavo.testing.simulation.disk import DiskPlan
from octavo.testing.simulation.faults import FAULTS, GENTLE, Fault
from octavo.testing.simulation.workload import MAX_POISONS, ClientPlan, Model, Workload
from octavo.wire.base import MAX_SEQUENCES
from octavo.wire.steps import WorkerRole
from octavo.worker.fake.config import read_eos_token_ids, read_positive
from octavo.worker.fake.faults import FakeFault
from octavo.worker.fake.runner import FakeVocabulary

_BUSY_S = 8.0
_EOS_PROBABILITY = 0.02
_MAX_PINNED_SHARE = 0.5
# Of a frontend that never gives a request up; others do before a scheduler may be back.
PATIENT_S = 60.0
_IMPATIENT_S = 6.0
# The share of runs with an endless client, and steps so slow that it is one.
_ENDLESS = 0.1
_ENDLESS_STEP_S = 0.1
# The shares of runs with a poisonous prompt, and of those in which the least that goes wrong is that.
_POISONED = 0.15
_NOTHING_ELSE = 0.5
# The share of runs whose model gives outputs of texts.
_POOLED = 0.12
# The share of workers that have memory for no more sequences than the widest request has.
_SHORT_OF_MEMORY = 0.1
# What workers have draft models for.
_DRAFT_MODELS: list[dict[str, Any]] = [{}, {"draft_model": "draft", "draft_hit_rate": 0.8}]


@dataclass(frozen=True)
class Scenario:
    """`faults` are by time; `poisons` are what some prompts do to devices; `step_s` is about how long a step takes;
    `grace_s` how long frontends wait for a scheduler; with `loses_aborts` they never tell it that a request is over.
    With `guesses_wildly` the scheduler's drafts are an adversary's.
    On `disk` workers keep blocks, if there is one; with `moves` they copy each other's. The first of
    the `roles` is that of the first worker, the other that of all others."""

    config: SchedulerConfig
    model: Model
    workers: list[Hardware]
    num_frontends: int
    prefixes: dict[str, list[int]]
    clients: list[ClientPlan]
    faults: list[tuple[float, Fault]]
    poisons: tuple[FakeFault, ...]
    step_s: float
    grace_s: float
    loses_aborts: bool
    guesses_wildly: bool
    disk: DiskPlan | None
    moves: bool
    roles: tuple[WorkerRole, WorkerRole]

    @property
    def is_calm(self) -> bool:
        """Tells whether nothing goes wrong."""
        return not self.faults and not self.poisons and not self.is_short_of_memory

    @property
    def is_short_of_memory(self) -> bool:
        """Tells whether some steps fail that are too large for a worker, and smaller ones do not."""
        return any(hardware.most_sequences < MAX_SEQUENCES for hardware in self.workers)

    @property
    def is_gentle(self) -> bool:
        """Tells whether nothing happens but what operators do to workers."""
        return not self.poisons and not self.is_short_of_memory and all(fault in GENTLE for _, fault in self.faults)


def draw(seed: int, directory: Path) -> Scenario:
    """Draws the scenario of a seed, with the fake model in `directory`."""
    random = Random(seed)
    windows = random.choice(((0,), (0,), (0,), (0, 8), (6,), (3, 10)))
    pooling = _pooling(Random(f"pooling {seed}"))
    model = replace(_model(directory, windows), pooling=pooling)
    num_frontends = random.choice((1, 1, 2))
    workload = Workload(random, model, num_frontends, _BUSY_S)
    # Where an output is made of all tokens a prefix is of no use, and none is pinned.
    usable = [] if pooling == "mean" else workload.prefixes
    prefixes = {f"prefix-{i}": prefix for i, prefix in enumerate(usable)}
    is_calm = random.random() < 0.1
    clients = workload.clients(random.randint(4, 14), impatient=0.3)
    is_poisoned = not is_calm and random.random() < _POISONED
    poisoned = [workload.poison(number) for number in range(random.randint(1, MAX_POISONS))] if is_poisoned else []
    clients += [plan for plan, _ in poisoned]
    is_calm = is_calm or (is_poisoned and random.random() < _NOTHING_ELSE)
    step_s = random.choice((0.01, 0.04, 0.1))
    if random.random() < _ENDLESS:
        clients.append(workload.endless())
        step_s = _ENDLESS_STEP_S
    if pooling != "none":
        clients = [client.pooled() for client in clients]
        poisoned = [(plan, replace(fault, generated=0)) for plan, fault in poisoned]
    # Drawn apart, so that runs with and without drafts are alike.
    apart = Random(f"drafts {seed}")
    speculation, guesses_wildly = apart.choice(("auto", "off", 2, 8, 8)), apart.random() < 0.6
    return Scenario(
        config=structs.replace(_config(random), speculation=speculation),
        model=model,
        workers=[
            replace(hardware, **apart.choice(_DRAFT_MODELS if pooling == "none" else [{"pooling": pooling}]))
            for hardware in _workers(random, model, windows, clients, list(prefixes.values()))
        ],
        num_frontends=num_frontends,
        prefixes=prefixes,
        clients=clients,
        faults=[] if is_calm else _faults(random, workload.rushes),
        poisons=tuple(fault for _, fault in poisoned),
        step_s=step_s,
        grace_s=random.choice((PATIENT_S, PATIENT_S, PATIENT_S, _IMPATIENT_S)),
        loses_aborts=random.random() < (0.5 if is_calm else 0.2),
        guesses_wildly=guesses_wildly,
        disk=_disk(Random(f"disk {seed}")),
        moves=Random(f"moves {seed}").random() < 0.7,
        roles=_roles(Random(f"roles {seed}")),
    )


def _pooling(random: Random) -> str:
    return random.choice(("last", "mean")) if random.random() < _POOLED else "none"


def _roles(random: Random) -> tuple[WorkerRole, WorkerRole]:
    apart = WorkerRole.PREFILL, WorkerRole.DECODE
    return apart if random.random() < 0.4 else (WorkerRole.BOTH, WorkerRole.BOTH)


def _disk(random: Random) -> DiskPlan | None:
    if random.random() < 0.4:
        return None
    stuck_at = random.uniform(0.0, _BUSY_S)
    return DiskPlan(
        mirror=random.random() < 0.6,
        read_s=random.choice((0.001, 0.05, 0.5)),
        drop_rate=random.choice((0.0, 0.0, 0.3)),
        miss_rate=random.choice((0.0, 0.0, 0.2)),
        stuck=(stuck_at, stuck_at + random.choice((0.0, 0.0, 3.0, 15.0))),
    )


def _model(directory: Path, windows: tuple[int, ...]) -> Model:
    eos = tuple(sorted(read_eos_token_ids(directory)))
    vocabulary = FakeVocabulary(read_positive(directory, "vocab_size"), eos, _EOS_PROBABILITY)
    return Model(directory, vocabulary, 0 if 0 in windows else max(windows))


def _config(random: Random) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=random.choice((4, 16, 64, 64)),
        max_num_seqs=random.choice((4, 16, 64, 64)),
        max_waiting=random.choice((4, 100, 100, 100)),
        max_steps_in_flight=random.choice((1, 2, 2)),
        watermark=random.choice((0.0, 0.01, 0.1)),
        policy=random.choice((Policy.CHUNKED, Policy.CHUNKED, Policy.PAPER)),
        preemption=random.choice((Preemption.AUTO, Preemption.RECOMPUTE, Preemption.SWAP, Preemption.MEASURED)),
        delay_factor=random.choice((0.0, 0.5)),
        priority_ageing_s=random.choice((0.0, 10.0)),
        overtaking_s=random.choice((0.0, 1.0)),
        drain_grace_s=random.choice((0.0, 0.5, 3.0)),
        tenant_weights=random.choice(({}, {"acme": 3.0})),
        prefix_caching=random.random() < 0.8,
        max_pinned_share=_MAX_PINNED_SHARE,
        first_step_timeout_s=3.0,
    )


def _workers(
    random: Random, model: Model, windows: tuple[int, ...], clients: list[ClientPlan], prefixes: list[list[int]]
) -> list[Hardware]:
    """One can hold its pinned prefixes and the largest request, and not much more, others perhaps only a smaller
    request; some are slow, and some join late."""
    block_size = random.choice((1, 2, 4, 4, 8))

    needs = sorted(client.blocks(block_size, len(windows)) for client in clients)
    pinned = sum(-(-len(prefix) // block_size) * len(windows) for prefix in prefixes)

    widest = max(client.sampling.parallel for client in clients)

    def hardware(need: int) -> Hardware:
        least = max(need + pinned, int(pinned / _MAX_PINNED_SHARE) + 1)
        size = least + random.choice((0, 2, random.randint(0, least // 2)))
        cpu_size = random.choice((0, size // 2, size, size))
        slowness, joins_at = random.choice((1.0, 1.0, 3.0)), random.choice((0.0, 0.0, random.uniform(0.0, _BUSY_S)))
        most_sequences = widest if random.random() < _SHORT_OF_MEMORY else MAX_SEQUENCES
        return Hardware(
            *(model.directory, size, cpu_size, block_size, windows, _EOS_PROBABILITY),
            *(slowness, joins_at, most_sequences),
        )

    others = [random.choice((needs[-1], needs[-1], random.choice(needs))) for _ in range(random.choice((0, 0, 1, 2)))]
    return [hardware(need) for need in (needs[-1], *others)]


def _faults(random: Random, rushes: list[float]) -> list[tuple[float, Fault]]:
    """A few kinds, each perhaps more than once, when there is work to be disturbed."""
    among = GENTLE if random.random() < 0.15 else FAULTS
    kinds = random.sample(among, random.randint(1, 4))
    times = sorted(random.choice(rushes) + random.expovariate(1.0) for _ in range(random.randint(1, 7)))
    return [(time, random.choice(kinds)) for time in times]
