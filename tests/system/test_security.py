"""`octavo serve` with keys and certificates: ready by itself, and open to those who have both."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.testbed.credentials import KEYS, Pair, make_certificate, write_keys
from octavo.testbed.stack import Stack

pytestmark = pytest.mark.system


@dataclass
class Guarded:
    """A service that asks for keys and certificates, and a client's certificate."""

    stack: Stack
    authority: Pair
    client: Pair

    def run(self, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """One of our own commands as a client."""
        line = [sys.executable, "-m", "octavo.cli.main", command, *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=60)

    @property
    def encrypted(self) -> list[str]:
        flags = {
            "--ca-certificate": self.authority.certificate,
            "--client-certificate": self.client.certificate,
            "--client-key": self.client.key,
            # What a unix socket has no name for.
            "--server-name": "server",
        }
        return [str(argument) for flag in flags.items() for argument in flag]


@pytest.fixture(scope="module")
def guarded(byte_model: Path, authority: Pair) -> Iterator[Guarded]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        server, client = make_certificate(authority, "server"), make_certificate(authority, "client")
        files = {
            "--tls-certificate": server.certificate,
            "--tls-key": server.key,
            "--tls-client-ca": authority.certificate,
            "--api-keys": write_keys(Path(name) / "keys.json"),
        }
        with Stack(byte_model, Path(name), {"OCTAVO_DEVICE": "fake"}) as stack:
            supervisor = stack.start("serve", arguments=[str(word) for flag in files.items() for word in flag])
            try:
                stack.wait_for(lambda: "Octavo is ready after" in stack.log("serve"), 120)
                yield Guarded(stack, authority, client)
            finally:
                supervisor.terminate()
                supervisor.wait(60)


def test_it_says_what_callers_need(guarded: Guarded) -> None:
    log = guarded.stack.log("serve")
    assert "Each with --ca-certificate CA --client-certificate CERTIFICATE --client-key KEY --api-key KEY." in log
    assert not [key for key in KEYS.values() if key in log]


def test_those_with_a_key_and_a_certificate_are_served(guarded: Guarded) -> None:
    call = ("hi", "--max-new-tokens", "3", "--ids", "--server", guarded.stack.address, *guarded.encrypted)
    answered = guarded.run("generate", *call, "--api-key", KEYS["alice"])
    assert (answered.returncode, len(answered.stdout.split())) == (0, 3), answered.stderr
    refused = guarded.run("generate", *call)
    assert refused.returncode == 1
    assert "this server asks for an API key" in refused.stderr


def test_probes_need_no_key(guarded: Guarded) -> None:
    service = ("--service", "octavo.v1.GenerationService")
    assert guarded.run("health", guarded.stack.address, *service, *guarded.encrypted).returncode == 0
    # The supervisor's own way.
    assert guarded.run("health", f"unix:{guarded.stack.directory}/frontend-health.sock", *service).returncode == 0


def test_nobody_is_served_in_the_clear(guarded: Guarded) -> None:
    assert guarded.run("health", guarded.stack.address, "--timeout", "1").returncode == 1
