"""What a seed stands for: a cluster that is always a little too small, clients, and faults, all drawn at random."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from octavo.scheduler.config import Policy, Preemption, SchedulerConfig
from octavo.testing.simulation.faults import FAULTS, Fault
from octavo.testing.simulation.worker_process import Hardware
from octavo.testing.simulation.workload import ClientPlan, Model, Workload
from octavo.worker.fake_config import read_eos_token_ids, read_positive
from octavo.worker.fake_runner import FakeVocabulary

_BUSY_S = 8.0
_EOS_PROBABILITY = 0.02
_MAX_PINNED_SHARE = 0.5
# Of a frontend that never gives a request up; others do before a scheduler may be back.
PATIENT_S = 60.0
_IMPATIENT_S = 6.0
# The share of runs with an endless client, and steps so slow that it is one.
_ENDLESS = 0.1
_ENDLESS_STEP_S = 0.1


@dataclass(frozen=True)
class Scenario:
    """`faults` are by time; `step_s` is about how long a step takes; `grace_s` how long frontends wait for a
    scheduler."""

    config: SchedulerConfig
    model: Model
    workers: list[Hardware]
    num_frontends: int
    prefixes: dict[str, list[int]]
    clients: list[ClientPlan]
    faults: list[tuple[float, Fault]]
    step_s: float
    grace_s: float

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong."""
        return not self.faults


def draw(seed: int, directory: Path) -> Scenario:
    """The scenario of a seed, with the fake model in `directory`."""
    random = Random(seed)
    windows = random.choice(((0,), (0,), (0,), (0, 8), (6,), (3, 10)))
    model = _model(directory, windows)
    prefixes = {f"prefix-{i}": _prefix(random, model) for i in range(random.choice((0, 0, 1, 2)))}
    num_frontends = random.choice((1, 1, 2))
    workload = Workload(random, model, list(prefixes.values()), num_frontends, _BUSY_S)
    is_calm = random.random() < 0.1
    clients = workload.clients(random.randint(4, 14), impatient=0.0 if is_calm else 0.3)
    step_s = random.choice((0.01, 0.04, 0.1))
    if random.random() < _ENDLESS:
        clients.append(workload.endless())
        step_s = _ENDLESS_STEP_S
    return Scenario(
        config=_config(random),
        model=model,
        workers=_workers(random, model, windows, clients, list(prefixes.values())),
        num_frontends=num_frontends,
        prefixes=prefixes,
        clients=clients,
        faults=[] if is_calm else _faults(random, workload.rushes),
        step_s=step_s,
        grace_s=random.choice((PATIENT_S, PATIENT_S, PATIENT_S, _IMPATIENT_S)),
    )


def _model(directory: Path, windows: tuple[int, ...]) -> Model:
    eos = tuple(sorted(read_eos_token_ids(directory)))
    vocabulary = FakeVocabulary(read_positive(directory, "vocab_size"), eos, _EOS_PROBABILITY)
    return Model(directory, vocabulary, 0 if 0 in windows else max(windows))


def _prefix(random: Random, model: Model) -> list[int]:
    return [random.randrange(model.vocabulary.size) for _ in range(random.randint(1, 14))]


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
        tenant_weights=random.choice(({}, {"acme": 3.0})),
        prefix_caching=random.random() < 0.8,
        max_pinned_share=_MAX_PINNED_SHARE,
        first_step_timeout_s=3.0,
    )


def _workers(
    random: Random, model: Model, windows: tuple[int, ...], clients: list[ClientPlan], prefixes: list[list[int]]
) -> list[Hardware]:
    """Each can hold its pinned prefixes and the largest request, and not much more."""
    block_size = random.choice((1, 2, 4, 4, 8))

    def blocks_for(num_tokens: int) -> int:
        return -(-num_tokens // block_size) * len(windows)

    largest = max(
        client.sampling.parallel * blocks_for(len(client.prompt_token_ids) + client.sampling.max_tokens)
        for client in clients
    )
    pinned = sum(blocks_for(len(prefix)) for prefix in prefixes)
    least = max(largest + pinned, int(pinned / _MAX_PINNED_SHARE) + 1)
    sizes = [least + random.choice((0, 2, random.randint(0, least // 2))) for _ in range(random.choice((1, 1, 2, 3)))]
    return [
        Hardware(
            model.directory, size, random.choice((0, size // 2, size, size)), block_size, windows, _EOS_PROBABILITY
        )
        for size in sizes
    ]


def _faults(random: Random, rushes: list[float]) -> list[tuple[float, Fault]]:
    """A few kinds, each perhaps more than once, when there is work to be disturbed."""
    kinds = random.sample(FAULTS, random.randint(1, 4))
    times = sorted(random.choice(rushes) + random.expovariate(1.0) for _ in range(random.randint(1, 7)))
    return [(time, random.choice(kinds)) for time in times]
