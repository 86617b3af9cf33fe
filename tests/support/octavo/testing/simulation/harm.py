"""Records what was done to requests and workers on purpose, and which of their failures that excuses."""

from collections import Counter, defaultdict
from math import inf

from octavo.scheduler.core.faults.poison import DEATHS_TO_CONVICT, UNEXPLAINED_TO_CONVICT
from octavo.testing.simulation.clock import Clock
from octavo.wire.base import MAX_SEQUENCES
from octavo.worker.sequences import WorkerSequence

# How long a plan may have been under way when a step is computed.
_UNDER_WAY_S = 2.0


class Harm:
    """Records what devices report of themselves. `least_memory` counts the sequences that the device with the least
    memory had room for, ever; `poisoned_workers` holds incarnations that are over because of what they computed;
    `went_at` is the time when a request ended last."""

    def __init__(self, clock: Clock, counts: Counter[str]) -> None:
        self.least_memory = MAX_SEQUENCES
        self.poisoned_workers: set[int] = set()
        self._has_hung = False
        self._num_excused = 0
        self.went_at = -inf
        self._clock = clock
        self._counts = counts
        # Prompts and seeds of sequences that got NaN, and from whom, when: incarnations that gave it to all of a step,
        # or 0 if it was this one's doing.
        self._spoiled: defaultdict[tuple[tuple[int, ...], int], dict[int, float]] = defaultdict(dict)
        # Workers that have died over a prompt in the life of one scheduler.
        self._deaths: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def spoiled(self, sequence: WorkerSequence, by: int) -> None:
        """Records that a device computed values of a sequence that are not finite; `by` the fault of that incarnation,
        or (0) of nobody."""
        self._counts["sequences spoiled"] += 1
        key = tuple(sequence.token_ids[: sequence.prompt_length]), sequence.sampling.seed
        self._spoiled[key][by] = self._clock.now

    def poisoned(self, sequence: WorkerSequence) -> None:
        """A sequence has been the end of a worker."""
        self._counts["workers poisoned"] += 1
        key = self._counts["schedulers"], tuple(sequence.token_ids[: sequence.prompt_length])
        self._deaths[key] += 1

    def poisoned_worker(self, incarnation: int, *, hung: bool, was_leaving: bool) -> None:
        """The worker is lost because of what it computed."""
        self.poisoned_workers.add(incarnation)
        # Of one that was asked to end nobody knows that it did not end for that.
        self._num_excused += was_leaving
        self._has_hung = self._has_hung or hung
        # A client whose frontend has died asks anew, beside what is still held of its first request. What is known of a
        # request is forgotten with a frontend that is taken for dead.
        died = self._counts["fault: kill_frontend"] + self._counts["fault: upgrade_frontend"]
        num_asked = 1 + died + self._counts["frontends lost"]
        # The scheduler does not count the end of a worker that it has given up for what it answered, nor an end over a
        # step of an attempt that a frontend has taken back since, as it does once its connection was lost.
        uncounted = self._counts["replicas lost: broken"] + self._counts["fault: reset"]
        # Of one that hung nobody may know so, if it was killed before its step was overdue.
        most = UNEXPLAINED_TO_CONVICT if self._has_hung else DEATHS_TO_CONVICT
        assert max(self._deaths.values()) <= most * num_asked + self._num_excused + uncounted, (
            "too many workers have died over one request"
        )

    def was_spoiled(self, prompt_token_ids: list[int], seed: int) -> bool:
        """Tells whether a request with this prompt and seed may be to blame: it was spoiled without the others of a
        step, by two incarnations, or at a time when the others may have ended in the middle of the step."""
        by = self._spoiled[tuple(prompt_token_ids), seed]
        return 0 in by or len(by) > 1 or self.went_at > max(by.values(), default=inf) - _UNDER_WAY_S
