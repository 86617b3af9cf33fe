"""How often the garbage collector looks for cycles, of which a request leaves few."""

import gc


def collect_seldom() -> None:
    """A full collection visits all that requests hold: with two thousand of them the event loop stands still for a
    tenth of a second, and by default a burst brings several. What is there now, modules and code, is never visited
    again; young objects are still looked at often, and few at a time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 50)
