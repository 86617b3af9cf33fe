"""Answers as models of each family write them, and what is in them."""

import json
from dataclasses import dataclass
from typing import Any, Final

from octavo.frontend.request.chat import Tool

WEATHER: Final = Tool(
    "get_weather",
    "Tells the weather.",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": "string", "enum": ["C", "F"]},
                "hourly": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        }
    ),
)
TIME: Final = Tool("now", "Tells the time.")
TOOLS: Final = (WEATHER, TIME)
Calls = list[tuple[str, dict[str, Any]]]
PARIS: Final[tuple[str, dict[str, Any]]] = ("get_weather", {"city": "Paris"})
FULL: Final[tuple[str, dict[str, Any]]] = (
    "get_weather",
    {"city": 'São "P\\" {x}]', "days": 3, "units": "C", "hourly": True, "places": ["a, b", "c"]},
)
NOW: Final[tuple[str, dict[str, Any]]] = ("now", {})


@dataclass(frozen=True)
class Shape:
    """An answer in the format `kind`; its text before calls and behind them, and the calls."""

    kind: str
    text: str
    calls: Calls
    content: str = ""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_FULL_JSON: Final = _json(FULL[1])
_PARIS_JSON: Final = '{"city": "Paris"}'

SHAPES: Final = [
    Shape(
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {_FULL_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [FULL, NOW],
        "Let me see.",
    ),
    Shape("llama3_json", f'{{"name": "get_weather", "parameters": {_FULL_JSON}}}', [FULL]),
    Shape(
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {_PARIS_JSON}}}; '
        '{"name": "now", "parameters": {}}',
        [PARIS, NOW],
    ),
    Shape(
        "llama3_json", f'<|python_start|>{{"name": "get_weather", "parameters": {_PARIS_JSON}}}<|python_end|>', [PARIS]
    ),
    Shape(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_FULL_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        [FULL, NOW],
    ),
    Shape("granite", f'<tool_call>[{{"arguments": {_PARIS_JSON}, "name": "get_weather"}}]', [PARIS]),
    Shape(
        "phi4_mini_json",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_FULL_JSON}}}]<|/tool_call|>',
        [FULL],
    ),
    Shape("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {_PARIS_JSON}}}]', [PARIS]),
    Shape(
        "command_r",
        "I will look.<|START_ACTION|>[\n    "
        f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_FULL_JSON}}},\n    '
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        [FULL, NOW],
        "I will look.",
    ),
    Shape(
        "command_r",
        'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n'
        f'        "parameters": {_PARIS_JSON}\n    }}\n]```',
        [PARIS],
    ),
    Shape(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_FULL_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        [FULL, NOW],
    ),
    Shape("mistral", f"Well.[TOOL_CALLS]get_weather[ARGS]{_FULL_JSON}[TOOL_CALLS]now[ARGS]{{}}", [FULL, NOW], "Well."),
    Shape("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{_PARIS_JSON}", [PARIS]),
    Shape("mistral_args", f"[TOOL_CALLS]get_weather{_PARIS_JSON}", [PARIS]),
    Shape(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{_FULL_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [FULL, NOW],
    ),
    Shape(
        "deepseek_v31",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{_FULL_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [FULL, NOW],
        "Sure.",
    ),
    Shape(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">São "P\\" {x}]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="units" string="true">C</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="hourly" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="places" string="false">["a, b", "c"]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [FULL, NOW],
    ),
    Shape(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_FULL_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [FULL, NOW],
    ),
    Shape(
        "openai",
        "I will look.<|channel|>commentary to=functions.get_weather<|message|>" + _FULL_JSON + "<|call|>",
        [FULL],
        "I will look.",
    ),
    Shape(
        "openai",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_PARIS_JSON}<|call|>",
        [PARIS],
    ),
    Shape(
        "glm45",
        'Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São "P\\" {x}]</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>units</arg_key>\n<arg_value>C</arg_value>\n"
        "<arg_key>hourly</arg_key>\n<arg_value>true</arg_value>\n<arg_key>places</arg_key>\n"
        '<arg_value>["a, b", "c"]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
        [FULL, NOW],
        "Let me see.",
    ),
    Shape(
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "P\\" {x}]\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n<parameter=units>\nC\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=places>\n"
        "['a, b', 'c']\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [FULL, NOW],
    ),
    Shape("qwen3_coder", "<function=get_weather><parameter=city>Paris</parameter></function>", [PARIS]),
    Shape(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        [PARIS],
    ),
    Shape(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [PARIS, NOW],
    ),
    Shape(
        "llama4_pythonic",
        '[get_weather(city="São \\"P\\\\\\" {x}]", days=3, units=\'C\', hourly=True, places=["a, b", "c"]), now()]',
        [FULL, NOW],
    ),
    Shape("llama4_pythonic", "<|python_start|>[get_weather(city='Paris')]<|python_end|>", [PARIS]),
    Shape("pythonic", '[now(), get_weather( city = "Paris" )]', [NOW, PARIS]),
    Shape(
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>São "P\\" {x}]<escape>,days:3,hourly:true,'
        "places:[<escape>a, b<escape>,<escape>c<escape>],units:<escape>C<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        [FULL, NOW],
    ),
    Shape(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        [PARIS],
    ),
]
