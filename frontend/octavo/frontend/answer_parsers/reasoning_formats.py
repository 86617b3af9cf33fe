"""Declares the formats of reasoning by name, and finds a model's from its chat template."""

from collections.abc import Callable
from typing import Final

from octavo.frontend.answer_parsers.harmony import CHANNEL, MESSAGE, HarmonyReasoning
from octavo.frontend.answer_parsers.reasoning import ReasoningFormat, TaggedReasoning

_THINK: Final = TaggedReasoning("<think>", "</think>")
_GRANITE: Final = TaggedReasoning("Here is my thought process:", "Here is my response:")
_RESPONSE: Final = TaggedReasoning("<think>", "</think>", ("<response>", "</response>"))
_HUNYUAN: Final = TaggedReasoning("<think>", "</think>", ("<answer>", "</answer>"))
_MISTRAL: Final = TaggedReasoning("[THINK]", "[/THINK]")
_SEED: Final = TaggedReasoning("<seed:think>", "</seed:think>")
_KIMI: Final = TaggedReasoning("<think>", "</think>", calls=("<|tool_calls_section_begin|>",))
_COHERE: Final = TaggedReasoning(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_ACTION|>",),
)
_HARMONY: Final = HarmonyReasoning()

# vLLM's names, where it has one.
REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "cohere": _COHERE,
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "ernie45": _RESPONSE,
    "glm45": _THINK,
    "granite": _GRANITE,
    "hunyuan_a13b": _HUNYUAN,
    "kimi_k2": _KIMI,
    "minimax_m2": _THINK,
    "mistral": _MISTRAL,
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "openai_gptoss": _HARMONY,
    "qwen3": _THINK,
    "seed_oss": _SEED,
    "step3": _THINK,
}
AUTO: Final = "auto"
# The texts by which a template shows a format, the more special first.
_SHOWN: Final[tuple[tuple[tuple[str, ...], ReasoningFormat], ...]] = (
    ((CHANNEL, MESSAGE), _HARMONY),
    (("[THINK]",), _MISTRAL),
    (("<|START_THINKING|>",), _COHERE),
    (("<seed:think>",), _SEED),
    (("Here is my thought process:",), _GRANITE),
    (("</think>", "<response>"), _RESPONSE),
    (("</think>", "<answer>"), _HUNYUAN),
    (("</think>", "<|tool_calls_section_begin|>"), _KIMI),
    (("</think>",), _THINK),
)


def reasoning_format(name: str, template: str, is_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """Returns the format of a name of `octavo.runtime.options.common.REASONING_PARSER`, None for a model that thinks
    nothing.

    `auto` asks the chat template, and the vocabulary where a template is shared by models that think and others.
    """
    if name != AUTO:
        return REASONING_FORMATS.get(name)
    for texts, form in _SHOWN:
        if all(text in template for text in texts):
            return form
    return _MISTRAL if is_token("[THINK]") and is_token("[/THINK]") else None
