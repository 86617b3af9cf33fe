"""How often the garbage collector looks for cycles, in a process that makes next to none."""

import gc


def collect_seldom() -> None:
    """A full collection visits every token of every sequence, which takes longer than a step; and each step's messages
    bring one nearer. What is there now, modules and code, is never visited again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
