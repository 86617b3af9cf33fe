"""The client without asyncio is written from the one with it, and a copy that lags behind is found."""

from pathlib import Path

import pytest

from octavo.client import generate


def test_the_client_without_asyncio_is_what_the_other_makes_it() -> None:
    assert generate.main(["--check"]) == 0


def test_a_client_that_lags_behind_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "async_client.py"
    monkeypatch.setattr(generate, "SOURCE", source)
    monkeypatch.setattr(generate, "TARGET", tmp_path / "sync_client.py")
    source.write_text(
        '"""For asyncio."""\n\nimport asyncio\nimport contextlib\n\n\n'
        "class AsyncStream:\n    async def aclose(self) -> None:\n        # By another task.\n"
        "        with contextlib.suppress(StopAsyncIteration):\n            await asyncio.sleep(0)\n"
    )
    (tmp_path / "sync_client.py").write_text("")
    assert generate.main(["--check"]) == 1
    assert "run `make client`" in capsys.readouterr().err
    assert generate.main([]) == generate.main(["--check"]) == 0
    assert (tmp_path / "sync_client.py").read_text().splitlines()[2:] == [
        "",
        "import contextlib",
        "import time",
        "",
        "",
        "class Stream:",
        "    def close(self) -> None:",
        "        # By another thread.",
        "        with contextlib.suppress(StopIteration):",
        "            time.sleep(0)",
    ]
