"""Prompts in the forms that vLLM takes them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.client import Chat, Prompt, Tool

# A text, token ids, or a mapping with one of both as `prompt` or `prompt_token_ids`.
PromptLike = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_KEYS: Final = ("prompt", "prompt_token_ids")


def read_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """One or several. Raises `ValueError` for what is no prompt."""
    if _is_one(prompts):
        return [_read(prompts)]
    return [_read(prompt) for prompt in prompts]


def read_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One or several."""
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Functions as OpenAI's API has them. Raises `ValueError` for a tool that is none."""
    functions = [tool.get("function") for tool in tools]
    if not all(isinstance(function, Mapping) and "name" in function for function in functions):
        raise ValueError("every tool must be a mapping like {'type': 'function', 'function': {'name': ...}}")
    return [Tool(f["name"], f.get("description") or "", f.get("parameters")) for f in functions if f]


def text_of(prompt: Prompt) -> str | None:
    """What was written, where it was text."""
    return prompt if isinstance(prompt, str) else None


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or bool(len(prompts) and isinstance(prompts[0], int))


def _read(prompt: Any) -> Prompt:
    if isinstance(prompt, str | Chat):
        return prompt
    if isinstance(prompt, Mapping):
        if unknown := sorted(prompt.keys() - set(_KEYS)):
            raise ValueError(f"a prompt has no {unknown[0]!r}; give it as {' or '.join(_KEYS)}")
        # Token ids win, for they were made of the text.
        return _read(prompt.get("prompt_token_ids") or prompt.get("prompt"))
    if isinstance(prompt, Sequence) and all(isinstance(token_id, int) for token_id in prompt):
        return list(prompt)
    raise ValueError(f"a prompt is a text, token ids, or a mapping with one of both, and not {type(prompt).__name__}")
