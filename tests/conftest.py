"""The repository root is no import root: `python -m pytest` must see what `pytest` sees."""

import sys
from pathlib import Path

from hypothesis import settings

ROOT = str(Path(__file__).parents[1])
# The same examples on every machine, however slow.
settings.register_profile("octavo", derandomize=True, deadline=None)
settings.load_profile("octavo")

sys.path[:] = [entry for entry in sys.path if entry not in ("", ROOT)]
