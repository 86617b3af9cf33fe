"""What `octavo serve` tells the processes it starts."""

import socket
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from octavo.cli import serve as module
from octavo.cli.supervision import SupervisionError
from octavo.frontend.cli.frontend import frontend
from octavo.runtime.transport.endpoints import claimed, runtime_directory
from octavo.scheduler.cli.serve import scheduler
from octavo.worker.cli.worker import worker


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that the processes would have got, filled by each `serve`."""
    told: dict[str, str] = {}

    async def take(*arguments: Any) -> None:
        told.clear()
        told.update(arguments[-1])

    monkeypatch.setattr(module, "_serve", take)
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("OCTAVO_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    return told


def serve(*arguments: str) -> None:
    result = CliRunner().invoke(module.serve, arguments)
    assert result.exit_code == 0, result.output


def test_the_processes_find_the_pinned_prefixes_from_anywhere(tmp_path: Path, told: dict[str, str]) -> None:
    Path("prefixes.json").write_text("{}")
    serve("--pinned-prefixes", "prefixes.json")
    assert told["OCTAVO_PINNED_PREFIXES"] == str(tmp_path / "prefixes.json")
    serve()
    assert "OCTAVO_PINNED_PREFIXES" not in told


def test_the_processes_find_keys_and_certificates_from_anywhere(tmp_path: Path, told: dict[str, str]) -> None:
    flags = ("--api-keys", "--tls-certificate", "--tls-key", "--tls-client-ca")
    for flag in flags:
        Path(f"{flag}.file").touch()
    serve(*(argument for flag in flags for argument in (flag, f"{flag}.file")))
    for flag in flags:
        assert told["OCTAVO_" + flag[2:].upper().replace("-", "_")] == str(tmp_path / f"{flag}.file")


def test_the_page_sees_the_scheduler(tmp_path: Path, told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    serve()
    assert told["OCTAVO_SCHEDULER_ADMIN"] == f"unix:{tmp_path}/run/admin.sock"
    monkeypatch.setenv("OCTAVO_ADMIN_ADDRESS", "127.0.0.1:50052")
    serve()
    assert told["OCTAVO_SCHEDULER_ADMIN"] == "127.0.0.1:50052"


@pytest.mark.parametrize(("said", "listen"), [("off", ""), ("127.0.0.1:6", "127.0.0.1:6")])
def test_http_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], said: str, listen: str
) -> None:
    asked: list[str] = []

    async def take(model: str, grpc_listen: str, http_listen: str, *_: object) -> None:
        asked.append(http_listen)

    monkeypatch.setattr(module, "_serve", take)
    monkeypatch.setenv("OCTAVO_HTTP_LISTEN", said)
    serve()
    assert asked == [listen]


def test_what_is_served_where_is_said_with_what_callers_need(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    environment = {"OCTAVO_MODEL": str(tmp_path)}
    greeting = module._greeting("0.0.0.0:5", "0.0.0.0:6", environment)
    assert " on 127.0.0.1:5 (gRPC) and http://127.0.0.1:6 (OpenAI API and page). Try:" in greeting
    assert "Each with" not in greeting
    environment |= {"OCTAVO_TLS_CERTIFICATE": "c", "OCTAVO_API_KEYS": "k"}
    greeting = module._greeting("unix:/x", "127.0.0.1:6", environment)
    assert "https://127.0.0.1:6" in greeting
    assert "Each with --ca-certificate CA --api-key KEY." in greeting
    assert " on unix:/x (gRPC). Try:" in module._greeting("unix:/x", "", environment)


def test_an_http_address_that_is_taken_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SupervisionError, match=f"cannot listen on {address}, choose another --http-listen"):
            module._check_bindable(address)
    for free in (address, "", "unix:/x", "[::1]:0"):
        module._check_bindable(free)


def test_the_hub_is_asked_once_and_all_processes_get_the_directory(
    tmp_path: Path, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = []

    def download(name: str, **_: object) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    serve("--model", "org/name", "--load-format", "dummy", "--generation-config", "none")
    assert asked == ["org/name"]
    assert told["OCTAVO_MODEL"] == str(tmp_path)
    assert (told["OCTAVO_LOAD_FORMAT"], told["OCTAVO_GENERATION_CONFIG"]) == ("dummy", "none")


def test_how_the_model_is_computed_is_passed_on(told: dict[str, str]) -> None:
    serve("--model-impl", "native", "--numerics", "exact")
    assert (told["OCTAVO_MODEL_IMPL"], told["OCTAVO_NUMERICS"]) == ("native", "exact")
    serve()
    assert not {"OCTAVO_MODEL_IMPL", "OCTAVO_NUMERICS"} & set(told)


def _options(command: click.Command) -> dict[str, click.Option]:
    return {str(option.envvar): option for option in command.params if isinstance(option, click.Option)}


def _words(option: click.Option) -> str:
    return option.make_metavar(click.Context(module.serve))


def test_a_process_is_offered_the_words_that_it_takes() -> None:
    taken = _options(frontend) | _options(scheduler) | _options(worker)
    choices = {
        variable: each for variable, each in _options(module.serve).items() if isinstance(each.type, click.Choice)
    }
    assert {variable: _words(each) for variable, each in choices.items()} == {
        variable: _words(taken[variable]) for variable in choices
    }
    # Help of `octavo serve` leaves the scheduler's policies to the scheduler's.
    differ = {variable for variable, each in choices.items() if str(taken[variable].help) not in str(each.help)}
    assert differ == {"OCTAVO_POLICY", "OCTAVO_PREEMPTION"}


def test_only_what_was_given_is_passed_on(told: dict[str, str], tmp_path: Path) -> None:
    always = {"OCTAVO_MODEL", "OCTAVO_LOAD_FORMAT", "OCTAVO_LISTEN", "OCTAVO_DRAIN_TIMEOUT", "OCTAVO_SCHEDULER_ADMIN"}
    serve()
    bare = set(told)
    assert bare >= always
    (tmp_path / "keys.json").touch()
    serve("--api-keys", "keys.json", "--policy", "paper", "--http-listen", "127.0.0.1:6", "--drain-timeout", "4")
    assert set(told) - bare == {"OCTAVO_API_KEYS", "OCTAVO_POLICY"}
    assert told["OCTAVO_API_KEYS"] == str(tmp_path / "keys.json")
    assert (told["OCTAVO_POLICY"], told["OCTAVO_DRAIN_TIMEOUT"]) == ("paper", "4.0")


def test_the_bundled_model_keeps_its_name(told: dict[str, str]) -> None:
    serve()
    assert (told["OCTAVO_MODEL"], told["OCTAVO_LOAD_FORMAT"]) == ("smollm2-135m-instruct", "auto")
    assert "OCTAVO_GENERATION_CONFIG" not in told


def test_a_second_service_is_told_of_a_directory_of_its_own(tmp_path: Path, told: dict[str, str]) -> None:
    with claimed(f"unix:{runtime_directory()}/serve"):
        result = CliRunner().invoke(module.serve)
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith(f"Error: another process is bound to the sockets in {tmp_path}/run; stop it, or ")
    assert "OCTAVO_RUNTIME_DIR" in line
    assert not told
