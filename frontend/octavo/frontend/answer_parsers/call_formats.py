"""Declares the formats of calls by name, and finds a model's from its chat template."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from octavo.frontend.answer_parsers.call_grammars import (
    CallSyntax,
    GemmaSyntax,
    JsonSyntax,
    PythonicSyntax,
    TaggedSyntax,
)
from octavo.frontend.answer_parsers.gemma_calls import GemmaCallParser, GemmaForm
from octavo.frontend.answer_parsers.harmony import CALL, CALL_HEADER, END, MESSAGE
from octavo.frontend.answer_parsers.headed_calls import HeadedCallParser, HeadedForm
from octavo.frontend.answer_parsers.json_calls import JsonCallParser, JsonForm, MistralCallParser
from octavo.frontend.answer_parsers.parts import ToolCallParser
from octavo.frontend.answer_parsers.pythonic_calls import PythonicCallParser
from octavo.frontend.answer_parsers.tagged_calls import ArgumentTypes, TaggedCallParser, TaggedForm

_NAME: Final = r"(?P<name>[\w.:/-]+)"


@dataclass(frozen=True)
class CallFormat:
    """Describes how a model writes calls: how they are found, and how they are forced.

    `make` makes a parser; `markers` are texts that may be special tokens, without which no call could be found.
    """

    make: Callable[[ArgumentTypes, bool], ToolCallParser]
    markers: tuple[str, ...]
    syntax: CallSyntax


def _json(form: JsonForm, syntax: JsonSyntax, kind: type[JsonCallParser] = JsonCallParser) -> CallFormat:
    markers = (*form.opens, *form.closes, "[ARGS]", "[CALL_ID]")
    return CallFormat(lambda types, is_forced: kind(form, is_forced=is_forced), markers, syntax)


def _headed(form: HeadedForm, syntax: JsonSyntax, markers: tuple[str, ...] = ()) -> CallFormat:
    make = partial(_make_headed, form)
    return CallFormat(make, (*form.opens, *form.closes, *markers), syntax)


def _make_headed(form: HeadedForm, types: ArgumentTypes, is_forced: bool) -> ToolCallParser:
    return HeadedCallParser(form, is_forced=is_forced)


def _tagged(form: TaggedForm, syntax: TaggedSyntax) -> CallFormat:
    markers = (*form.opens, *form.closes, *syntax.markers)
    return CallFormat(lambda types, is_forced: TaggedCallParser(form, types, is_forced=is_forced), markers, syntax)


def _gemma(form: GemmaForm) -> CallFormat:
    syntax = GemmaSyntax(form.open, form.close, form.quote)
    markers = (form.open, form.close, form.quote)
    return CallFormat(lambda types, is_forced: GemmaCallParser(form, is_forced=is_forced), markers, syntax)


def _pythonic() -> CallFormat:
    opens, closes = ("<|python_start|>",), ("<|python_end|>",)
    return CallFormat(
        lambda types, is_forced: PythonicCallParser(opens, closes, is_forced=is_forced),
        (*opens, *closes),
        PythonicSyntax(),
    )


_HERMES: Final = _json(
    JsonForm(("<tool_call>",), ("</tool_call>",)),
    JsonSyntax('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
)
_LLAMA: Final = _json(
    JsonForm(("<|python_tag|>", "<|python_start|>"), ("<|python_end|>",), at_start=True, separator=";"),
    JsonSyntax('{"name": "', '", "parameters": ', "}", "; "),
)
_GRANITE: Final = _json(
    JsonForm(("<|tool_call|>", "<tool_call>"), in_lists=True),
    JsonSyntax('{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]"),
)
_PHI: Final = _json(
    JsonForm(("<|tool_call|>", "functools"), ("<|/tool_call|>",), in_lists=True),
    JsonSyntax('{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]<|/tool_call|>"),
)
_COMMAND_R: Final = _json(
    JsonForm(("<|START_ACTION|>", "Action: ```json", "Action:```json"), ("<|END_ACTION|>", "```"), in_lists=True),
    JsonSyntax('{"tool_name": "', '", "parameters": ', "}", ", ", "<|START_ACTION|>[", "]<|END_ACTION|>"),
)
_MISTRAL: Final = _json(
    JsonForm(("[TOOL_CALLS]",), in_lists=True),
    JsonSyntax('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
    MistralCallParser,
)
_MISTRAL_ARGS: Final = CallFormat(_MISTRAL.make, _MISTRAL.markers, JsonSyntax("[TOOL_CALLS]", "[ARGS]", "", ""))
_DEEPSEEK_OPENS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_CLOSES: Final = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK: Final = HeadedForm(
    _DEEPSEEK_OPENS,
    re.compile(
        rf"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?{_NAME}\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"
    ),
    _DEEPSEEK_CLOSES,
)
_DEEPSEEK_V3: Final = _headed(
    _DEEPSEEK,
    JsonSyntax(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    ("<｜tool▁sep｜>",),
)
_DEEPSEEK_V31: Final = _headed(
    _DEEPSEEK,
    JsonSyntax(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    ("<｜tool▁sep｜>",),
)
_KIMI: Final = _headed(
    HeadedForm(
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        re.compile(
            r"\s*(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[\w./-]+)(?::\d+)?)\s*"
            r"<\|tool_call_argument_begin\|>\s*"
        ),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    JsonSyntax(
        "<|tool_call_begin|>functions.",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        numbering=":",
    ),
    ("<|tool_call_argument_begin|>",),
)
_OPENAI: Final = _headed(
    HeadedForm(
        (CALL_HEADER,),
        re.compile(rf"(?:functions\.)?{_NAME}\s*(?:<\|constrain\|>)?\w*{re.escape(MESSAGE)}\s*"),
        (CALL, END),
    ),
    # The marker behind a call ends the answer.
    JsonSyntax(f"{CALL_HEADER}functions.", " <|constrain|>json<|message|>", "", None),
    ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>"),
)
_GLM: Final = _tagged(
    TaggedForm(
        ("<tool_call>",),
        re.compile(rf"\s*{_NAME}\s*(?=<arg_key>|</tool_call>)"),
        re.compile(r"<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>\s*<arg_value>"),
        ("</arg_value>",),
        re.compile(r"</tool_call>"),
        (),
    ),
    TaggedSyntax(
        ("<tool_call>", "\n"),
        ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"),
        "</tool_call>",
        "\n",
        markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    ),
)


def _functions(opening: str, closing: str) -> CallFormat:
    """Returns the format of Qwen3-Coder, with its own outer markers."""
    return _tagged(
        TaggedForm(
            (opening, "<function="),
            re.compile(r"(?:\s*<function=)?\s*(?P<name>[\w.:/-]+)\s*>"),
            re.compile(r"<parameter=(?P<key>[^>]+)>(?:\n|(?=[^\n]))"),
            ("\n</parameter>", "</parameter>"),
            re.compile(r"</function>"),
            (closing,),
        ),
        TaggedSyntax(
            (f"{opening}\n<function=", ">\n"),
            ("<parameter=", ">\n", "\n</parameter>", "\n"),
            f"</function>\n{closing}",
            "\n",
        ),
    )


def _invokes(opening: str, closing: str, prefix: str = "") -> CallFormat:
    """Returns the format of MiniMax, or that of DeepSeek's with its `prefix` of tags."""
    invoke, parameter = f"<{prefix}invoke name=", f"<{prefix}parameter name="
    text = r'(?:\s+string="(?P<text>true|false)")?' if prefix else ""
    return _tagged(
        TaggedForm(
            (opening, invoke),
            re.compile(rf'(?:\s*{re.escape(invoke)})?"?{_NAME}"?>'),
            re.compile(rf'{re.escape(parameter)}"?(?P<key>[^">]+)"?{text}>'),
            (f"</{prefix}parameter>",),
            re.compile(re.escape(f"</{prefix}invoke>")),
            (closing,),
        ),
        TaggedSyntax(
            (f'{invoke}"', '">\n'),
            (parameter + '"', '">', f"</{prefix}parameter>", "\n"),
            f"</{prefix}invoke>\n",
            "",
            f"{opening}\n",
            closing,
            tells_text=bool(prefix),
        ),
    )


# vLLM's names, where it has one.
CALL_FORMATS: Final[dict[str, CallFormat]] = {
    "command_r": _COMMAND_R,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _invokes("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    "functiongemma": _gemma(GemmaForm("<start_function_call>", "<end_function_call>", "<escape>")),
    "gemma4": _gemma(GemmaForm("<|tool_call>", "<tool_call|>", '<|"|>')),
    "glm45": _GLM,
    "granite": _GRANITE,
    "hermes": _HERMES,
    "kimi_k2": _KIMI,
    "llama3_json": _LLAMA,
    "llama4_pythonic": _pythonic(),
    "minimax_m2": _invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL_ARGS,
    "openai": _OPENAI,
    "phi4_mini_json": _PHI,
    "pythonic": _pythonic(),
    "qwen3_coder": _functions("<tool_call>", "</tool_call>"),
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>"),
}
HERMES: Final = "hermes"
OPENAI: Final = "openai"
NONE: Final = "none"
# The texts by which a template shows a format, the more special first.
_SHOWN: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("<|channel|>", "to=functions."), "openai"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=",), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<start_function_call>",), "functiongemma"),
    (("<tool_call|>",), "gemma4"),
    (("<|START_ACTION|>",), "command_r"),
    (("tool_name", "Action:"), "command_r"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("func_name1(",), "pythonic"),
)


def detect_format(template: str, *, tells_of_tools: bool = True) -> str:
    """Returns the name of the format in which a chat template makes its model write calls, `none` for no known one.

    `tells_of_tools` is false for a template that shows the model no tools; `tools_in_text` then writes them into the
    prompt.
    """
    if template and not tells_of_tools:
        return HERMES
    return next((name for texts, name in _SHOWN if all(text in template for text in texts)), NONE)
