"""Reads what a model directory says about texts whose output is asked for: prompts before them, names of classes, and
what makes probabilities of scores."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.frontend.errors import bad_parameter
from octavo.frontend.text.model_defaults import read_json
from octavo.runtime.models.directory import ModelDirectoryError


class Activation(enum.StrEnum):
    """Names what makes probabilities of scores: nothing, the sigmoid of each, or the softmax of all."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True)
class PoolingDefaults:
    """Holds `prompts`, texts by their names that come before what is embedded, with the name of the one that is used
    where none is asked for; the `labels` of classes, empty where they have no names; and the `activation` of scores of
    one class, and of several, by sentence-transformers' files and transformers' `problem_type`."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    activation: Activation = Activation.SIGMOID
    activation_of_many: Activation = Activation.SOFTMAX

    def prompt(self, name: str | None, *usual: str) -> str:
        """Returns the prompt of this name; if None is asked for, the first that there is of those `usual`, or else the
        model's default. Raises `InvalidRequest` for a name that is not known."""
        if name is not None:
            if name not in self.prompts:
                known = ", ".join(map(repr, self.prompts)) or "none"
                raise bad_parameter("prompt_name", repr(name[:64]), f"the model's files name these: {known}")
            return self.prompts[name]
        for each in (*usual, self.default_prompt):
            if each is not None and each in self.prompts:
                return self.prompts[each]
        return ""


def read_pooling_defaults(directory: Path) -> PoolingDefaults:
    """Reads config.json and config_sentence_transformers.json (optional). Raises `ModelDirectoryError`."""
    config = read_json(directory / "config.json")
    sentence = read_json(directory / "config_sentence_transformers.json", missing={})
    prompts = sentence.get("prompts") or {}
    default = sentence.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelDirectoryError(f"{directory}/config_sentence_transformers.json has prompts that are no texts")
    given = _activation(config, sentence)
    several = Activation.SIGMOID if config.get("problem_type") == "multi_label_classification" else Activation.SOFTMAX
    return PoolingDefaults(
        prompts=prompts,
        default_prompt=default if isinstance(default, str) else None,
        labels=_labels(config),
        activation=given or Activation.SIGMOID,
        activation_of_many=several,
    )


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if not isinstance(named, dict):
        return ()
    return tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(len(named)))


def _activation(config: dict[str, Any], sentence: dict[str, Any]) -> Activation | None:
    """Returns what sentence-transformers applies to the scores of a cross-encoder, if its files say so."""
    beside = config.get("sentence_transformers")
    names = (
        sentence.get("activation_fn"),
        beside.get("activation_fn") if isinstance(beside, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    )
    name = next((each for each in names if isinstance(each, str)), "").rpartition(".")[2]
    return {"Identity": Activation.NONE, "Sigmoid": Activation.SIGMOID}.get(name)
