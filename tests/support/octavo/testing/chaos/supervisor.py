"""Who starts workers again that have died: what an operator has for that."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from octavo.testing.stack import Stack

_LOOKS_EVERY_S: Final = 0.05


@dataclass
class Supervisor:
    """`died` are the names of workers, in the order in which that was seen."""

    stack: Stack
    died: list[str] = field(default_factory=list)

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
                self.stack.start_named(name)
