"""The repository root is no import root: `python -m pytest` must see what `pytest` sees."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
sys.path[:] = [entry for entry in sys.path if entry not in ("", ROOT)]
