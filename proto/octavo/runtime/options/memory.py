"""Reads amounts of memory, of CPUs, GPUs and disks."""

import re
from fractions import Fraction
from typing import Final

from octavo.runtime.options.option import Parsed

_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_MEMORY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_memory(text: str) -> int:
    """Returns the bytes that `512MiB`, `1.5GiB` or a plain number says. Raises `ValueError` on anything else."""
    match = _MEMORY.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no amount of memory; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(Fraction(match[1]) * unit)


MEMORY: Final = Parsed(parse_memory, "SIZE")
