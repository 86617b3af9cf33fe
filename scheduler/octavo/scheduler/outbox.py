"""Effects on their way out of the core."""

from octavo.scheduler.events import Effect, SendToFrontend, SendToReplica
from octavo.wire.requests import ToFrontend
from octavo.wire.steps import ToWorker


class Outbox:
    """Effects in the order in which they came about, until they are taken. `epoch` is the one to be named in them."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def to_frontend(self, frontend_id: int, message: ToFrontend) -> None:
        self._effects.append(SendToFrontend(frontend_id, message))

    def to_replica(self, replica_id: int, message: ToWorker) -> None:
        self._effects.append(SendToReplica(replica_id, message))

    def take(self) -> list[Effect]:
        """All since the last call."""
        effects, self._effects = self._effects, []
        return effects
