"""What the programs here have in common: where the service is, and a line for every check.

Needs only the standard library, for it runs in each client's own environment too.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn, Self, TypeVar

T = TypeVar("T")
_PREFIX = "OCTAVO_CLIENTS_"
_SHOWN = 400
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Service:
    """The running service, and the client that is to be tried. `http` and `grpc` are host:port, `bin` the directory
    of the client's executables, `model_directory` where the served model lies."""

    http: str
    grpc: str
    model: str
    key: str
    model_directory: str
    bin: str = ""

    @classmethod
    def of_environment(cls) -> Self:
        return cls(*(os.environ[_PREFIX + field.name.upper()] for field in fields(cls)))

    def environment(self) -> Mapping[str, str]:
        """How a program is told of it."""
        return {_PREFIX + field.name.upper(): getattr(self, field.name) for field in fields(self)}

    @property
    def base_url(self) -> str:
        return f"http://{self.http}/v1"

    def executable(self, name: str) -> str:
        return str(Path(self.bin) / name)


def run_checks(checks: Sequence[Callable[[T], object]], subject: T) -> int:
    """Prints PASS or FAIL, the check's name and what it has to say; returns how many have failed."""
    failures = 0
    for check in checks:
        try:
            print(f"PASS {check.__name__}: {one_line(str(check(subject)))}", flush=True)
        except Exception as error:
            failures += 1
            said = f"{type(error).__name__}: {error}"
            print(f"FAIL {check.__name__}: {one_line(said)}, at {_place(error)}", flush=True)
    return failures


def one_line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.line for frame in reversed(frames) if frame.filename.startswith(_HERE)), None) or "?"


def main(*checks: Callable[[Service], object]) -> NoReturn:
    """Runs a program's checks; exits with 1 if one has failed."""
    sys.exit(1 if run_checks(checks, Service.of_environment()) else 0)
