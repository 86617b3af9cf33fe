"""The decoder around any decoder-only architecture of transformers, with paged attention."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.worker.loading.weights import WeightSource
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.linear import obstacle_to_quantized
from octavo.worker.models.transformers.attention import attending
from octavo.worker.models.transformers.check import check
from octavo.worker.models.transformers.cut import CutModel
from octavo.worker.models.transformers.experts import choose_experts, use_experts
from octavo.worker.models.transformers.linear import replace_linears
from octavo.worker.models.transformers.loading import (
    context_length,
    empty_model,
    head_weight,
    load,
    model_class,
    quantizable_linears,
    read_transformers_config,
)
from octavo.worker.models.transformers.names import StoredNames
from octavo.worker.models.transformers.shards import ModelShare, join, model_share
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup

logger = logging.getLogger(__name__)


class TransformersModel:
    """An `octavo.worker.models.decoder.Decoder` around a causal language model of transformers.

    Raises `ModelConfigError` (as `UnsupportedModel` if paged attention cannot serve it) or `WeightsError`.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None,
        open_source: Callable[..., WeightSource],
        group: ShardGroup = SINGLE,
        *,
        quantized: bool = False,
    ) -> None:
        """Takes the weights of what `open_source` opens, given what tells the name of the LM head's weight; `quantized`
        tells whether they are."""
        config = read_transformers_config(directory)
        model_class(config)
        context = context_length(config, max_model_len)
        share = _share(config, group)
        source = open_source(is_end=_HeadOf(config))
        # Without kernels for them, quantised weights are numbers at once.
        reason = obstacle_to_quantized(device) if quantized else None
        if reason is not None:
            logger.info("quantised weights become %s: %s", dtype, reason)
        linears = quantizable_linears(config, source) if quantized and reason is None else {}
        model = load(config, source, dtype, share, linears, device).to(device)
        if device.type == "cpu":
            replace_linears(model)
        if share:
            join(model, share, group)
        else:
            use_experts(model, choose_experts(model, device))
        self._model = CutModel(model)
        self.config = check(self._model, context)

    def forward(self, step: PagedStep) -> Tensor:
        """Computes the last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        with attending(step) as forward_pass:
            hidden = self._model.decode(step.input_ids, step.positions)
        if forward_pass.num_calls != len(step.caches):
            raise RuntimeError(f"{forward_pass.num_calls} of {len(step.caches)} layers called attention")
        return hidden.index_select(0, step.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of hidden states from `forward`, [rows, vocab_size]; no rows on ranks other than 0."""
        return self._model.logits(hidden) if len(hidden) else hidden.new_empty((0, self.config.vocab_size))


class _HeadOf:
    """Tells whether a stored tensor is the weight of the LM head of `config`'s model, once asked."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __call__(self, stored: str) -> bool:
        parameter, _ = self._names.parameter(stored)
        return parameter == self._head

    @functools.cached_property
    def _model(self) -> Any:
        return empty_model(self._config)

    @functools.cached_property
    def _names(self) -> StoredNames:
        return StoredNames(self._model)

    @functools.cached_property
    def _head(self) -> str | None:
        return head_weight(self._model)


def _share(config: Any, group: ShardGroup) -> ModelShare | None:
    """Returns this rank's share of the model, or None for the whole model."""
    if group.size == 1:
        return None
    share = model_share(empty_model(config), group)
    if not share.attention and group.rank == 0:
        logger.warning("every rank computes all attention heads of this model and keeps all their keys and values")
    return share
