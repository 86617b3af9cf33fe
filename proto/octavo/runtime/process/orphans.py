"""Ends every process with the one that started it: the kernel does that, however the parent ends.

To end takes its time, though, most of all with much memory. So all that one supervisor starts, and all that these
start, inherit a descriptor with a lock on it: what comes after them can wait until the last of them is gone.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

# Tells the number of that descriptor.
LOCK_VARIABLE: Final = "OCTAVO_SUPERVISOR_LOCK"
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(parent: int) -> bool:
    """Has the kernel kill this process when the thread that started it ends: that is to be one that lives as long as
    process `parent`.

    A signal that could be handled would let this process go on, and keep its sockets, for as long as a service takes to
    drain; SIGKILL also reaches one that is stopped. Returns False if `parent` is gone already. Works on Linux; on other
    systems nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return True
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def inherited_locks(environment: Mapping[str, str] = os.environ) -> list[int]:
    """Returns the descriptors that a child of this process is to inherit."""
    number = environment.get(LOCK_VARIABLE, "")
    return [int(number)] if number.isdecimal() and _is_open(int(number)) else []


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
