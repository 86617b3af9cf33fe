"""One architecture of transformers, tried on a tiny random model: Octavo's logits against transformers' own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.testbed.models import fp32_runner, new_sequences, run_step
from octavo.testing.small.tiny_configs import causal_class, tiny_config
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.transformers.loading import refusal
from octavo.worker.step.model_runner import ModelRunner

# Longer than the windows of tiny configurations, and cut by a budget that is no multiple of a block.
_PROMPT_LENGTHS = (1, 9, 50)
_NEW_TOKENS, _BUDGET = 8, 13
# Of the largest logit: what fp32 sums in another order differ by.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Trial:
    """`error`: the largest difference of a logit, relative to the largest logit; `reason`: why it was refused, or could
    not be tried."""

    model_type: str
    architecture: str
    status: Literal["works", "refused", "wrong", "untried"]
    error: float | None = None
    reason: str | None = None


def try_architecture(model_type: str, directory: Path) -> Trial:
    """Makes a tiny model of `model_type` in `directory` and runs it both ways."""
    architecture = causal_class(model_type)
    if reason := refusal(architecture):
        return Trial(model_type, architecture.__name__, "refused", reason=reason)
    try:
        model = write_random_model(directory, tiny_config(model_type, architecture.config_class), architecture)
        model(torch.tensor([[3, 4]]), use_cache=False)
    except Exception as error:  # Any of transformers' hundreds of classes may raise anything.
        return Trial(model_type, architecture.__name__, "untried", reason=_one_line(error))
    try:
        runner = fp32_runner(directory, num_blocks=128, threads=1, model_impl="transformers")
    except ModelConfigError as error:
        reason = str(error).removeprefix(f"{directory}: ")
        return Trial(model_type, architecture.__name__, "refused", reason=reason)
    difference = max_logit_error(runner, model)
    return Trial(model_type, architecture.__name__, "works" if difference <= TOLERANCE else "wrong", difference)


def write_random_model(directory: Path, config: Any, architecture: Any) -> Any:
    """A random model of `config`, saved to `directory`, which computes its attention step by step, in fp32.

    Its numbers are such that every layer matters and logits are well apart: transformers' own start too alike.
    """
    torch.manual_seed(0)
    model = architecture._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter)
    model.save_pretrained(directory)
    return model


def _randomize(name: str, parameter: Tensor) -> None:
    if parameter.dim() > 1:
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    else:
        parameter.normal_(mean=1.0 if "norm" in name and name.endswith("weight") else 0.0, std=0.1)


@torch.inference_mode()
def max_logit_error(runner: ModelRunner, model: Any) -> float:
    """Runs prompts of several lengths together, in chunks, then token by token, greedily; compares the logits of every
    choice with those of `model` on the whole sequence, relative to the largest."""
    prompts = [[(5 + 7 * place * (row + 1)) % 300 for place in range(n)] for row, n in enumerate(_PROMPT_LENGTHS)]
    sequences = new_sequences(runner, prompts, _NEW_TOKENS)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    computed = runner._model.logits
    chosen: list[Tensor] = []
    runner._model.logits = lambda hidden: _kept(computed(hidden), chosen)  # type: ignore[method-assign]
    while live := [each for each in sequences if each.num_generated < _NEW_TOKENS]:
        before = [each.num_generated for each in live]
        run_step(runner, live, _BUDGET)
        chose = [each for each, count in zip(live, before, strict=True) if each.num_generated > count]
        for sequence, row in zip(chose, chosen.pop(), strict=True):
            logits[sequence.sequence_id].append(row)
    return max(
        _error(model(torch.tensor([each.token_ids])).logits[0, each.prompt_length - 1 : -1], torch.stack(rows))
        for each, rows in zip(sequences, logits, strict=True)
    )


def _kept(logits: Tensor, kept: list[Tensor]) -> Tensor:
    kept.append(logits)
    return logits


def _error(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max() / expected.abs().max())


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
