"""Runs one cell from event to event: requests come, steps end, the scheduler plans."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from octavo.scheduler.core.scheduler import Scheduler
from octavo.simulator.cell import Cell, SimulationError
from octavo.wire.requests import Request

# A shell looks at its core so often even if nothing happens: for what waits for time alone, and for the second step in
# flight. It is given up after so long without any step.
_TICK_S = 0.1
_STALLED_S = 600.0

Probe = Callable[[float, Scheduler], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Describes a moment: requests that wait, run or are swapped out, sequences that run, and blocks, of all cells
    together."""

    time: float
    waiting: int
    running: int
    swapped: int
    sequences: int
    blocks_used: int
    blocks_cached: int
    blocks: int

    @classmethod
    def of(cls, time: float, core: Scheduler) -> "Sample":
        """Returns one cell's share of the sample."""
        replicas = core.replicas.values()
        return cls(
            time,
            len(core.waiting),
            sum(len(replica.running) for replica in replicas),
            sum(len(replica.swapped) for replica in replicas),
            sum(replica.num_running_seqs for replica in replicas),
            sum(replica.kv.num_blocks - replica.kv.num_free for replica in replicas),
            sum(replica.kv.num_cached for replica in replicas),
            sum(replica.kv.num_blocks for replica in replicas),
        )

    @classmethod
    def total(cls, shares: Sequence["Sample"]) -> "Sample":
        """Returns the sum of shares at the same time."""
        columns = zip(*map(astuple, shares), strict=True)
        next(columns)
        return cls(shares[0].time, *map(sum, columns))


class Timeline:
    """Holds a cell and what is still to happen to it. The cell is sampled each `sample_every_s` (0: never), where
    `probe` sees its core too."""

    def __init__(self, cell: Cell, sample_every_s: float, probe: Probe | None) -> None:
        self.cell = cell
        self.steps = 0
        # When a request came or a step ended last.
        self.moved_at = 0.0
        self.samples: list[Sample] = []
        self._sample_every_s = sample_every_s
        self._probe = probe
        self._arrivals: deque[tuple[float, Request]] = deque()
        # When, in which order, and on which replica a step ends; 0: nothing ends, it is time to look again.
        self._events: list[tuple[float, int, int]] = []
        self._num_events = 0
        self._is_ticking = False

    @property
    def next_at(self) -> float:
        """Returns the time at which something happens next; infinite if nothing does."""
        next_arrival = self._arrivals[0][0] if self._arrivals else float("inf")
        return min(next_arrival, self._events[0][0]) if self._events else next_arrival

    def expect(self, request: Request, time: float) -> None:
        """Expects a request that will come, after all that were expected before."""
        self._arrivals.append((time, request))

    def run(self, until: float) -> None:
        """Runs everything that happens before then. Raises `SimulationError` if the cell cannot go on."""
        while (now := self.next_at) < until:
            self._sample_before(now)
            while self._arrivals and self._arrivals[0][0] <= now:
                self.cell.submit(self._arrivals.popleft()[1], now)
                self.moved_at = now
            while self._events and self._events[0][0] <= now:
                self._end(heapq.heappop(self._events)[2], now)
            self._plan(now)
            if now - self.moved_at > _STALLED_S and not self._arrivals:
                raise SimulationError(f"nothing has been computed for {_STALLED_S:g} s, though requests wait")

    def _end(self, incarnation: int, now: float) -> None:
        if not incarnation:
            self._is_ticking = False
            return
        self.cell.answer(incarnation, now)
        self.steps += 1
        self.moved_at = now

    def _plan(self, now: float) -> None:
        for pending in self.cell.plan(now):
            self._push(pending.time, pending.incarnation)
        if not self._is_ticking and not self.cell.is_idle:
            self._is_ticking = True
            self._push(now + _TICK_S, 0)

    def _push(self, time: float, incarnation: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, incarnation))

    def finish(self, end: float) -> None:
        """Takes the samples that are due until the end of the simulation, and no later ones."""
        self._sample_before(end)
        self.samples = [sample for sample in self.samples if sample.time <= end]

    def _sample_before(self, now: float) -> None:
        """Takes the samples that are due up to `now`, for which the present state holds."""
        while self._sample_every_s and (time := len(self.samples) * self._sample_every_s) <= now:
            self.samples.append(Sample.of(time, self.cell.core))
            if self._probe is not None:
                self._probe(time, self.cell.core)
