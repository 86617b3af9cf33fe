"""Where the weights come from that `--load-format` names."""

from pathlib import Path

from octavo.worker.dummy_weights import DummyWeights
from octavo.worker.load_progress import LoadProgress, WatchedWeights
from octavo.worker.weights import Checkpoint, WeightSource


def open_weights(directory: Path, load_format: str) -> WeightSource:
    """The weights of `directory` as `octavo.wire.model_directory.LOAD_FORMATS` means it.

    Raises `WeightsError` if they are to be read and cannot be.
    """
    if load_format == "dummy":
        return DummyWeights()
    checkpoint = Checkpoint(directory)
    return WatchedWeights(checkpoint, LoadProgress(f"loading {directory}", checkpoint.num_bytes))
