"""Reads a real scheduler's event log: yields every step with its requests, and checks whether the core's books were
always right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from octavo.scheduler.core.events import Effect, SendToReplica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.event_log import Began, Handled, Scheduled, read_records
from octavo.testbed.history import Stepped
from octavo.wire.steps import StepPlan

EVENT_LOG: Final = "events"
# One record in so many has the core look at all its books: it takes longer than anything else that it does.
CHECKED: Final = 50


def logs(directory: Path) -> list[Path]:
    """Lists the logs of every start of the scheduler."""
    return sorted(directory.glob(f"{EVENT_LOG}*"))


def steps(log: Path) -> Iterator[Stepped]:
    """Feeds a log to a fresh core, which makes the same plans at the same times, and checks its books now and then.
    Raises `AssertionError` where they are wrong."""
    with log.open("rb") as file:
        records = read_records(file)
        began = next(records, None)
        assert isinstance(began, Began), f"{log} does not begin with what made its core"
        core = Scheduler(began.config, began.epoch)
        for number, record in enumerate(records):
            match record:
                case Handled(now, event):
                    yield from _planned(core, core.handle(event, now), now)
                case Scheduled(now):
                    yield from _planned(core, core.schedule(now), now)
            if number % CHECKED == 0:
                core.check()


def _planned(core: Scheduler, effects: list[Effect], now: float) -> Iterator[Stepped]:
    for effect in effects:
        if isinstance(effect, SendToReplica) and isinstance(effect.message, StepPlan):
            working = {work.sequence_id for work in effect.message.work}
            groups = core.replicas[effect.replica_id].running
            yield Stepped(
                now,
                frozenset(
                    group.request_id
                    for group in groups
                    if any(sequence.placement.sequence_id in working for sequence in group.live)
                ),
            )
