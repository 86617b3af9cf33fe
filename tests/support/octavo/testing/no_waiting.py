"""An event loop in which nobody waits: where all do, its clock goes on to when the first of them is due."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Idle(selectors.SelectSelector):
    """Instead of waiting it notes how long it would have waited at most."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.seconds += max(0.0, timeout or 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._idle = _Idle()
        super().__init__(self._idle)

    def time(self) -> float:
        return self._idle.seconds


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs `main`, which waits for nothing but time, on a clock that stands still while anything is done."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
