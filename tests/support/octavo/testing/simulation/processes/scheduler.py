"""Runs the scheduler's production core and shell, watched at every event."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import Effect, Event, PrefixPinned, PrefixUnpinned, ReplicaHeard, Tick
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import RequestGroup
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.kv.census import BlockCensus
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.server.loop import SchedulerShell
from octavo.testing.oracles.notice_book import NoticeBook
from octavo.testing.promises import Promises
from octavo.testing.simulation.clock import Process
from octavo.testing.simulation.network import Network, Router
from octavo.testing.simulation.watch import Watch
from octavo.wire.requests import Prefix

# How long its poll waits for messages.
_POLL_S = 0.1


class _WatchedScheduler(Scheduler):
    """Checks its books after every plan, and every event but those that say that nothing has happened."""

    def __init__(self, config: SchedulerConfig, epoch: int, watch: Watch, drafter: Drafter | None) -> None:
        self.census = BlockCensus()
        super().__init__(config, epoch, make_memory=partial(paged_memory, census=self.census), drafter=drafter)
        self._watch = watch
        self._notice_book = NoticeBook()
        self._promises = Promises()

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._promises.before_event(self)
        effects = super().handle(event, now)
        self._promises.after_event(self, effects)
        if effects or not isinstance(event, Tick | ReplicaHeard):
            self._look_at(effects)
        return effects

    def schedule(self, now: float) -> list[Effect]:
        self._promises.before_turn(self)
        effects = super().schedule(now)
        self._promises.after_turn(self)
        self._look_at(effects)
        return effects

    def _look_at(self, effects: list[Effect]) -> None:
        self.check()
        self._notice_book.check(self, effects)
        self._watch.effects(effects)

    def _admit(self, group: RequestGroup, builder: StepBuilder, now: float) -> None:
        self._watch.admitted(group, builder.replica, now)
        super()._admit(group, builder, now)


class SchedulerProcess(Process):
    """Runs one life of the scheduler, with production's drafter if none is given."""

    def __init__(
        self, network: Network, config: SchedulerConfig, epoch: int, watch: Watch, drafter: Drafter | None = None
    ) -> None:
        super().__init__(network.clock, "scheduler")
        self.core = _WatchedScheduler(config, epoch, watch, drafter)
        self._network = network
        self._watch = watch
        watch.router.cell_restarted()
        network.routers = {wire: Router(self, network.random) for wire in ("frontends", "workers")}
        sockets = cast("dict[str, Any]", network.routers)
        self._workers = network.routers["workers"]
        self.shell = SchedulerShell(
            self.core,
            sockets["frontends"],
            sockets["workers"],
            watch.record,
            lambda: self.clock.now,
            departure=sockets["workers"],
            after_turn=lambda: watch.router.look(self.core, self.core.census),
        )
        self.wake()

    def turn(self) -> float:
        self.shell.turn()
        self._watch.turned(self.core, self._unreachable())
        return self.clock.now + _POLL_S

    def _unreachable(self) -> set[int]:
        """Replicas whose connection has ended."""
        connection_of = self.shell._workers._connection_of
        return {each for each in self.core.replicas if connection_of.get(each) not in self._workers.connections}

    def count(self) -> None:
        """Adds what it has counted itself to what was seen of all."""
        self._watch.counts.update({"preemptions": self.core.preemptions, "swaps": self.core.swaps})

    def pin(self, prefixes: Mapping[str, list[int]], name: str) -> None:
        """An operator pins one of `prefixes`, if it can be."""
        prefix = Prefix(name, prefixes[name]) if name in prefixes else None
        if prefix is not None and self.core.pin_refusal(prefix) is None:
            self.shell.handle(PrefixPinned(prefix))

    def unpin(self, name: str) -> None:
        """An operator unpins a prefix, if it is pinned."""
        if self.core.prefixes.get(name) is not None:
            self.shell.handle(PrefixUnpinned(name))

    def kill(self) -> None:
        super().kill()
        self.count()
        for router in self._network.routers.values():
            router.close()
        self._network.routers = {}
