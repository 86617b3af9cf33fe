"""A burst of requests brings no full collection: the event loop would stand still meanwhile."""

import subprocess
import sys
from typing import Final

# A process of its own, for what there is before counts too. Each request of a burst holds some 160 objects.
BURST: Final = """
import gc
from octavo.frontend.cli.frontend import GC_OLDER, GC_YOUNG
from octavo.runtime.process.gc_tuning import collect_seldom
collect_seldom(GC_YOUNG, GC_OLDER)
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
held = [[[] for _ in range(160)] for _ in range(2048)]
print(len(full))
held = cycles = None
for _ in range(2_000_000):
    cycle = []
    cycle.append(cycle)
print(gc.get_stats()[0]["collected"] > 1_000_000)
"""


def test_a_burst_brings_no_full_collection_and_what_is_lost_in_cycles_is_found() -> None:
    ran = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["0", "True"]
