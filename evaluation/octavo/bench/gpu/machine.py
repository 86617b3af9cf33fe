"""Holds what cases run on: the device, its rates, what is kept for the next case, and the time that is left."""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar, cast

import torch

from octavo.bench.gpu.cases import Budget, HeldModel
from octavo.bench.gpu.floors import NOMINAL, Ceilings, rotations
from octavo.bench.gpu.timing import Contenders, Race, race


class Closable(Protocol):
    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=Closable)


class GpuMachine:
    """Runs cases on one device. The kept model or service is closed before another one is made: a GPU has memory for
    one model at a time."""

    def __init__(self, device: torch.device, budget: Budget, *, quick: bool = False) -> None:
        self.device = device
        self.budget = budget
        self.quick = quick
        self.rates: Ceilings = NOMINAL
        self._name = ""
        self._kept: Closable | None = None

    def rotations(self, num_bytes: int) -> int:
        """Returns how many sets of inputs of `num_bytes` to use in turns."""
        return 2 if self.quick else rotations(num_bytes)

    def race(self, contenders: Contenders, *, graphs: bool = True) -> Race:
        """Calls `octavo.bench.gpu.timing.race` on this device."""
        if self.quick:
            return race(contenders, self.device, seconds=0.0, least_rounds=2, graphs=graphs)
        return race(contenders, self.device, graphs=graphs)

    def holds(self, name: str) -> bool:
        return self._kept is not None and self._name == name

    def hold(self, held: HeldModel, make: Callable[[], Kept]) -> Kept:
        """Returns the result of `make`, or the earlier result if nothing else was held since."""
        if not self.holds(held.name):
            self.release()
            self._kept, self._name = make(), held.name
        return cast(Kept, self._kept)

    def release(self) -> None:
        """Closes what is held and gives its memory back. May be called again."""
        kept, self._kept, self._name = self._kept, None, ""
        if kept is not None:
            with suppress(OSError):
                kept.close()
        del kept
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
