"""A service of real processes whose model follows a script, for clients that ask for more than the bundled model can.

What is tried is what is said between a client and the service, not how clever the model is.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model

from ..checks import Service
from ..service import TcpStack
from .scripted_worker import SCRIPT

NAME = "scripted"
_CONTEXT = 131_072
_TESTS = Path(__file__).parents[2]


@dataclass
class ScriptedStack(TcpStack):
    """Its workers follow the script."""

    def launch(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> Any:
        if not name.startswith("worker"):
            return super().launch(name, arguments, environment, log)
        # The program brings the command along.
        command = [sys.executable, "-m", "clients.agents.scripted_worker", *arguments[1:]]
        paths = os.pathsep.join([str(_TESTS), *filter(None, sys.path)])
        return subprocess.Popen(command, env={**environment, "PYTHONPATH": paths}, stdout=log, stderr=log)


def rule(answer: str, *contains: str) -> dict[str, Any]:
    """What the model answers to prompts that have all these texts."""
    return {"contains": contains, "answer": answer}


def call(name: str, **arguments: object) -> str:
    """A call of a function, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# What the prompt has once there is a result of a call.
RESULT = "<tool_response>\n"


@contextmanager
def scripted_service(service: Service, rules: Sequence[dict[str, Any]]) -> Iterator[tuple[Service, ScriptedStack]]:
    """A service like `service` with another model: the tokenizer of the bundled one, and a context of its own size."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        place = Path(name)
        model = _model(place / NAME)
        (place / "script.json").write_text(json.dumps(rules))
        environment = {
            "OCTAVO_DEVICE": "fake",
            "OCTAVO_NUM_BLOCKS": str(2 * _CONTEXT // 16),
            "OCTAVO_TOOL_PARSER": "hermes",
            SCRIPT: str(place / "script.json"),
        }
        with ScriptedStack(model, place, environment) as stack:
            stack.start_all()
            http = f"127.0.0.1:{stack.http_port}"
            yield (
                replace(service, http=http, grpc=stack.address, model=NAME, key="none", model_directory=str(model)),
                stack,
            )
            stack.assert_alive()
            stack.wait_idle()


def _model(directory: Path) -> Path:
    bundled = resolve_model(BUNDLED_MODEL)
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_bytes((bundled / name).read_bytes())
    config = json.loads((bundled / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": _CONTEXT}))
    return directory
