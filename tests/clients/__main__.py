"""Tries clients that others have made, unmodified, against a service of real processes with the bundled model.

    PYTHONPATH=tests/support python -m tests.clients [NAME ...]

Each is installed into an environment of its own first. Prints a line for every check; exits with 1 if one has failed.
"""

import argparse
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.runtime.models.directory import BUNDLED_MODEL, ModelDirectoryError, resolve_model

from .checks import Service, run_checks
from .service import TcpStack, running_service
from .tools import CLIENTS, Client, InstallError

_TESTS = Path(__file__).parents[1]
_LIMIT_S = 1800


@dataclass(frozen=True)
class Outcome:
    """How many of a client's checks have passed and failed; what kept the client from being tried is a failure."""

    client: Client
    passed: int
    failed: int


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        "make test-clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument("--root", type=Path, default=_TESTS.parent / "build" / "clients", help="of the environments")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no client is called {', '.join(sorted(unknown))}")
    try:
        model = resolve_model(BUNDLED_MODEL)
    except ModelDirectoryError as error:
        sys.exit(f"the bundled model is not prepared: {error}")
    chosen = [client for client in CLIENTS if not options.names or client.name in options.names]
    places = {client.name: _place(client, options.root.absolute()) for client in chosen}
    outcomes = []
    for embeds in sorted({client.embeds for client in chosen}):
        with running_service(model, embeds=embeds) as (service, stack):
            asked = [client for client in chosen if client.embeds is embeds]
            outcomes += [_try(client, service, stack, places[client.name]) for client in asked]
    _print_table(outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _place(client: Client, root: Path) -> Path | None:
    try:
        return client.environment.made(root / client.name)
    except InstallError as error:
        print(error, flush=True)
        return None


def _try(client: Client, service: Service, stack: TcpStack, directory: Path | None) -> Outcome:
    print(f"\n-- {client.name} {client.version}", flush=True)
    if directory is None:
        print("FAIL installation", flush=True)
        return Outcome(client, 0, 1)
    outcome = _run(client, replace(service, bin=str(directory)), directory)
    left_behind = run_checks([nothing_is_left], stack)
    return Outcome(client, outcome.passed + 1 - left_behind, outcome.failed + left_behind)


def nothing_is_left(stack: TcpStack) -> str:
    """No client brings a process down, or has it hold on to a request or a block."""
    stack.assert_alive()
    stack.wait_idle()
    return f"{len(stack.processes)} processes live and idle"


def _run(client: Client, service: Service, directory: Path) -> Outcome:
    # The proxies of the machine are not for addresses of its own.
    settings = {"PYTHONPATH": "support", "no_proxy": "127.0.0.1", **client.settings, **service.environment()}
    process = subprocess.Popen(
        client.command(directory), cwd=_TESTS, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    limit = threading.Timer(_LIMIT_S, process.kill)
    limit.start()
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    limit.cancel()
    passed, failed = (sum(line.startswith(f"{word} ") for line in lines) for word in ("PASS", "FAIL"))
    broken = process.wait() != 0 or not passed
    return Outcome(client, passed, max(failed, int(broken)))


def _print_table(outcomes: list[Outcome]) -> None:
    print(f"\n{'client':20} {'version':10} {'passed':>6} {'failed':>6}")
    for outcome in outcomes:
        print(f"{outcome.client.name:20} {outcome.client.version:10} {outcome.passed:6} {outcome.failed:6}")


if __name__ == "__main__":
    sys.exit(main())
