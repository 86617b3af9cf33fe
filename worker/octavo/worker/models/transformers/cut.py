"""A causal language model of transformers, cut between its decoder and the part that makes logits of hidden states."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class CutModel:
    """Computes the model's own forward pass as `decode` and `logits`, one after the other.

    Rows that are not wanted go no further than `decode`, and the operations of an architecture around its LM head (soft
    caps, multipliers) are still done. The first `run` finds out where to cut.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self._decoder: Any = None
        self._output_type: Any = None

    def run(self, input_ids: Tensor) -> Tensor:
        """Returns the logits, [batch, tokens, vocab_size], of sequences ([batch, tokens] int64) as transformers
        computes them.

        Raises `ValueError` if the model has no decoder of its own to be cut off.
        """
        with _first_called(self.model) as called:
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        if not called:
            raise ValueError(f"{type(self.model).__name__} is not a decoder with a head on top of it")
        self._decoder = called[0]
        return logits

    def decode(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Computes the last hidden states, [tokens, hidden_size], of tokens ([tokens] int64) in one row."""
        output = self._decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        self._output_type = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits, [rows, vocab_size], of hidden states from `decode`."""
        placeholder = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        with self._decoded(hidden):
            logits: Tensor = self.model(input_ids=placeholder, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _decoded(self, hidden: Tensor) -> Iterator[None]:
        """Makes the decoder return `hidden` within the block, whatever its input."""
        output = self._output_type(last_hidden_state=hidden[None])
        self._decoder.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self._decoder.forward


@contextmanager
def _first_called(model: PreTrainedModel) -> Iterator[list[nn.Module]]:
    """Collects the models inside `model`, within the block, in the order in which they are called."""
    called: list[nn.Module] = []
    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and module is not model:
                hooks.enter_context(module.register_forward_pre_hook(lambda module, _: called.append(module)))
        yield called
