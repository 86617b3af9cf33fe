"""A campaign on the bundled model, whose tokens must not depend on what runs beside them."""

from typing import Final

from octavo.chaos import deaths
from octavo.chaos.arena import Arena

# One thread: a team of two collapses wherever another process wants a core for a moment.
ENVIRONMENT: Final = {
    "OCTAVO_DEVICE": "cpu",
    "OCTAVO_NUMERICS": "exact",
    "OCTAVO_THREADS": "1",
    "OCTAVO_NUM_BLOCKS": "256",
}
_CLIENTS: Final = 4


async def kill_workers(arena: Arena, count: int) -> dict[str, float]:
    """kill -9 of one of two workers, with few streams."""
    return await deaths.kill_workers(arena, count, _CLIENTS, each=1)
