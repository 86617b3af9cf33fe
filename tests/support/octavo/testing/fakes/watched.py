"""Lists that notice who reads them."""

import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Watched(list[T]):
    """`apart` has an entry for each way in which it was walked over: True for off the main thread."""

    def __init__(self, items: Iterable[T]) -> None:
        super().__init__(items)
        self.apart: set[bool] = set()

    def __iter__(self) -> Iterator[T]:
        self.apart.add(threading.current_thread() is not threading.main_thread())
        return super().__iter__()
