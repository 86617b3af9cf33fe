"""opencode: `opencode run` over chats: text, a tool of an MCP server, a second turn.

What it cannot say itself is added on the way: greedy sampling, and which tool is called.
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

_QUESTION = "What is the capital of France?"
_GREEDY = {"temperature": 0}
# It asks nobody else for anything, and writes to no other place.
_ALONE = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}
_HOMES = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
_TOOL = "station_weather"


@dataclass(frozen=True)
class OpenCode:
    """One installation with its settings. `relay` has what was said."""

    service: Service
    directory: Path
    relay: Relay

    def run(self, *arguments: str) -> list[dict[str, Any]]:
        """The events of a run. Raises `RuntimeError` with what opencode said."""
        command = [self.service.executable("node_modules/.bin/opencode"), "run", "--format", "json"]
        command += ["--model", f"octavo/{self.service.model}", *arguments]
        homes = {name: str(self.directory / "homes" / name) for name in _HOMES}
        process = subprocess.run(
            command,
            cwd=self.directory,
            # It goes by this name of where it is.
            env={**os.environ, **_ALONE, **homes, "PWD": str(self.directory)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        events = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
        errors = [event for event in events if event["type"] == "error"]
        if process.returncode or errors:
            raise RuntimeError(one_line(f"exit status {process.returncode}: {errors} {process.stderr[-300:]}"))
        return events

    def answered(self) -> list[dict[str, Any]]:
        """What was asked but for titles of talks, which it asks for on its own."""
        bodies = [exchange.asked for exchange in self.relay.exchanges]
        return [body for body in bodies if "title generator" not in json.dumps(body["messages"][0])]


@contextmanager
def opencode(service: Service, add: Mapping[str, object] = _GREEDY, **settings: Any) -> Iterator[OpenCode]:
    """Every first request of a turn with tools gets the fields of `add`; all are made greedy."""

    def fields(asked: dict[str, Any]) -> Mapping[str, object]:
        is_first = asked["messages"][-1]["role"] == "user" and "tools" in asked
        return {**_GREEDY, **add} if is_first else _GREEDY

    with tempfile.TemporaryDirectory() as directory, relay(service.http, fields) as between:
        place = Path(directory)
        for name in _HOMES:
            (place / "homes" / name).mkdir(parents=True)
        (place / "opencode.json").write_text(json.dumps({**_config(service, between.address), **settings}))
        yield OpenCode(service, place, between)


def _config(service: Service, address: str) -> dict[str, Any]:
    model = f"octavo/{service.model}"
    options = {"baseURL": f"http://{address}/v1", "apiKey": service.key}
    known = {"name": "SmolLM2", "limit": {"context": 8192, "output": 64}, "tool_call": True}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Octavo", "options": options}
    return {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["octavo"],
        "snapshot": False,
        "model": model,
        "small_model": model,
        "provider": {"octavo": {**provider, "models": {service.model: known}}},
        # Its own instructions and tools are for larger models than one of this size.
        "agent": {"build": {"prompt": "Be brief.", "tools": {"*": False, _TOOL: True}}},
    }


def said(events: list[dict[str, Any]]) -> str:
    """The text of a run that has ended well."""
    ends = [event["part"] for event in events if event["type"] == "step_finish"]
    assert ends[-1]["reason"] in ("stop", "length"), ends
    assert all(end["tokens"]["input"] > 0 < end["tokens"]["output"] for end in ends), ends
    return "".join(event["part"]["text"] for event in events if event["type"] == "text")


def text(service: Service) -> str:
    with opencode(service) as found:
        answer = said(found.run(_QUESTION))
        [exchange] = [e for e in found.relay.exchanges if "title generator" not in json.dumps(e.asked["messages"][0])]
    deltas = [choice["delta"].get("content") for event in exchange.events() for choice in event["choices"]]
    assert sum(map(bool, deltas)) > 1
    assert "".join(delta or "" for delta in deltas).strip() == answer.strip()
    return repr(answer[:60])


def tool_of_a_server(service: Service) -> str:
    program = str(Path(__file__).with_name("weather_mcp.py"))
    server = {"type": "local", "command": [sys.executable, program], "enabled": True}
    forced = {"tool_choice": {"type": "function", "function": {"name": _TOOL}}}
    with opencode(service, forced, mcp={"station": server}) as found:
        events = found.run("What is the weather in Rome?")
        asked = found.answered()
    [call, *_] = [event["part"] for event in events if event["type"] == "tool_use"]
    city = call["state"]["input"]["city"]
    assert (call["tool"], call["state"]["status"]) == (_TOOL, "completed"), call
    assert city in ("Paris", "Rome")
    assert f"sunny in {city}" in json.dumps(asked[1]["messages"][-1])
    return f"{call['state']['input']}, then {said(events)[:40]!r}"


def second_turn(service: Service) -> str:
    with opencode(service) as found:
        first = said(found.run(_QUESTION))
        second = said(found.run("--continue", "And of Italy?"))
        asked = found.answered()
    assert [message["role"] for message in asked[-1]["messages"]] == ["system", "user", "assistant", "user"]
    assert second
    return f"{first[:40]!r}, then {second[:40]!r}"


if __name__ == "__main__":
    main(text, tool_of_a_server, second_turn)
