"""Claude Code: `claude -p` over Messages: text, a file that it writes, a command, a tool that fails, a second turn.

Its instructions and tools do not fit the context of the bundled model, so another takes its place, which follows a
script: what is tried is the protocol. It asks nobody but the service for anything.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import Service, main, one_line
from .relay import Relay, relay
from .scripted import RESULT, call, rule, scripted_service

_CONTENT = 'Octavo says: two lines,\nand "quotes" too.\n'
_SETTINGS = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    # Else it skips no permissions as root.
    "IS_SANDBOX": "1",
    "no_proxy": "127.0.0.1",
}


@dataclass(frozen=True)
class ClaudeCode:
    """One installation with its settings. `relay` has what was said."""

    service: Service
    directory: Path
    relay: Relay

    def run(self, prompt: str, *arguments: str) -> dict[str, Any]:
        """What it tells of a run that has ended well. Raises `RuntimeError` with what it said."""
        command = [self.service.executable("node_modules/.bin/claude"), "-p", prompt, *arguments]
        process = subprocess.run(
            [*command, "--output-format", "json", "--dangerously-skip-permissions"],
            cwd=self.directory / "work",
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.directory / "home"),
                "ANTHROPIC_BASE_URL": f"http://{self.relay.address}",
                "ANTHROPIC_API_KEY": self.service.key,
                "ANTHROPIC_MODEL": self.service.model,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": self.service.model,
                **_SETTINGS,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(one_line(f"exit status {process.returncode}: {process.stdout[-300:]} {process.stderr}"))
        found: dict[str, Any] = json.loads(process.stdout)
        assert (found["type"], found["subtype"], found["is_error"]) == ("result", "success", False), found
        return found


@contextmanager
def claude_code(service: Service, *rules: dict[str, Any]) -> Iterator[ClaudeCode]:
    """Claude Code before a model that follows these rules, and says "Done." where none holds."""
    with (
        tempfile.TemporaryDirectory() as name,
        scripted_service(service, [*rules, rule("Done.")]) as (scripted, _),
        relay(scripted.http, lambda asked: {}) as between,
    ):
        directory = Path(name)
        for place in ("home", "work"):
            (directory / place).mkdir()
        yield ClaudeCode(scripted, directory, between)


def _asked(found: ClaudeCode) -> list[dict[str, Any]]:
    assert {exchange.status for exchange in found.relay.exchanges} == {200}, found.relay.exchanges[-1].answer[:400]
    return [exchange.asked for exchange in found.relay.exchanges if "tools" in exchange.asked]


def text(service: Service) -> str:
    with claude_code(service, rule("It is Paris.", "capital of France")) as found:
        told = found.run("What is the capital of France?")
        [exchange] = [each for each in found.relay.exchanges if "tools" in each.asked]
    assert told["result"] == "It is Paris."
    assert told["usage"]["input_tokens"] > 1000 < told["usage"]["output_tokens"] * 1000
    assert exchange.asked["stream"]
    kinds = [event["type"] for event in exchange.events()]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    return f"{told['usage']['input_tokens']} tokens asked; named: {exchange.not_honoured}"


def writes_a_file(service: Service) -> str:
    """One small task, to its end: the tool is called, runs, and its result comes back."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "greeting.txt"
        rules = [
            rule("The file is there.", "Write the greeting", RESULT),
            rule(call("Write", file_path=str(path), content=_CONTENT), "Write the greeting"),
        ]
        with claude_code(service, *rules) as found:
            told = found.run("Write the greeting into a file.")
            bodies = _asked(found)
        assert path.read_text() == _CONTENT
    assert (told["result"], told["num_turns"]) == ("The file is there.", 2)
    use, result = [body["content"][-1] for body in bodies[1]["messages"] if body["role"] != "system"][-2:]
    assert (use["type"], use["input"]["content"]) == ("tool_use", _CONTENT)
    assert (result["type"], result["tool_use_id"]) == ("tool_result", use["id"])
    # The second call begins as the first, and was computed already.
    cached = told["usage"]["cache_read_input_tokens"]
    assert cached > 1000
    return f"{path.name} written in {told['num_turns']} turns, {cached} tokens from the cache"


def runs_a_command(service: Service) -> str:
    command = "echo 6 times 7 is $((6 * 7))"
    rules = [
        rule("It is 42.", "6 times 7 is 42"),
        rule(call("Bash", command=command, description="Multiplies"), "Multiply for me"),
    ]
    with claude_code(service, *rules) as found:
        told = found.run("Multiply for me.")
    assert told["result"] == "It is 42."
    return f"{command!r}: {told['result']}"


def a_tool_that_fails(service: Service) -> str:
    rules = [
        rule("There is no such file.", "Read it", f"{RESULT}Error: "),
        rule(call("Read", file_path="/no/such/file"), "Read it"),
    ]
    with claude_code(service, *rules) as found:
        told = found.run("Read it.")
        result = _asked(found)[1]["messages"]
    assert any(block.get("is_error") for message in result for block in message["content"] if isinstance(block, dict))
    assert told["result"] == "There is no such file."
    return repr(told["result"])


def second_turn(service: Service) -> str:
    rules = [rule("Rome.", "Paris.", "And of Italy"), rule("Paris.", "capital of France")]
    with claude_code(service, *rules) as found:
        first = found.run("What is the capital of France?")
        second = found.run("And of Italy?", "--continue")
    assert (first["result"], second["result"]) == ("Paris.", "Rome.")
    return f"{first['result']} then {second['result']}"


if __name__ == "__main__":
    main(text, writes_a_file, runs_a_command, a_tool_that_fails, second_turn)
