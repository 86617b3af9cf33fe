"""Who starts workers again that have died: what an operator has for that."""

import asyncio
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from octavo.runtime.process.ends import ENDS_VARIABLE, End, OutOfMemoryCount, write_ends
from octavo.testbed.stack import Stack

_LOOKS_EVERY_S: Final = 0.05
_ENDS_TOLD: Final = 16


@dataclass
class Supervisor:
    """`died` are the names of workers, in the order in which that was seen."""

    stack: Stack
    died: list[str] = field(default_factory=list)
    ends: deque[End] = field(default_factory=lambda: deque(maxlen=_ENDS_TOLD))
    _out_of_memory: OutOfMemoryCount = field(default_factory=OutOfMemoryCount)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOKS_EVERY_S)

    def look(self) -> None:
        """Does what is to be done now."""
        for name, process in list(self.stack.processes.items()):
            if name.startswith("worker") and process.poll() is not None:
                self.died.append(name)
                status = process.returncode
                self.ends.append(
                    End(process.pid, status, status == -signal.SIGKILL and self._out_of_memory.has_risen())
                )
                self.stack.start_named(name, **{ENDS_VARIABLE: write_ends(self.ends)})
