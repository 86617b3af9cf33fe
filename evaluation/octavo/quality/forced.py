"""Computes a text's logits with a worker's model: over blocks of its KV cache, each next token given."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.wire.sampling import SamplingParams
from octavo.worker.config import WorkerConfig
from octavo.worker.health import Liveness
from octavo.worker.make_runner import with_runner
from octavo.worker.runner import Runner
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.batch import build_batch
from octavo.worker.step.model_runner import ModelRunner


class ForcedModel:
    """Gives a model's logits for windows of a text, one window after the other in the same blocks."""

    def __init__(self, runner: Runner) -> None:
        assert isinstance(runner, ModelRunner), "only models have logits"
        self.name, self.dtype = runner.model.name, runner.model.dtype
        self.kv_dtype = runner.kv_cache_dtype
        self._runner = runner

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int], first: int) -> Tensor:
        """Computes one window as the prompt of one request; returns the last hidden states of the positions `first` to
        the last but one, each of which predicts the token after it."""
        runner, model = self._runner, self._runner.paged_model
        item = WorkItem(self._sequence(token_ids), start=0, num_tokens=len(token_ids), choosers=())
        batch = build_batch([item], model.num_groups, runner.block_size, model.device)
        hidden = model.forward(batch, model.step(batch))
        return hidden[batch.logit_rows.first_of_prompts + first :].clone()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits ([positions, vocab_size]) of some of the hidden states, until the next call."""
        return self._runner.paged_model.logits(hidden)

    def _sequence(self, token_ids: Sequence[int]) -> WorkerSequence:
        length, groups = -(-len(token_ids) // self._runner.block_size), self._runner.paged_model.num_groups
        return WorkerSequence(
            sequence_id=1,
            sequence_index=0,
            # Whoever wants logprobs of the prompt gets the hidden states of all of it.
            sampling=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            prompt_length=len(token_ids),
            token_ids=list(token_ids),
            num_computed=0,
            block_tables=[list(range(group * length, (group + 1) * length)) for group in range(groups)],
        )


def with_models(
    configs: Sequence[WorkerConfig],
    use: Callable[[list[ForcedModel]], None],
    loaded: Sequence[ForcedModel] = (),
) -> None:
    """Loads a model for each of `configs` as a worker does, after those `loaded`, and calls `use` with all. Raises
    `click.ClickException` where a worker would not start."""
    if not configs:
        return use([*loaded])

    def go_on(runner: Runner, _: Callable[[], None]) -> None:
        with_models(configs[1:], use, [*loaded, ForcedModel(runner)])

    return with_runner(configs[0], Liveness(), go_on)
