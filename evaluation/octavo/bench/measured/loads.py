"""Requests like those of the paper's datasets, made shorter so that a small machine can serve enough of them."""

from dataclasses import replace

from octavo.workload.lengths import DATASETS, Dataset, Lengths, LogNormal


def scaled(name: str, scale: float) -> Dataset:
    """The dataset of that name with `scale` times its lengths: means and bounds. Raises `ValueError` if its lengths
    cannot be scaled."""
    dataset = DATASETS[name]
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{name} has no lengths of its own that could be scaled")
    inputs, outputs = (_scaled(lengths, scale) for lengths in (dataset.inputs, dataset.outputs))
    return replace(dataset, inputs=inputs, outputs=outputs, max_total=round(dataset.max_total * scale))


def _scaled(lengths: Lengths, scale: float) -> Lengths:
    if not isinstance(lengths, LogNormal):
        raise ValueError(f"{lengths} cannot be scaled")
    return replace(lengths, mean=lengths.mean * scale, high=round(lengths.high * scale))
