"""Installs the wheel of dist/ in an empty environment of each supported Python, and serves with it: `make dist-test`.

Nothing of the source tree is on the path, no compiler is to be found, and the bundled model is fetched as for anybody.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from octavo.testbed.stack import free_address
from octavo.testing.pythons import ROOT, Verdict, interpreter, status, supported, table

_PATIENCE_S: Final = 600.0
_KERNELS: Final = "from octavo.kernels.native.library import load; print(load().variant)"
_QUESTION: Final = {"model": "smollm2-135m-instruct", "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}


class TrialError(Exception):
    """Says what did not work, with what the program said last."""


def wheel_for_this_machine(folder: Path) -> Path:
    """Returns the one wheel of `folder` that pip may install on this machine. Raises `TrialError`."""
    machine = os.uname().machine
    found = sorted(folder.glob(f"octavo-*-py3-none-manylinux*_{machine}.whl"))
    if len(found) != 1:
        raise TrialError(f"expected one manylinux wheel for {machine} in {folder}, found {len(found)}; run `make dist`")
    return found[0]


def run(command: Sequence[str | Path], **settings: Any) -> str:
    """Returns what a command printed. Raises `TrialError` with its last words if it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=False, **settings
    )
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
        raise TrialError(f"{Path(command[0]).name} {command[1]} ...: status {done.returncode}: {told[-1]}")
    return done.stdout.strip()


def environment(bin_directory: Path, home: Path) -> dict[str, str]:
    """Returns the variables of a machine that has nothing but the environment: no source tree and no compiler."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "http", "HTTP"))}
    path = f"{bin_directory}{os.pathsep}/usr/bin{os.pathsep}/bin"
    return {
        **kept,
        "HOME": str(home),
        "PATH": path,
        "CXX": "no-compiler-is-needed",
        "OCTAVO_CACHE": str(home / "cache"),
        "OCTAVO_RUNTIME_DIR": str(home / "sockets"),
    }


@contextmanager
def serving(octavo: Path, variables: dict[str, str], home: Path) -> Iterator[str]:
    """Runs `octavo serve` until it is ready, and gives the address of its HTTP interface; ends it with SIGTERM.

    Raises `TrialError` if it ends by itself, is not ready in time, or does not end well.
    """
    http = free_address()
    variables = {**variables, "OCTAVO_LISTEN": free_address(), "OCTAVO_HTTP_LISTEN": http}
    with (home / "serve.txt").open("w+") as log:
        process = subprocess.Popen([octavo, "serve"], cwd=home, env=variables, stdout=log, stderr=log)

        def complain(what: str) -> TrialError:
            log.seek(0)
            return TrialError(f"octavo serve {what}: {(log.read().splitlines() or ['it said nothing'])[-1]}")

        try:
            limit = time.monotonic() + _PATIENCE_S
            while not is_ready(f"http://{http}"):
                if process.poll() is not None:
                    raise complain(f"ended with status {process.returncode}")
                if time.monotonic() > limit:
                    raise complain(f"was not ready within {_PATIENCE_S:.0f} s")
                time.sleep(0.2)
            yield f"http://{http}"
            process.send_signal(signal.SIGTERM)
            if process.wait(_PATIENCE_S):
                raise complain(f"ended with status {process.returncode} when it was asked to end")
        finally:
            process.kill()
            process.wait()


def is_ready(address: str) -> bool:
    """Returns whether the server answers that it serves."""
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(address: str) -> str:
    """Returns what the model says to a question. Raises `TrialError` if it says nothing."""
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(_QUESTION).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
    except OSError as error:
        raise TrialError(f"no answer to a question: {error}") from error
    if not text.strip():
        raise TrialError("the answer to a question is empty")
    return text


def try_wheel(wheel: Path, base: Path, home: Path) -> str:
    """Installs the wheel in an empty environment below `home`, serves with it, and returns a line of what was seen.

    Raises `TrialError`.
    """
    bin_directory = home / "environment" / "bin"
    run([base, "-m", "venv", bin_directory.parent])
    variables = environment(bin_directory, home)
    pip: list[str | Path] = [bin_directory / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[all]"], env=variables, cwd=home)
    variant = run([bin_directory / "python", "-c", _KERNELS], env=variables, cwd=home)
    began = time.monotonic()
    with serving(bin_directory / "octavo", variables, home) as address:
        ready_s = time.monotonic() - began
        text = complete(address)
    return f"kernels {variant}; octavo serve was ready after {ready_s:.0f} s and said {text!r}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=int, action="append", help="Only Python 3.N; may be given again.")
    wanted = parser.parse_args(arguments).python
    wheel = wheel_for_this_machine(ROOT / "dist")
    verdicts = []
    for minor in wanted or supported((ROOT / "pyproject.toml").read_text(encoding="utf-8")):
        base = interpreter(minor, os.environ.get("PATH", ""), Path.home())
        if base is None:
            verdicts.append(Verdict(minor, None, "no such interpreter on this machine"))
            continue
        print(f"Python 3.{minor} ({base}): installing {wheel.name} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="octavo-wheel-") as home:
            try:
                verdicts.append(Verdict(minor, True, try_wheel(wheel, base, Path(home))))
            except TrialError as error:
                verdicts.append(Verdict(minor, False, str(error)))
    print(f"\n{table(verdicts)}")
    return status(verdicts)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TrialError as error:
        sys.exit(str(error))
