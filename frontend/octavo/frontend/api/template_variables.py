"""Chooses the variables that a chat template is told: how much the model is to think, and the client's own."""

from collections.abc import Mapping, Set
from typing import Any, Final

from octavo.frontend.text.tokenizer import ModelTokenizer

# Template variables that turn reasoning on and off, where a template has no other way to say how much it is to be.
SWITCHES: Final = ("enable_thinking", "thinking")
# Efforts that mean no reasoning.
_NO_EFFORTS: Final = ("none", "minimal")


def readable_variables(
    variables: Mapping[str, Any],
    effort: str | None,
    tokenizer: ModelTokenizer,
    with_tools: bool,
    ignored: list[str],
    effort_field: str = "reasoning_effort",
) -> dict[str, Any]:
    """Returns the variables that the model's chat template reads; the others are named in `ignored`.

    `effort` says how much the model is to think, in the words of OpenAI's API; `variables` go before it. A template
    that can only turn reasoning on or off turns it off for efforts that mean none.
    """
    readable = tokenizer.template_variables(with_tools)
    found = {name: value for name, value in variables.items() if name in readable}
    ignored += [f"chat_template_kwargs.{name}" for name in sorted(variables.keys() - readable)]
    if effort is not None:
        if said := _effort_variables(effort, readable):
            return {**said, **found}
        ignored.append(effort_field)
    return found


def _effort_variables(effort: str, readable: Set[str]) -> dict[str, Any]:
    if "reasoning_effort" in readable:
        return {"reasoning_effort": effort}
    return {name: effort not in _NO_EFFORTS for name in SWITCHES if name in readable}
