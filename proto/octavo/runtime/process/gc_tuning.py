"""Sets how often Python's cyclic garbage collector runs, for servers whose objects form few cycles."""

import gc


def collect_seldom(young: int = 10_000, older: int = 100) -> None:
    """Collects once, and keeps all objects that exist now (modules, code) out of later collections.

    `young` is how many objects must be made, beyond those that were freed, before the youngest are looked at. `older`
    is how many collections of the middle generation come before a full one. A full one visits all that a process
    holds, such as every token of every sequence, which takes longer than a step of the scheduler.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, 10, older)
