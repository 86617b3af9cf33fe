"""The report of a long load, which shows a bar on a terminal and a line now and then in a log."""

import logging
import sys
import time
from collections.abc import Callable, Mapping

from torch import Tensor
from tqdm import tqdm

from octavo.kernels.quantized import Quantized
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightSource

logger = logging.getLogger(__name__)

# A load that ends sooner needs no bar.
_BAR_AFTER_S = 2.0
_LINE_EVERY_S = 5.0
_MB = 1_000_000


class LoadProgress:
    """Counts the bytes of one load, of `total`, and reports them on stderr.

    `clock` returns seconds; `bar` tells whether stderr is a terminal (None: looks).
    """

    def __init__(
        self, title: str, total: int, *, clock: Callable[[], float] = time.monotonic, bar: bool | None = None
    ) -> None:
        self._title = title
        self._total = total
        self._clock = clock
        self._done = 0
        self._began = self._last_line = clock()
        shown = sys.stderr.isatty() if bar is None else bar
        self._bar = (
            tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=_BAR_AFTER_S, leave=False) if shown else None
        )
        # At once, so that a log shows what a process is busy with.
        logger.info("%s: %d MB", title, total // _MB)

    def advance(self, num_bytes: int) -> None:
        """Counts `num_bytes` more as read."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif (now := self._clock()) - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            percent = min(100, 100 * self._done // max(1, self._total))
            logger.info("%s: %d %% after %.0f s", self._title, percent, now - self._began)

    def close(self) -> None:
        """Ends the report: all bytes are read."""
        if self._bar is not None:
            self._bar.close()
        logger.info("%s: done in %.1f s", self._title, self._clock() - self._began)


class WatchedWeights:
    """A `WeightSource` that takes tensors from `source` and reports their bytes to `progress`."""

    def __init__(self, source: WeightSource, progress: LoadProgress) -> None:
        self._source = source
        self._progress = progress

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the source's names and shapes."""
        return self._source.shapes()

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns the source's tensor. Raises `WeightsError`."""
        tensor = self._source.take(name, shape, part)
        self._progress.advance(tensor.nbytes)
        return tensor

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor | Quantized:
        """Returns the source's weight. Raises `WeightsError`."""
        weight = self._source.take_weight(name, shape, part)
        tensors = weight.tensors().values() if isinstance(weight, Quantized) else (weight,)
        self._progress.advance(sum(tensor.nbytes for tensor in tensors))
        return weight

    def drop(self, name: str) -> None:
        """Drops the tensor in the source."""
        self._source.drop(name)

    def finish(self) -> None:
        """Ends the report. Raises `WeightsError`."""
        self._source.finish()
        self._progress.close()
