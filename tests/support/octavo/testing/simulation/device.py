"""A fake model on a device that may be slow or fail, and what is done to it by some prompts."""

import enum
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Protocol

from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.simulation.workload import ClientPlan
from octavo.wire.base import MAX_SEQUENCES
from octavo.wire.steps import BlockMoves, StepTimes
from octavo.worker.fake.faults import FakeFault
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkerSequence, WorkItem

# What the scheduler is told of a step that was made to fail; any other failure is a fault of ours.
INJECTED = "InjectedError"
_GARBAGE = -2
_OF_THE_RUNNER = (
    *("directory", "num_blocks", "num_cpu_blocks", "block_size", "windows", "eos_probability"),
    *("draft_model", "draft_hit_rate", "pooling"),
)


class InjectedError(Exception):
    """The device failed, as it was told to."""


class Ending(enum.Enum):
    """Names the ways in which a worker ends: let go, after a goodbye, turned away, or over what it computed, which
    killed it or made it hang."""

    DISMISSED = "dismissed"
    LEFT = "left"
    REFUSED = "refused"
    DIED = "died"
    HUNG = "hung"


class PoisonedError(BaseException):
    """The process is no more, or never comes back from its step: nothing catches that."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending


_ENDING_OF = {"die": Ending.DIED, "hang": Ending.HUNG}


class ForeignHistoryError(Exception):
    """A slot that a step reads holds another token than the sequence's own."""


class Witness(Protocol):
    """Is told of sequences to which something was done on purpose."""

    def spoiled(self, sequence: WorkerSequence, by: int) -> None: ...
    def poisoned(self, sequence: WorkerSequence) -> None: ...


@dataclass(frozen=True)
class Hardware:
    """Describes a worker's place, whatever process runs there. A step takes it `slowness` times as long as others. At
    `joins_at` there is a worker for the first time; `most_sequences` fit its memory."""

    directory: Path
    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    windows: tuple[int, ...]
    eos_probability: float
    slowness: float = 1.0
    joins_at: float = 0.0
    most_sequences: int = MAX_SEQUENCES
    draft_model: str | None = None
    draft_hit_rate: float = 0.0
    pooling: str = "none"

    def can_hold(self, plan: ClientPlan, prefixes: Mapping[str, list[int]]) -> bool:
        """Tells whether there is room for all that a client wants, beside all prefixes."""
        pinned = sum(-(-len(prefix) // self.block_size) for prefix in prefixes.values()) * len(self.windows)
        return pinned + plan.blocks(self.block_size, len(self.windows)) <= self.num_blocks


@dataclass
class Device:
    """Holds the present state of a place's device: seconds that a step takes about, the share of steps that fail, that
    of steps in which one sequence gets NaN, whether all do, and how many sequences it has memory for. `poisons` are
    what some prompts do to it."""

    normal_step_s: float
    normal_most_sequences: int
    poisons: tuple[FakeFault, ...] = ()
    step_s: float = field(init=False)
    failure_rate: float = field(init=False)
    nan_rate: float = field(init=False)
    is_broken: bool = field(init=False)
    most_sequences: int = field(init=False)

    def __post_init__(self) -> None:
        self.recover()

    def recover(self) -> None:
        self.step_s, self.failure_rate, self.nan_rate = self.normal_step_s, 0.0, 0.0
        self.is_broken, self.most_sequences = False, self.normal_most_sequences


class SimulatedRunner(SpoilableRunner):
    """Takes virtual time, fails at random, and compares all that it reads with what the sequence has said.

    `work` is told how many seconds a step takes, and `tell` what it does to whom.
    """

    def __init__(
        self,
        hardware: Hardware,
        device: Device,
        random: Random,
        work: Callable[[float], None],
        tell: Witness,
    ) -> None:
        super().__init__(**{name: getattr(hardware, name) for name in _OF_THE_RUNNER})
        # The name under which it works now.
        self.incarnation = 0
        self._device = device
        self._random = random
        self._work = work
        self._tell = tell
        # Something failed in the last step: what is skipped of it in this one others may read, who are not heard.
        self._is_after_failure = False

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        seconds = self._device.step_s * self._random.uniform(0.5, 1.5)
        self._work(seconds)
        self._take_poison(items)
        if sum(len(item.members) for item in items) > self._device.most_sequences:
            raise MemoryError(INJECTED)
        if self._random.random() < self._device.failure_rate:
            self._fail(moves, items)
        self._cache.move(moves)
        self._spoil(items)
        for item in items:
            self._write(item)
        if not self._is_after_failure:
            for item in [item for item in items if not self._sees_nan(item)]:
                self._check_history(item)
        chosen = self._choose(items)
        if self._draft is not None:
            own = [replace(item, num_proposed=0) for item in items] if self._is_after_failure else items
            self._follow(self._draft, moves, own, chosen)
        self._is_after_failure = bool(chosen.failed)
        prompt_logprobs = [part for item in items for part in self._prompt_logprobs(item)]
        # Of virtual time, for the clock on the wall is no function of the seed.
        return chosen.output(prompt_logprobs, StepTimes(0, round(seconds * 1e6), 0))

    def _fail(self, moves: BlockMoves, items: list[WorkItem]) -> None:
        """Before anything has happened, or with garbage where the step was to write."""
        if self._random.random() < 0.5:
            self._cache.move(moves)
            for item in items:
                for table in item.sequence.block_tables:
                    self._cache.write(table, item.start, [_GARBAGE] * item.num_tokens)
        raise InjectedError

    def _take_poison(self, items: list[WorkItem]) -> None:
        """Raises `PoisonedError` if the process does not survive this."""
        for fault in self._device.poisons:
            victims = fault.victims(items) if fault.kind in _ENDING_OF else []
            if victims:
                self._tell.poisoned(victims[0])
                raise PoisonedError(_ENDING_OF[fault.kind])

    def _spoil(self, items: list[WorkItem]) -> None:
        device = self._device
        sequences = [victim for fault in device.poisons if fault.kind == "nan" for victim in fault.victims(items)]
        by = 0
        if device.is_broken:
            sequences = [item.sequence for item in items]
            choosers = {each.sampling.seed for item in items for each in item.choosers}
            by = self.incarnation if len(choosers) > 1 else 0
        elif items and self._random.random() < device.nan_rate:
            sequences.append(self._random.choice(items).sequence)
        spoiled = {sequence.sequence_id for sequence in sequences}
        # In half of all cases their keys and values are sound.
        is_kv_sound = bool(spoiled) and self._random.random() < 0.5
        self.to_spoil, self.to_fail = (set(), spoiled) if is_kv_sound else (spoiled, set())
        for sequence in sequences:
            self._tell.spoiled(sequence, by)

    def _check_history(self, item: WorkItem) -> None:
        sequence, end = item.sequence, item.end
        tokens = sequence.token_ids[: item.known_end] + item.draft
        for group, table in zip(self.kv_groups, sequence.block_tables, strict=True):
            first = max(0, item.start - group.window + 1) if group.window else 0
            is_own = self._cache.read(table, first, end) == array("i", tokens[first:end]).tobytes()
            if not is_own or self._reads_foreign(item, item.start, end):
                raise ForeignHistoryError(f"{sequence} reads what is not its own between {first} and {end}")
