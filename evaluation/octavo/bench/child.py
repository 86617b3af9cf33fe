"""Runs a measured process of its own: one line of JSON asks, one answers. Only the standard library is used here."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

Answer = Callable[[Any], object]


def serve(make: Callable[[], dict[str, Answer]]) -> int:
    """Serves in the child: says that it is ready once `make` has given what answers each kind of question, then answers
    until stdin ends. What is printed meanwhile goes to stderr."""
    answers_to = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A log that lags behind does not tell why its process died.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    answers: dict[str, Answer] = {}
    _reply(answers_to, lambda: answers.update(make()))
    for line in sys.stdin:
        kind, question = json.loads(line)
        _reply(answers_to, lambda kind=kind, question=question: answers[kind](question))  # type: ignore[misc]
    return 0


def _reply(to: TextIO, answer: Callable[[], object]) -> None:
    try:
        reply = {"answer": answer()}
    except Exception:
        reply = {"error": traceback.format_exc()}
    print(json.dumps(reply), file=to, flush=True)


class ChildError(Exception):
    """Says that a child failed, with the child's own message or log."""


class MeasuredChild:
    """Runs, in the parent, a process that calls `serve`. It is ready, after `start_s` seconds, once this is made, and
    is gone after `close`. Raises `ChildError`, as `ask` does."""

    def __init__(self, command: Sequence[str | Path], log: Path, **environment: str) -> None:
        self._log = log
        began = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, **environment},
            )
        try:
            self._read()
        except ChildError:
            self.close()
            raise
        self.start_s = time.perf_counter() - began

    def ask(self, kind: str, question: object = None) -> Any:
        assert self._process.stdin is not None
        # If it is gone, its log tells why.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([kind, question]), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """Ends the child; it may be called again."""
        # A question that it did not live to read may still be there to be flushed.
        with contextlib.suppress(BrokenPipeError), self._process:
            self._process.kill()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"a measured process ended early: {self._log.read_text(errors='replace')[-4000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"a measured process failed: {reply['error']}")
        return reply["answer"]
