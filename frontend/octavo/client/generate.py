"""Writes `sync_client.py` from `async_client.py`, word by word; `--check` only says whether it is current.

Needs ruff, which puts the imports in order.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent
SOURCE, TARGET = PACKAGE / "async_client.py", PACKAGE / "sync_client.py"
_HEAD: Final = '''# Written by `make client` from async_client.py; change that file.
"""Holds the client for code without asyncio. Any number of threads may use one client at once."""
'''
# What a word of the one client is in the other. All names that begin with Async lose it.
_WORDS: Final = {
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__anext__": "__next__",
    "aclose": "close",
    "aiter": "iter",
    "anext": "next",
    "asyncio": "time",
    "grpc.aio.UsageError": "ValueError",
    "open_async_channel": "open_channel",
    "task": "thread",
}
_PATTERN: Final = re.compile(rf"\b(?:(?:async|await) |Async(?=[A-Z])|(?:{'|'.join(map(re.escape, _WORDS))})\b)")
_RUFF: Final = (sys.executable, "-m", "ruff")


def main(arguments: Sequence[str] = ()) -> int:
    """Exit status 0, or 1 if `--check` found a difference."""
    written = without_asyncio(SOURCE.read_text(encoding="utf-8"))
    if "--check" not in arguments:
        TARGET.write_text(written, encoding="utf-8")
    elif written != TARGET.read_text(encoding="utf-8"):
        print(f"{TARGET.name} is not what {SOURCE.name} makes it; run `make client`", file=sys.stderr)
        return 1
    return 0


def without_asyncio(source: str) -> str:
    """Returns the module that does without asyncio what the module `source` does with it."""
    _, _, code = source.partition('"""\n')
    text = _HEAD + _PATTERN.sub(lambda found: _WORDS.get(found[0], ""), code)
    return _ruff("format", _ruff("check", text, "--select", "I", "--fix-only", "--quiet"))


def _ruff(command: str, text: str, *flags: str) -> str:
    """Returns what a command of ruff makes of `text`."""
    arguments = [*_RUFF, command, *flags, "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(arguments, input=text, capture_output=True, check=True, encoding="utf-8").stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
