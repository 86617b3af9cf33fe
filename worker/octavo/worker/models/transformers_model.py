"""Any decoder-only architecture of transformers, its attention paged."""

from pathlib import Path

import torch
from torch import Tensor

from octavo.worker.loading import open_weights
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.transformers_attention import attending
from octavo.worker.models.transformers_check import check
from octavo.worker.models.transformers_cut import CutModel
from octavo.worker.models.transformers_linear import replace_linears
from octavo.worker.models.transformers_loading import context_length, load, model_class, read_transformers_config


class TransformersModel:
    """An `octavo.worker.models.decoder.Decoder` around a causal language model of transformers.

    Raises `ConfigError` (as `UnsupportedModel` where paged attention is in the way) or `WeightsError`.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
        load_format: str = "auto",
    ) -> None:
        config = read_transformers_config(directory)
        model_class(config)
        context = context_length(config, max_model_len)
        model = load(config, open_weights(directory, load_format), dtype).to(device)
        if device.type == "cpu":
            replace_linears(model)
        self._model = CutModel(model)
        self.config = check(self._model, context)

    def forward(self, step: PagedStep) -> Tensor:
        """The last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""
        with attending(step) as forward_pass:
            hidden = self._model.decode(step.input_ids, step.positions)
        if forward_pass.num_calls != len(step.caches):
            raise RuntimeError(f"{forward_pass.num_calls} of {len(step.caches)} layers called attention")
        return hidden.index_select(0, step.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size], of what `forward` gave."""
        return self._model.logits(hidden) if len(hidden) else hidden.new_empty((0, self.config.vocab_size))
