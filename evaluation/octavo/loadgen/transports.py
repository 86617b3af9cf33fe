"""Defines how a run reaches a server, whatever protocol the server speaks."""

from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from octavo.loadgen.records import Answer
from octavo.workload.job import Job

T = TypeVar("T")
# Sends one request and tells what comes of it. Raises `Failure`.
Call = Callable[[Answer], Awaitable[None]]


class Transport(Protocol):
    """Connects to a server."""

    async def open(self) -> str:
        """Returns the name of the model that is asked. Raises `TargetError` if the server cannot be asked at all."""
        ...

    def prepare(self, job: Job, index: int) -> Call:
        """Does all of the work for a request that can be done before it is due."""
        ...

    async def aclose(self) -> None:
        """Ends all connections."""
        ...


class Lot(Generic[T]):
    """Makes connections, each for `size` requests at a time: more are made as more are under way, so that no request
    waits for another's."""

    def __init__(self, make: Callable[[], T], size: int) -> None:
        self._make = make
        self._size = size
        self.members: list[T] = []
        # A number for every request that there is room for; those given back last are warm.
        self._free: list[int] = []

    def take(self) -> int:
        """Returns the number of a member with room; the caller gives it back."""
        if not self._free:
            self._free = [len(self.members)] * self._size
            self.members.append(self._make())
        return self._free.pop()

    def give_back(self, number: int) -> None:
        """Gives back a member that was taken."""
        self._free.append(number)
