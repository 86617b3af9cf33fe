"""OpenAI's Codex: `codex exec` over Responses: text, an answer of a schema, a tool of an MCP server, a second turn.

Its own instructions do not fit the context of the bundled model, so it gets shorter ones. What it cannot say itself is
added on the way: greedy sampling, and which tool is called. With its own instructions and tools it writes a file for a
model that follows a script.
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

from ..checks import Service, main, one_line
from .relay import Relay, relay
from .scripted import RESULT, call, rule, scripted_service

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
approval_policy = "never"
sandbox_mode = {sandbox}
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
    service: Service,
    add: Mapping[str, object] = _GREEDY,
    *,
    few_tools: bool = False,
    tables: str = "",
    instructions: str = "Be brief.",
    sandbox: str = "read-only",
) -> Iterator[Codex]:
    """Every first request of a turn gets the fields of `add`; those that bring a tool's result are only made greedy.

    Without `instructions` it has its own.
    """

    def fields(asked: dict[str, Any]) -> Mapping[str, object]:
        # A tool's result is the last thing said where there is one.
        is_result = asked["input"][-1].get("type") == "function_call_output"
        return _GREEDY if is_result else {**_GREEDY, **add}

    with tempfile.TemporaryDirectory() as directory, relay(service.http, fields) as between:
        place = Path(directory)
        (place / "home").mkdir()
        file, more = place / "home" / "instructions.md", ""
        if instructions:
            file.write_text(instructions)
            more = f"model_instructions_file = {json.dumps(str(file))}"
        if few_tools:
            tables += "\n[features]\n" + "\n".join(f"{feature} = false" for feature in _FEW_TOOLS) + "\n"
        config = _CONFIG.format(
            model=json.dumps(service.model),
            sandbox=json.dumps(sandbox),
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


def writes_a_file(service: Service) -> str:
    """One small task, to its end: the command is called, runs, and what it says comes back."""
    command = "echo Octavo was here > greeting.txt && wc -c greeting.txt"
    rules = [
        rule("The file is there.", "Write the greeting", RESULT, "16 greeting.txt"),
        rule(call("exec_command", cmd=command), "Write the greeting"),
        rule("Done."),
    ]
    # Within a sandbox of its own it could not write here.
    whole: Any = {"instructions": "", "sandbox": "danger-full-access"}
    with scripted_service(service, rules) as (scripted, _), codex(scripted, {}, **whole) as found:
        events = found.exec("Write the greeting into a file.")
        answer = said(events)
        assert (found.directory / "greeting.txt").read_text() == "Octavo was here\n"
        first, second = found.relay.exchanges
    assert answer == "The file is there."
    assert {"exec_command", "write_stdin"} <= {tool.get("name") for tool in first.asked["tools"]}
    assert second.asked["input"][-1]["type"] == "function_call_output"
    usage = events[-1]["usage"]
    assert usage["cached_input_tokens"] > 1000
    return f"{answer!r} after {usage['input_tokens']} tokens, {usage['cached_input_tokens']} of them cached"


if __name__ == "__main__":
    main(text, output_schema, tool_of_a_server, second_turn, writes_a_file)
