"""The loads of the frontend's benchmark send what a frontend takes, and one that dies ends the measurement."""

import contextlib
from email.parser import BytesHeaderParser
from pathlib import Path

import pytest

from octavo.bench.frontend.load import StreamLoad
from octavo.bench.frontend.processes import Line
from octavo.bench.frontend.sse_load import call_bytes
from octavo.frontend.http.guards import AllowedHosts


@pytest.mark.parametrize("api", ["completions", "chat", "messages", "responses"])
def test_calls_name_a_host_that_the_frontend_allows(api: str) -> None:
    _, _, head = call_bytes(StreamLoad(port=8080, streams=1, tokens=1, prompt="x", api=api)).partition(b"\r\n")
    host = BytesHeaderParser().parsebytes(head)["host"]
    assert AllowedHosts("127.0.0.1:8080").allows(host)


@pytest.mark.parametrize("ends", ["failing", "waiting"])
def test_nobody_waits_for_a_process_that_has_died(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's line never comes if the load has died that it waits for; nor does that of a process itself."""
    (tmp_path / "waiting.py").write_text("print('here', flush=True)\nprint('there', flush=True)\ninput()\n")
    (tmp_path / "failing.py").write_text("raise SystemExit('out of order')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(Line(["waiting"], tmp_path / "waiting.log")) as waiting:
        assert [waiting.line(), waiting.line([waiting])] == ["here", "there"]
        with (
            contextlib.closing(Line(["failing"], tmp_path / "failing.log")) as failing,
            pytest.raises(RuntimeError, match="out of order"),
        ):
            (waiting if ends == "waiting" else failing).line([failing])


def test_who_has_done_its_part_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brief.py").write_text("print('done')\n")
    (tmp_path / "echo.py").write_text("print(input(), flush=True)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        contextlib.closing(Line(["brief"], tmp_path / "brief.log")) as brief,
        contextlib.closing(Line(["echo"], tmp_path / "echo.log")) as echo,
    ):
        assert brief.line() == "done"
        brief.process.wait()
        echo.tell("and so on")
        assert echo.line([brief]) == "and so on"
