"""How many bytes of bodies are held at once, whoever sends them.

A body counts from its first byte until its call is answered. Of those still coming in, the oldest of the client that
has most gives way to newer ones: who sends without pause is done long before it is the oldest.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from octavo.frontend.errors import Overloaded, Reason

MAX_UNFINISHED: Final = 64 << 20
MAX_HELD: Final = 256 << 20


class Body:
    """One call's, of `client`. `evict` is called when it has to give way."""

    def __init__(self, client: str, evict: Callable[[], None]) -> None:
        self.client = client
        self.size = 0
        self.evict = evict


class Bodies:
    """The books of one HTTP port. Belongs to one event loop."""

    def __init__(self, max_unfinished: int = MAX_UNFINISHED, max_held: int = MAX_HELD) -> None:
        self._max_unfinished = max_unfinished
        self._max_held = max_held
        # Oldest first.
        self._unfinished: dict[Body, None] = {}
        self._finished: set[Body] = set()
        self._of_client: Counter[str] = Counter()
        self._unfinished_bytes = self._finished_bytes = 0

    @property
    def held(self) -> int:
        """Bytes that are held."""
        return self._unfinished_bytes + self._finished_bytes

    def grow(self, body: Body, size: int) -> None:
        """So many bytes more have come. Raises `Overloaded` where it is this body itself that must give way."""
        self._unfinished.setdefault(body)
        self._change(body, size)
        while self._unfinished_bytes > self._max_unfinished:
            most = max(self._of_client.values())
            oldest = next(each for each in self._unfinished if self._of_client[each.client] == most)
            self.close(oldest)
            if oldest is body:
                raise self.refusal()
            oldest.evict()

    def finish(self, body: Body) -> None:
        """It has come whole. Raises `Overloaded` where there is no room to keep it."""
        if body not in self._unfinished:
            return
        size = body.size
        self.close(body)
        if self.held + size > self._max_held:
            raise self.refusal()
        body.size = size
        self._finished.add(body)
        self._finished_bytes += size

    def close(self, body: Body) -> None:
        """It is not held any more. Idempotent."""
        if body in self._unfinished:
            del self._unfinished[body]
            self._change(body, -body.size)
        elif body in self._finished:
            self._finished.discard(body)
            self._finished_bytes -= body.size
            body.size = 0

    def refusal(self) -> Overloaded:
        """What is told to whom a body is of that had to give way."""
        return Overloaded(
            Reason.TOO_MUCH_WORK,
            f"the server holds {self.held} bytes of bodies, and at most {self._max_unfinished} of those that are still"
            f" coming and {self._max_held} in all may be; try again, and send the body without a pause",
        )

    def _change(self, body: Body, size: int) -> None:
        body.size += size
        self._unfinished_bytes += size
        self._of_client[body.client] += size
        if not self._of_client[body.client]:
            del self._of_client[body.client]
