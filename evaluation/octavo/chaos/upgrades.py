"""A campaign in which every process of an older version gives way to one of this version, and back: nobody notices."""

import os
from typing import Final

from octavo.chaos.arena import Arena
from octavo.chaos.drains import FRONTENDS, replace

_CLIENTS: Final = 32
# As an operator should: the scheduler is the only one that speaks an older schema than its own.
_ORDER: Final = ("scheduler", "worker-0", "worker-1", *FRONTENDS)


async def upgrade(arena: Arena, count: int) -> dict[str, float]:
    """Upgrades the processes one by one under load, and rolls back in the opposite order, `count` times. All begin as
    the older version, which the stack's own environment names."""
    ours = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    async with arena.crowd(_CLIENTS):
        for _ in range(count):
            for name in _ORDER:
                await arena.until_busy(2, each=2)
                await replace(arena, name, **ours)
            for name in reversed(_ORDER):
                await arena.until_busy(2, each=2)
                await replace(arena, name)
        await arena.until_busy(2, each=1)
    return {"upgrades": count, "roll_backs": count, "turned_away": arena.turned_away}
