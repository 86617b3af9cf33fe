"""The program llm: a prompt, a stream, a chat, and a schema, against a model of extra-openai-models.yaml."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from .checks import Service, main

_MODELS = """\
- model_id: octavo
  model_name: {model}
  api_base: {base_url}
  api_key_name: octavo
  supports_schema: true
- model_id: octavo-completions
  model_name: {model}
  api_base: {base_url}
  api_key_name: octavo
  completion: true
"""
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"animal": {"type": "boolean"}},
        "required": ["animal"],
        "additionalProperties": False,
    }
)


def run(service: Service, *arguments: str, says: str | None = None) -> str:
    """What llm prints, in a home of its own. Raises `RuntimeError` with its complaint."""
    with tempfile.TemporaryDirectory() as home:
        models = _MODELS.format(model=service.model, base_url=service.base_url)
        (Path(home) / "extra-openai-models.yaml").write_text(models)
        (Path(home) / "keys.json").write_text(json.dumps({"octavo": service.key}))
        process = subprocess.run(
            [service.executable("llm"), *arguments],
            env={**os.environ, "LLM_USER_PATH": home},
            input=says,
            stdin=None if says is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(process.stderr[-400:])
    return process.stdout.strip()


def prompt_and_stream(service: Service) -> str:
    question = ("prompt", "-m", "octavo", "-o", "temperature", "0", "-o", "max_tokens", "16", "What is 2 + 2?")
    streamed, whole = run(service, *question), run(service, *question, "--no-stream")
    assert streamed == whole
    assert whole
    return repr(whole)


def chat(service: Service) -> str:
    spoken = run(service, "chat", "-m", "octavo", "-o", "max_tokens", "12", says="Hello!\nAnd now?\nquit\n")
    answers = [line for line in spoken.splitlines() if line.startswith("> ") and line[2:].strip()]
    assert len(answers) >= 2, spoken
    return f"{len(answers)} turns"


def completion(service: Service) -> str:
    text = run(service, "prompt", "-m", "octavo-completions", "-o", "max_tokens", "8", "The capital of France is")
    assert text
    return repr(text)


def schema(service: Service) -> str:
    found = run(service, "prompt", "-m", "octavo", "--schema", _SCHEMA, "-o", "max_tokens", "60", "Is a dog an animal?")
    assert isinstance(json.loads(found)["animal"], bool)
    return found


def refusal(service: Service) -> str:
    with pytest.raises(RuntimeError, match="max_tokens is 10000000") as caught:
        run(service, "prompt", "-m", "octavo", "-o", "max_tokens", "10000000", "Hello")
    return str(caught.value)


if __name__ == "__main__":
    main(prompt_and_stream, chat, completion, schema, refusal)
