"""Heads, which make texts' outputs of their hidden states: vectors by a pooling, or scores of classes.

All is computed in fp32, and in such a way that a text's output depends on no other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.loading.weights import Checkpoint, WeightSource
from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting
from octavo.worker.models.encoders.config import EncoderConfig, EncoderFile
from octavo.worker.models.encoders.encoder import LayerNorm
from octavo.worker.models.linear import ACTIVATIONS
from octavo.worker.pooling.sentence_files import DenseFile, SentencePooling


class Head(Protocol):
    """Makes the outputs of texts, [texts, num_outputs] fp32, of their hidden states, [tokens, hidden_size] fp32, which
    lie one text after the other, of `lengths` tokens each."""

    num_outputs: int

    def __call__(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor: ...


def _weighted_mean(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype)
    return (hidden * weights[:, None]).sum(0) / weights.sum()


_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(0),
    "mean": lambda hidden: hidden.mean(0),
    "mean_sqrt_len": lambda hidden: hidden.sum(0) / math.sqrt(len(hidden)),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda hidden: hidden[-1],
}


def _pooled(mode: str, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns what a mode gives of each text, [texts, hidden_size]."""
    if mode == "mean":
        # All in one call: what torch takes for a call is many times what it takes for the sums of a short text.
        firsts = torch.tensor([0, *accumulate(lengths[:-1])])
        return F.embedding_bag(torch.arange(len(hidden)), hidden, firsts, mode="mean")
    return torch.stack([_POOLS[mode](text) for text in hidden.split_with_sizes(list(lengths))])


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation, of fp32."""

    weight: Tensor
    bias: Tensor | None
    activate: Callable[[Tensor], Tensor]

    def __call__(self, row: Tensor) -> Tensor:
        return self.activate(F.linear(row, self.weight, self.bias))


class EmbeddingHead:
    """Makes a vector: pooled, taken through dense layers, and normalised where the model's files say so; or scores of
    classes, where the last layer is `scores`."""

    def __init__(self, pooling: SentencePooling, hidden_size: int, scores: Dense | None = None) -> None:
        """Raises `ModelConfigError` or `WeightsError` on dense layers that do not fit."""
        self.modes = pooling.modes
        self._dense = [_dense_of(file) for file in pooling.dense]
        self._normalizes = pooling.normalizes
        self.num_outputs = hidden_size * len(pooling.modes)
        for file in pooling.dense:
            if file.num_inputs != self.num_outputs:
                raise ModelConfigError(f"{file.directory} takes {file.num_inputs} numbers, and gets {self.num_outputs}")
            self.num_outputs = file.num_outputs
        if scores is not None:
            self._dense.append(scores)
            self.num_outputs = len(scores.weight)

    def __call__(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        return self._finished(torch.cat([_pooled(mode, hidden, lengths) for mode in self.modes], dim=1))

    def finish(self, parts: list[Tensor]) -> Tensor:
        """Makes the output of one text of what each mode of the pooling gives of it, [hidden_size] fp32."""
        return self._finished(torch.cat(parts)[None])[0]

    def _finished(self, rows: Tensor) -> Tensor:
        for dense in self._dense:
            # Row by row: products of several might round otherwise.
            rows = torch.stack([dense(row) for row in rows])
        return F.normalize(rows, dim=1) if self._normalizes else rows


class ClassifierHead:
    """Makes scores of classes: of the first token's state, or of all states' mean, taken through `layers`."""

    def __init__(self, pool: str, layers: list[Callable[[Tensor], Tensor]], num_outputs: int) -> None:
        self._pool = _POOLS[pool]
        self._layers = layers
        self.num_outputs = num_outputs

    def __call__(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        return torch.stack([self._scores(text) for text in hidden.split_with_sizes(list(lengths))])

    def _scores(self, hidden: Tensor) -> Tensor:
        state = self._pool(hidden)
        for layer in self._layers:
            state = layer(state)
        return state


def _dense_of(file: DenseFile) -> Dense:
    source = Checkpoint(file.directory)
    activate = torch.tanh if file.activation == "Tanh" else _same
    return _take_dense(source, "linear", (file.num_outputs, file.num_inputs), activate, has_bias=file.has_bias)


def _same(row: Tensor) -> Tensor:
    return row


def _take_dense(
    source: WeightSource,
    name: str,
    shape: tuple[int, int],
    activate: Callable[[Tensor], Tensor] = _same,
    *,
    has_bias: bool = True,
) -> Dense:
    bias = source.take(f"{name}.bias", shape[:1]).float() if has_bias else None
    return Dense(source.take(f"{name}.weight", shape).float(), bias, activate)


def score_layer(count: int, hidden_size: int, source: WeightSource) -> Dense:
    """Takes the layer by which transformers scores `count` classes of a decoder's last state. Raises `WeightsError`."""
    return _take_dense(source, "score", (count, hidden_size), has_bias=False)


def num_labels(file: EncoderFile) -> int:
    """Returns the number of classes; transformers' own where config.json says nothing."""
    return len(file.id2label) if file.id2label else file.num_labels or 2


def classifier_head(file: EncoderFile, config: EncoderConfig, source: WeightSource, prefix: str) -> ClassifierHead:
    """Takes the head of a classifier whose encoder's tensors begin with `prefix`. Raises `ModelConfigError`,
    `WeightsError`."""
    size, count = config.hidden_size, num_labels(file)
    square = size, size
    if config.family == "bert":
        pooler = _take_dense(source, f"{prefix}pooler.dense", square, torch.tanh)
        return ClassifierHead("cls", [pooler, _take_dense(source, "classifier", (count, size))], count)
    if config.family == "roberta":
        dense = _take_dense(source, "classifier.dense", square, torch.tanh)
        return ClassifierHead("cls", [dense, _take_dense(source, "classifier.out_proj", (count, size))], count)
    if file.classifier_pooling not in ("cls", "mean") or file.classifier_activation not in ACTIVATIONS:
        raise UnsupportedSetting(
            f"classifier_pooling = {file.classifier_pooling!r} with classifier_activation ="
            f" {file.classifier_activation!r} is not implemented"
        )
    activate = ACTIVATIONS[file.classifier_activation]
    dense = _take_dense(source, "head.dense", square, activate, has_bias=file.classifier_bias)
    bias = source.take("head.norm.bias", (size,)).float() if file.norm_bias else None
    norm = LayerNorm(source.take("head.norm.weight", (size,)).float(), bias, file.norm_eps)
    classifier = _take_dense(source, "classifier", (count, size))
    return ClassifierHead(file.classifier_pooling, [dense, norm, classifier], count)
