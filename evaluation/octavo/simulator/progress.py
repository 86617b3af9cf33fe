"""How far a simulation is, on stderr: at once and again on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Final

import click

from octavo.workload.targets import time_text

_LINE_EVERY_S: Final = 10.0
_TERMINAL_EVERY_S: Final = 0.5


class Progress:
    """Is told how much time has passed in simulations, and tells people. What ends soon tells nothing."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._every_s = _TERMINAL_EVERY_S if self._on_terminal else _LINE_EVERY_S
        self._label = ""
        self._began_at = self._shown_at = time.perf_counter()

    def begin(self, label: str, end_s: float) -> None:
        """Another simulation, in which requests come until `end_s`."""
        self._label = f"{label}: {{}} simulated, requests come until {time_text(end_s)}"
        self._began_at = self._shown_at = time.perf_counter()

    def end(self) -> float:
        """Wall time of the simulation, in seconds; its line is taken away."""
        if self._on_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)
        return time.perf_counter() - self._began_at

    def __call__(self, now: float) -> None:
        """So much has been simulated."""
        if time.perf_counter() - self._shown_at >= self._every_s:
            self._shown_at = time.perf_counter()
            line = self._label.format(time_text(now))
            click.echo(f"\r\x1b[K{line}" if self._on_terminal else line, err=True, nl=not self._on_terminal)
