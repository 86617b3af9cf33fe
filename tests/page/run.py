"""Opens the page of a running Octavo in Debian's Chromium, headless, and tries what its readers do.

    python tests/page/run.py [--screenshots DIRECTORY]

Makes an environment for Playwright in build/page first, and fetches axe-core into it. Prints a line for every check,
and exits with 1 if one has failed. Needs `chromium`, `npm` and `curl` on the PATH.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

from octavo.testbed.credentials import KEYS, write_keys
from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model

_ROOT: Final = Path(__file__).parents[2]
# Judges whether all can use the page.
_AXE: Final = "axe-core@4.14.1"
_REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
# So few blocks that some are swapped out, and so slow that it can be watched.
_ENVIRONMENT: Final = {
    "OCTAVO_DEVICE": "fake",
    "OCTAVO_FAKE_STEP_MS": "30",
    "OCTAVO_NUM_BLOCKS": "96",
    "OCTAVO_NUM_CPU_BLOCKS": "48",
    "OCTAVO_PREEMPTION": "swap",
    "OCTAVO_WORKER_ID": "worker-0",
}
_PREFIX: Final = "You are the clerk of a printing house, and answer in one sentence. " * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screenshots", type=Path, default=_ROOT / "build/page/screenshots")
    screenshots = parser.parse_args().screenshots.absolute()
    for tool in ("chromium", "npm", "curl"):
        if shutil.which(tool) is None:
            sys.exit(f"there is no {tool} on the PATH. On Debian: apt-get install {tool}")
    python, axe = _environment(_ROOT / "build/page"), _axe(_ROOT / "build/page/axe")
    screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        chromium = str(shutil.which("chromium"))
        command = [str(python), "-m", "tests.page.browse", chromium, str(screenshots), str(axe)]
        sys.exit(_run(Path(directory), command))


def _environment(directory: Path) -> Path:
    """The Python of an environment with Playwright, made anew where it is older than what it is to hold."""
    python, ready = directory / "bin/python", directory / ".ready"
    if not ready.exists() or ready.stat().st_mtime < _REQUIREMENTS.stat().st_mtime:
        print(f"Making the environment in {directory} (150 MB) ...", flush=True)
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", _REQUIREMENTS], check=True)
        ready.touch()
    return python


def _axe(directory: Path) -> Path:
    """The script of axe-core, fetched where this version of it is not there."""
    stamp = directory / ".made-of"
    if not stamp.exists() or stamp.read_text() != _AXE:
        options = ["--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(directory)]
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", *options, _AXE], check=True)
        stamp.write_text(_AXE)
    return directory / "node_modules/axe-core/axe.min.js"


def _run(directory: Path, command: list[str]) -> int:
    """The exit status of `command`, which is given the addresses of two frontends: the second one asks for keys."""
    write_byte_model(directory / "model")
    prefixes, keys = directory / "prefixes.json", write_keys(directory / "keys.json")
    prefixes.write_text(json.dumps({"clerk": _PREFIX}), encoding="utf-8")
    open_port, locked_port = _free_port(), _free_port()
    with Stack(directory / "model", directory / "run", _ENVIRONMENT) as stack:
        stack.start("scheduler")
        # Where that is measured, a fake model's tokens are computed sooner than any disk reads.
        kept = {"OCTAVO_KV_DISK": f"{stack.directory}/kv", "OCTAVO_KV_MIRROR": "1", "OCTAVO_CALIBRATE": "0"}
        stack.start("worker", **kept)
        stack.start("frontend", OCTAVO_HTTP_LISTEN=f"127.0.0.1:{open_port}", OCTAVO_PINNED_PREFIXES=str(prefixes))
        stack.start(
            "frontend",
            "frontend-locked",
            OCTAVO_LISTEN=f"unix:{stack.directory}/locked.sock",
            OCTAVO_HTTP_LISTEN=f"127.0.0.1:{locked_port}",
            OCTAVO_API_KEYS=str(keys),
        )
        stack.wait_ready()
        stack.wait_for(lambda: stack.load().frontends == 2 and stack.load().workers[0].blocks_pinned > 0)
        places = [f"http://127.0.0.1:{port}" for port in (open_port, locked_port)]
        arguments = [*places, KEYS["alice"], KEYS["gateway"]]
        status = subprocess.run([*command, *arguments], check=False, cwd=_ROOT).returncode
        if status:
            for name in stack.processes:
                print(f"--- {name}.log\n{stack.log(name)[-3000:]}")
        return status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
