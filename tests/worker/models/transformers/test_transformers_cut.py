"""A model cut in two computes what it computes whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.tiny_configs import causal_class, tiny_config
from octavo.worker.models.transformers.cut import CutModel

TOKENS = torch.arange(100, 112)


def model_of(directory: Path, model_type: str) -> Any:
    architecture = causal_class(model_type)
    return write_random_model(directory, tiny_config(model_type, architecture.config_class), architecture)


# A scale, a divisor and a soft cap after the head; a decoder inside a decoder.
@pytest.mark.parametrize("model_type", ["cohere", "granite", "gemma2", "opt"])
@torch.inference_mode()
def test_rows_cut_out_between_the_halves_have_the_logits_of_the_whole(model_type: str, tmp_path: Path) -> None:
    cut = CutModel(model_of(tmp_path, model_type))
    expected = cut.run(TOKENS[None])[0]
    hidden = cut.decode(TOKENS, torch.arange(len(TOKENS)))
    for rows in ([11], [0, 5, 6], list(range(12))):
        torch.testing.assert_close(cut.logits(hidden[rows]), expected[rows], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_it_stays_whole_for_others(tmp_path: Path) -> None:
    cut = CutModel(model_of(tmp_path, "cohere"))
    expected = cut.run(TOKENS[None])
    cut.logits(cut.decode(TOKENS, torch.arange(len(TOKENS))))
    assert torch.equal(cut.run(TOKENS[None]), expected)


def test_a_model_without_a_decoder_of_its_own_cannot_be_cut() -> None:
    def forward(_self: Any, input_ids: torch.Tensor, **_: Any) -> Any:
        return type("Output", (), {"logits": input_ids})

    flat: Any = type("Flat", (PreTrainedModel,), {"config_class": PretrainedConfig, "forward": forward})
    with pytest.raises(ValueError, match="Flat is not a decoder with a head"):
        CutModel(flat(PretrainedConfig())).run(TOKENS[None])
