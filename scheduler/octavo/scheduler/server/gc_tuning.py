"""Garbage collection: the collector looks less often for cycles, in a process that makes next to none."""

import gc


def collect_seldom() -> None:
    """Makes full collections rare and skips what is there now, modules and code. A full collection visits every token
    of every sequence, which takes longer than a step; and each step's messages bring one nearer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
