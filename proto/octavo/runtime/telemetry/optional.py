"""Tolerates failures of what no request needs: logs, caches, traces, metrics. A failure is counted and logged once, and
goes no further."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client.core import Metric

from octavo.runtime.telemetry.numbers import Tally

EVENT_LOG: Final = "event_log"
KERNEL_SPEEDS: Final = "kernel_speeds"
KV_DISK_READS: Final = "kv_disk_reads"
KV_DISK_WRITES: Final = "kv_disk_writes"
LAST_WORDS: Final = "last_words"
METRICS: Final = "metrics"
OUTPUT: Final = "output"
RESPONSE_STORE: Final = "response_store"
TOKENIZER_CACHE: Final = "tokenizer_cache"
TRACES: Final = "traces"

_log = logging.getLogger(__name__)

_failures = Tally(
    EVENT_LOG,
    KERNEL_SPEEDS,
    KV_DISK_READS,
    KV_DISK_WRITES,
    LAST_WORDS,
    METRICS,
    OUTPUT,
    RESPONSE_STORE,
    TOKENIZER_CACHE,
    TRACES,
)
# What has been said to fail, and has not been seen to work since.
_failing: set[str] = set()


def failed(what: str, error: object, consequence: str) -> None:
    """Counts a failure of `what`, and says so with what follows of it if that is news."""
    if is_first_failure(what):
        _log.error("%s: %s; %s", what.replace("_", " "), error, consequence)


def is_first_failure(what: str) -> bool:
    """Counts a failure of `what`. Whether it is the first, or the first since it worked: the one to be told."""
    _failures.add(what)
    known = what in _failing
    _failing.add(what)
    return not known


def worked(what: str) -> None:
    """Says that `what` works again, if it did not."""
    if what in _failing:
        _failing.discard(what)
        _log.info("%s: works again", what.replace("_", " "))


@contextmanager
def tolerated(what: str, consequence: str) -> Iterator[None]:
    """Reports any exception of the block as `failed`, and its end without one as `worked`."""
    try:
        yield
    except Exception as error:
        failed(what, error, consequence)
    else:
        worked(what)


def family() -> Metric:
    """Returns the metric that counts the failures of each kind in this process."""
    return _failures.family(
        "octavo_optional_failures", "Failures of what no request needs; see the log for each kind's first.", "what"
    )
