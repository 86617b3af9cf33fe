"""The repository root is no import root: `python -m pytest` must see what `pytest` sees."""

import os
import sys
from pathlib import Path

import torch
from hypothesis import settings

ROOT = str(Path(__file__).parents[1])
# The same examples on every machine, however slow.
settings.register_profile("octavo", derandomize=True, deadline=None)
settings.load_profile("octavo")

# Read when a kernel is made. Without a GPU they run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path[:] = [entry for entry in sys.path if entry not in ("", ROOT)]
