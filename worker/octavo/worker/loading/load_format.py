"""Where the weights come from that `--load-format` names, and tidying up once they are there."""

import ctypes
from pathlib import Path

from octavo.worker.loading.dummy_weights import DummyWeights
from octavo.worker.loading.progress import LoadProgress, WatchedWeights
from octavo.worker.loading.weights import Checkpoint, WeightSource


def open_weights(directory: Path, load_format: str, *, ranks: int = 1) -> WeightSource:
    """The weights of `directory` as `octavo.runtime.models.directory.LOAD_FORMATS` means it, of which each of `ranks`
    processes takes a share.

    Raises `WeightsError` if they are to be read and cannot be.
    """
    if load_format == "dummy":
        return DummyWeights()
    checkpoint = Checkpoint(directory)
    return WatchedWeights(checkpoint, LoadProgress(f"loading {directory}", checkpoint.num_bytes // ranks))


def release_free_memory() -> None:
    """Gives back what the C library keeps of freed memory: packing weights leaves it a good part of their size, which
    blocks of keys and values can have. Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
