"""`octavo frontend` as a process: what it refuses, and how it ends."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.frontend.cli import frontend as cli
from octavo.frontend.cli.client import generate, health
from octavo.frontend.cli.frontend import frontend
from octavo.frontend.config import FrontendConfig


@dataclasses.dataclass
class Running:
    process: "subprocess.Popen[str]"
    address: str


@pytest.fixture(autouse=True)
def http_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the port that a service of this machine may have."""
    monkeypatch.setenv("OCTAVO_HTTP_LISTEN", f"unix:{tmp_path}/http.sock")


@pytest.fixture
def running(model_directory: Path, tmp_path: Path) -> Iterator[Running]:
    # Not a port: one that is free now may be taken when the process gets to it.
    address = f"unix:{tmp_path}/public.sock"
    addresses = ("--listen", address, "--health-address", f"unix:{tmp_path}/probes.sock")
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", "frontend", "--model", str(model_directory), *addresses],
        env={**os.environ, "OCTAVO_FRONTEND_ENDPOINT": f"ipc://{tmp_path}/frontends.sock"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process, address)
    finally:
        process.kill()
        process.communicate()


def wait_until_alive(running: Running) -> None:
    until = time.monotonic() + 60
    while CliRunner().invoke(health, [running.address, "--timeout", "1"]).exit_code != 0:
        assert running.process.poll() is None, running.process.communicate()[1]
        assert time.monotonic() < until


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    # In a process of its own, because the command keeps torch out of the one it runs in.
    command = [sys.executable, "-m", "octavo.cli.main", "frontend", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)


def test_it_lives_without_a_scheduler_and_without_torch_and_ends_well(running: Running) -> None:
    wait_until_alive(running)
    assert "torch" not in Path(f"/proc/{running.process.pid}/maps").read_text()
    ready = CliRunner().invoke(health, [running.address, "--service", "octavo.v1.GenerationService"])
    assert (ready.exit_code, ready.stdout) == (1, f"{running.address}: NOT_SERVING\n")
    running.process.send_signal(signal.SIGTERM)
    _, errors = running.process.communicate(timeout=60)
    assert running.process.returncode == 0, errors


def test_probes_have_an_address_of_their_own(running: Running, tmp_path: Path) -> None:
    wait_until_alive(running)
    probes = f"unix:{tmp_path}/probes.sock"
    assert CliRunner().invoke(health, [probes]).exit_code == 0
    ready = CliRunner().invoke(health, [probes, "--service", "octavo.v1.GenerationService"])
    assert ready.stdout == f"{probes}: NOT_SERVING\n"
    assert "UNIMPLEMENTED" in CliRunner().invoke(generate, ["hi", "--server", probes]).stderr


@pytest.mark.parametrize(
    ("flag", "content", "words"),
    [
        (
            "--api-keys",
            '{"tenants": {"alice": {"keys": ["sk-zebrafinch"]}}}',
            "has a key of tenant 'alice' that is too",
        ),
        ("--tls-certificate", "zebrafinch", "TLS needs a certificate and its key; give --tls-key too"),
    ],
)
def test_keys_and_certificates_that_are_none(
    model_directory: Path, tmp_path: Path, flag: str, content: str, words: str
) -> None:
    (tmp_path / "file").write_text(content)
    arguments = ["--model", str(model_directory), "--frontend-endpoint", f"ipc://{tmp_path}/x"]
    result = run(*arguments, "--listen", f"unix:{tmp_path}/public.sock", flag, f"{tmp_path}/file")
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert "zebrafinch" not in result.stderr


@pytest.mark.parametrize(("said", "listen"), [("off", ""), ("", "127.0.0.1:8000"), ("127.0.0.1:6", "127.0.0.1:6")])
def test_a_variable_switches_http_off(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, said: str, listen: str
) -> None:
    asked: list[FrontendConfig] = []
    monkeypatch.setattr(cli, "_run", asked.append)
    monkeypatch.setenv("OCTAVO_HTTP_LISTEN", said)
    result = CliRunner().invoke(frontend, ["--model", str(model_directory), "--frontend-endpoint", "ipc:///tmp/x"])
    assert result.exit_code == 0, result.output
    assert [config.http_listen for config in asked] == [listen]


@pytest.mark.parametrize(
    "said", ["ipc:///tmp/x ipc:///tmp/y", "ipc:///tmp/x,ipc:///tmp/y", "ipc:///tmp/x, ipc:///tmp/y"]
)
def test_several_schedulers_in_a_variable(model_directory: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    asked: list[FrontendConfig] = []
    monkeypatch.setattr(cli, "_run", asked.append)
    monkeypatch.setenv("OCTAVO_FRONTEND_ENDPOINT", said)
    result = CliRunner().invoke(frontend, ["--model", str(model_directory)])
    assert result.exit_code == 0, result.output
    assert [config.scheduler_endpoints for config in asked] == [("ipc:///tmp/x", "ipc:///tmp/y")]


def test_a_scheduler_named_twice(model_directory: Path) -> None:
    endpoint = ["--frontend-endpoint", "ipc:///tmp/x"]
    result = CliRunner().invoke(frontend, ["--model", str(model_directory), *endpoint, *endpoint])
    assert result.exit_code == 2
    assert "the scheduler at ipc:///tmp/x is named twice; name each once" in result.stderr


def test_no_model_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(frontend, ["--model", str(tmp_path), "--frontend-endpoint", "ipc:///tmp/x"])
    assert result.exit_code == 2
    assert "name a directory that holds config.json" in result.stderr


def test_a_tokenizer_of_another_model(model_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(model_directory, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 200, "eos_token_id": 2}))
    (tmp_path / "model" / "generation_config.json").unlink()
    arguments = ["--model", str(tmp_path / "model"), "--frontend-endpoint", f"ipc://{tmp_path}/x"]
    result = run(*arguments, "--listen", f"unix:{tmp_path}/public.sock")
    assert result.returncode == 2
    assert "has token ids up to 255 and the model's vocab_size is 200" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_endpoint_in_the_clear(model_directory: Path) -> None:
    arguments = ["--model", str(model_directory), "--frontend-endpoint", "tcp://scheduler:5555"]
    result = CliRunner().invoke(frontend, arguments)
    assert result.exit_code == 2
    assert "leaves this machine in the clear" in result.stderr


def test_pinned_prefixes_that_are_none(model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "prefixes.json").write_text('{"story": 5}')
    arguments = ["--model", str(model_directory), "--frontend-endpoint", f"ipc://{tmp_path}/x"]
    result = run(
        *arguments, "--listen", f"unix:{tmp_path}/public.sock", "--pinned-prefixes", f"{tmp_path}/prefixes.json"
    )
    assert result.returncode == 2
    assert "has no text for the prefix 'story'; write some in quotes" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken(model_directory: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--model", str(model_directory), "--frontend-endpoint", f"ipc://{tmp_path}/x", "--listen", listen]
        result = run(*arguments)
    assert result.returncode == 1
    assert f"Error: the frontend cannot start: cannot listen on {listen}, choose another address" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_socket_that_is_taken(running: Running, model_directory: Path, tmp_path: Path) -> None:
    wait_until_alive(running)
    arguments = ["--model", str(model_directory), "--frontend-endpoint", f"ipc://{tmp_path}/x"]
    result = run(*arguments, "--listen", running.address)
    assert result.returncode == 1
    assert result.stderr == (
        "Error: the frontend cannot start: another process is bound to"
        f" {running.address}; stop it or choose another address\n"
    )
    wait_until_alive(running)


def test_a_fault_keeps_its_traceback(model_directory: Path, tmp_path: Path) -> None:
    script = """
import sys
sys.modules["torch"] = None
from octavo.frontend import cli
from octavo.frontend.cli.frontend import frontend
from octavo.frontend.server import FrontendServer

async def serve(self, stopping):
    raise RuntimeError("a fault at run time")

FrontendServer.serve = serve
frontend()
"""
    arguments = ["--model", str(model_directory), "--frontend-endpoint", f"ipc://{tmp_path}/x"]
    command = [sys.executable, "-c", script, *arguments, "--listen", f"unix:{tmp_path}/public.sock"]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("RuntimeError: a fault at run time\n")


@pytest.mark.parametrize("said", ["frontend ", "frontend api.example,*.svc"])
def test_names_are_taken_apart(said: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[FrontendConfig] = []
    monkeypatch.setattr(cli, "_run", taken.append)
    arguments = ["--model", str(model_directory), "--frontend-endpoint", "ipc:///tmp/f"]
    found = CliRunner(env={"OCTAVO_ALLOWED_HOSTS": said}).invoke(frontend, arguments)
    assert found.exit_code == 0, found.output
    assert [config.allowed_hosts for config in taken] == [tuple(said.replace(",", " ").split())]


def test_origins_are_taken_apart(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[FrontendConfig] = []
    monkeypatch.setattr(cli, "_run", taken.append)
    arguments = ["--model", str(model_directory), "--frontend-endpoint", "ipc:///tmp/f"]
    for said in ("", "https://App.example:443/ http://localhost:3000,https://app.example"):
        found = CliRunner(env={"OCTAVO_ALLOWED_ORIGINS": said}).invoke(frontend, arguments)
        assert found.exit_code == 0, found.output
    assert [config.allowed_origins for config in taken] == [(), ("http://localhost:3000", "https://app.example")]
    for said in ("*", "null", "https://*.example", "app.example", "https://app.example/path", "https://"):
        found = CliRunner().invoke(frontend, [*arguments, "--allowed-origins", said])
        assert (found.exit_code, repr(said) in found.stderr) == (2, True), found.output
