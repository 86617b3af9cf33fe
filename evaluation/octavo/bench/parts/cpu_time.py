"""CPU time of one thread: how long a call takes, and where it goes."""

import cProfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def timed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What the call returns, and its CPU time in microseconds."""
    began = time.thread_time_ns()
    returned = function(*args, **kwargs)
    return returned, (time.thread_time_ns() - began) / 1000


class Profiler(cProfile.Profile):
    """Where the calls that it runs (`runcall`) spend their time."""

    def __init__(self) -> None:
        super().__init__(time.thread_time)

    def hottest(self, count: int) -> list[tuple[str, float]]:
        """The `count` functions in which most time is spent, callees aside, each with its share."""
        entries = sorted(self.getstats(), key=lambda entry: -entry.inlinetime)
        total = sum(entry.inlinetime for entry in entries)
        return [(_name(entry.code), entry.inlinetime / total) for entry in entries[:count]]


def _name(code: CodeType | str) -> str:
    return code if isinstance(code, str) else f"{Path(code.co_filename).stem}.{code.co_qualname}"
