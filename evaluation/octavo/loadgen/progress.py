"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Final, Self

import click
from tqdm import tqdm

from octavo.loadgen.records import Record

_LINE_EVERY_S: Final = 10.0
_BAR_EVERY_S: Final = 0.2


class Progress:
    """Of `total` requests; `quiet` shows nothing. To be used in a `with` block."""

    def __init__(self, label: str, total: int, *, quiet: bool = False) -> None:
        self._label = label
        self._total = total
        self._sent = self._ended = self._failed = 0
        self._lines = not quiet and not sys.stderr.isatty()
        self._shown_at = time.monotonic()
        # No thread to look after it.
        tqdm.monitor_interval = 0
        self._bar = tqdm(total=total, desc=label, unit="req", disable=quiet or self._lines, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._lines:
            self._line()

    def changed(self, record: Record) -> None:
        """A request was sent, or has ended."""
        if record.finished_s is None and record.failure is None:
            self._sent += 1
        else:
            self._ended += 1
            self._failed += record.failure is not None
            self._bar.update()
        if self._lines and time.monotonic() - self._shown_at >= _LINE_EVERY_S:
            self._line()
        elif not self._bar.disable:
            # Before any has ended, too: what is sent shows that something goes on.
            is_due = time.monotonic() - self._shown_at >= _BAR_EVERY_S
            self._bar.set_postfix_str(self._state(), refresh=is_due)
            self._shown_at = time.monotonic() if is_due else self._shown_at

    def _line(self) -> None:
        self._shown_at = time.monotonic()
        click.echo(f"{self._label}: {self._ended} of {self._total} requests ended, {self._state()}", err=True)

    def _state(self) -> str:
        return f"{self._sent - self._ended} under way, {self._failed} failed"
