"""OpenAI's Codex: `codex exec` over Responses: text, an answer of a schema, a tool of an MCP server, a second turn.

Its own instructions do not fit the context of the bundled model, so it gets shorter ones. What it cannot say itself is
added on the way: greedy sampling, and which tool is called.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import Service, main, one_line
from .relay import Relay, relay

_QUESTION = "What is the capital of France?"
_GREEDY = {"temperature": 0}
_SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
    "required": ["capital", "large"],
    "additionalProperties": False,
}
_CONFIG = """
model = {model}
model_provider = "octavo"
model_instructions_file = {instructions}
approval_policy = "never"
sandbox_mode = "read-only"
check_for_update_on_startup = false
{more}

[analytics]
enabled = false

[model_providers.octavo]
name = "Octavo"
base_url = {url}
env_key = "OCTAVO_CLIENTS_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
{tables}
"""
# Of what a model of this size would only play with.
_FEW_TOOLS = ("shell_tool", "unified_exec", "goals", "multi_agent", "skills")
_MCP = """
[mcp_servers.station]
command = {python}
args = [{program}]
"""


@dataclass(frozen=True)
class Codex:
    """One installation with its settings. `relay` has what was said."""

    service: Service
    directory: Path
    relay: Relay

    def exec(self, *arguments: str) -> list[dict[str, Any]]:
        """The events of a run. Raises `RuntimeError` with what Codex said."""
        command = [self.service.executable("node_modules/.bin/codex"), "exec", *arguments]
        process = subprocess.run(
            [*command, "--json", "--skip-git-repo-check"],
            cwd=self.directory,
            env={**os.environ, "CODEX_HOME": str(self.directory / "home")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(one_line(f"exit status {process.returncode}: {process.stdout[-300:]}"))
        return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@contextmanager
def codex(
    service: Service, add: Mapping[str, object] = _GREEDY, *, few_tools: bool = False, more: str = "", tables: str = ""
) -> Iterator[Codex]:
    """Every first request of a turn gets the fields of `add`; those that bring a tool's result are only made greedy."""

    def fields(asked: dict[str, Any]) -> Mapping[str, object]:
        # A tool's result is the last thing said where there is one.
        is_result = asked["input"][-1].get("type") == "function_call_output"
        return _GREEDY if is_result else {**_GREEDY, **add}

    with tempfile.TemporaryDirectory() as directory, relay(service.http, fields) as between:
        place = Path(directory)
        (place / "home").mkdir()
        instructions = place / "home" / "instructions.md"
        instructions.write_text("Be brief.")
        if few_tools:
            tables += "\n[features]\n" + "\n".join(f"{feature} = false" for feature in _FEW_TOOLS) + "\n"
        config = _CONFIG.format(
            model=json.dumps(service.model),
            instructions=json.dumps(str(instructions)),
            url=json.dumps(f"http://{between.address}/v1"),
            more=more,
            tables=tables,
        )
        (place / "home" / "config.toml").write_text(config)
        yield Codex(service, place, between)


def said(events: list[dict[str, Any]]) -> str:
    """The last message of a run that has ended well."""
    assert events[-1]["type"] == "turn.completed", events[-1]
    usage = events[-1]["usage"]
    assert usage["input_tokens"] > 0 < usage["output_tokens"], usage
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    texts: list[str] = [item["text"] for item in items if item["type"] == "agent_message"]
    return texts[-1]


def text(service: Service) -> str:
    """With all the tools that it brings: functions, a namespace of them, and a search that is left out and named."""
    with codex(service) as found:
        answer = said(found.exec(_QUESTION))
        exchange = found.relay.exchanges[0]
    assert answer
    kinds = {tool["type"] for tool in exchange.asked["tools"]}
    assert kinds >= {"function", "namespace", "web_search"}, kinds
    assert "web_search" in exchange.not_honoured
    events = exchange.events()
    assert sum(event["type"] == "response.output_text.delta" for event in events) > 1
    assert events[-1]["type"] == "response.completed"
    return f"{answer[:60]!r}; named: {exchange.not_honoured}"


def output_schema(service: Service) -> str:
    with codex(service, {"tool_choice": "none"}, few_tools=True) as found:
        schema = found.directory / "schema.json"
        schema.write_text(json.dumps(_SCHEMA))
        answer = said(found.exec("--output-schema", str(schema), _QUESTION))
    assert json.loads(answer).keys() == {"capital", "large"}
    return answer


def tool_of_a_server(service: Service) -> str:
    """Tools of MCP servers come in a namespace, and so must their calls; what came of one goes back."""
    program = Path(__file__).with_name("weather_mcp.py")
    tables = _MCP.format(python=json.dumps(sys.executable), program=json.dumps(str(program)))
    forced = {"tool_choice": {"type": "function", "name": "weather"}}
    with codex(service, forced, few_tools=True, tables=tables) as found:
        events = found.exec("What is the weather in Rome?")
        exchanges = found.relay.exchanges
    [call, *_] = [e["item"] for e in events if e["type"] == "item.completed" and e["item"]["type"] == "mcp_tool_call"]
    assert (call["server"], call["tool"], call["status"]) == ("station", "weather", "completed"), call
    assert call["arguments"]["city"] in ("Paris", "Rome")
    output = exchanges[1].asked["input"][-1]
    assert f"sunny in {call['arguments']['city']}" in json.dumps(output)
    return f"{call['arguments']}, then {said(events)[:40]!r}"


def second_turn(service: Service) -> str:
    """What was said goes back as Codex keeps it."""
    with codex(service, few_tools=True) as found:
        first = said(found.exec(_QUESTION))
        second = said(found.exec("resume", "--last", "And of Italy?"))
        exchange = found.relay.exchanges[-1]
    assert first in json.dumps(exchange.asked["input"], ensure_ascii=False)
    assert second
    return f"{first[:40]!r}, then {second[:40]!r}"


if __name__ == "__main__":
    main(text, output_schema, tool_of_a_server, second_turn)
