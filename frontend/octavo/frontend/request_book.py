"""The requests of one frontend by their ids, which every tenant chooses for itself."""

from collections.abc import Iterator

from octavo.frontend.caller import Caller
from octavo.frontend.running import Running


class RequestBook:
    """What others have under an id is neither shown to a tenant nor in its way."""

    def __init__(self) -> None:
        # By id, and then by tenant; the oldest comes first.
        self._namesakes: dict[str, dict[str, Running]] = {}

    def __iter__(self) -> Iterator[Running]:
        return (running for namesakes in self._namesakes.values() for running in namesakes.values())

    def get(self, request_id: str, caller: Caller) -> Running | None:
        """The request that the id means to the caller: of its tenant, or, to a trusted one, the oldest of all."""
        namesakes = self._namesakes.get(request_id, {})
        return next(iter(namesakes.values()), None) if caller.trusted else namesakes.get(caller.tenant)

    def add(self, running: Running) -> None:
        """Enters a request. Its tenant must have none with that id."""
        namesakes = self._namesakes.setdefault(running.request_id, {})
        assert running.tenant not in namesakes
        namesakes[running.tenant] = running

    def remove(self, running: Running) -> None:
        """Takes out a request that was entered."""
        namesakes = self._namesakes[running.request_id]
        del namesakes[running.tenant]
        if not namesakes:
            del self._namesakes[running.request_id]
