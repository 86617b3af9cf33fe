"""What is typed in a talk: lines with editing and a history, and the commands among them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from octavo.client import Message
from octavo.runtime.models.directory import cache_directory

_MAX_HISTORY: Final = 1000
_HELP: Final = """\
/help           List these commands.
/reset          Forget the conversation; the system prompt stays.
/system [TEXT]  Tell the model TEXT before all else from now on; without TEXT, nothing.
//...           Send a message that begins with one slash.
Ctrl-C stops an answer, Ctrl-D ends the talk."""


@dataclass
class Conversation:
    """What has been said, under a system prompt that may change."""

    system: str = ""
    said: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """All that the model is told."""
        return [*([Message("system", self.system)] if self.system else []), *self.said]

    def command(self, line: str) -> str:
        """Does what a line that begins with a slash says; gives what to show for it."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                return _HELP
            case "/reset":
                self.said.clear()
                return "the conversation begins anew"
            case "/system":
                self.system = rest.strip()
                return f"system prompt: {self.system or 'none'}"
        return f"there is no command {name[:100]}; /help lists them, and // sends a slash"


def typed_messages(conversation: Conversation) -> Iterator[str]:
    """Messages from stdin until it ends; commands are done on the way, and what they show goes to stderr."""
    with _edited():
        while (line := _typed_line()) is not None:
            if line.startswith("//"):
                yield line[1:]
            elif line.startswith("/"):
                click.echo(conversation.command(line), err=True)
            elif line.strip():
                yield line


def _typed_line() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


@contextmanager
def _edited() -> Iterator[None]:
    """On a terminal, lines can be edited and those of earlier talks be fetched; elsewhere nothing is kept."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        # `input` edits lines once this is loaded; not every Python has it.
        import readline
    except ImportError:
        yield
        return
    history = cache_directory() / "chat_history"
    # None yet, or not to be read: a talk goes without.
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):
            _make_private(history)
            readline.write_history_file(history)
            # Some libraries replace the file.
            history.chmod(0o600)


def _make_private(path: Path) -> None:
    """An empty file for its owner alone, before anything is written to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.chmod(0o600)
