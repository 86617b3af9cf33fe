"""How many files this process may have open: every connection is one."""

import logging
import resource
from typing import Final

_log = logging.getLogger(__name__)

# What else is open: the model's files, pipes to the processes for texts, sockets to schedulers, probes.
_RESERVE: Final = 512
_DOORS: Final = 2


def allow_open_files(connections: int) -> None:
    """Asks for as many as so many connections of each door need, as far as the system allows: many let a process have
    1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _RESERVE + _DOORS * connections
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_that_fit(wanted: int) -> int:
    """So many connections of each door, or fewer where there are not files enough: no door takes those of another, and
    some are left for probes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    fitting = max(16, (soft - _RESERVE) // _DOORS)
    if fitting < wanted:
        _log.warning("%d open files are too few for twice %d connections: each door takes %d", soft, wanted, fitting)
    return min(wanted, fitting)
