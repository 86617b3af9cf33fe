"""How wide what is printed may be."""

import shutil
import sys


def terminal_width() -> int | None:
    """Columns of the terminal; None where stdout is none, so that programs get all there is."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
