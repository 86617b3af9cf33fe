"""What is left of a worker that has died, for the next of its name: which process it was, and how it came to its end.

A file in the runtime directory, which outlives the process and, where that is on a volume, its container. A process
that is welcomed by a scheduler writes its name there. If it crashes, the interpreter's fault handler adds what ended
it, and an error that nobody has caught is added too; if it leaves in order, the file is removed. What is killed from
outside says nothing: whoever started it may know more (`octavo.wire.ends`).
"""

import contextlib
import faulthandler
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from octavo.telemetry.optional import LAST_WORDS, tolerated
from octavo.wire.ends import End, read_ends
from octavo.wire.steps import Ending, Predecessor

_MAX_DETAIL = 200
_ENCODING = "utf-8"


class LastWords:
    """Those of the process before, and the place for this one's own. Nothing that goes wrong with them matters."""

    def __init__(self, path: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.predecessor = _predecessor(path, read_ends(environment))
        self._path = path
        self._file: TextIO | None = None

    def begin(self, process: int) -> None:
        """This process serves from now on, under this name."""
        if self._file is not None:
            return
        with tolerated(LAST_WORDS, "how this process ends can be told to nobody"):
            self._file = self._path.open("w", encoding=_ENCODING)
            self._file.write(f"{process} {os.getpid()}\n")
            self._file.flush()
            faulthandler.enable(self._file, all_threads=False)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Writes down an error that ends the block; and if none does, that nothing is left to be told."""
        try:
            yield
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")
            raise
        else:
            # One that was never welcomed leaves what it has found.
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
        finally:
            if self._file is not None:
                faulthandler.disable()
                # Which writes what is left.
                with contextlib.suppress(OSError):
                    self._file.close()

    def _say(self, words: str) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(" ".join(words.split())[:_MAX_DETAIL] + "\n")
                self._file.flush()


def _predecessor(path: Path, ends: Mapping[int, End]) -> Predecessor | None:
    try:
        first, *words = path.read_text(encoding=_ENCODING, errors="replace").splitlines()
        process, pid = map(int, first.split())
    except (OSError, ValueError):
        return None
    said = next((line.strip() for line in words if line.strip()), "")[:_MAX_DETAIL]
    end = ends.get(pid)
    if end is not None:
        ending = Ending.CRASHED if said or end.is_crash else Ending.KILLED
        return _told(process, ending, f"{end}, {said}" if said else str(end))
    if said:
        return _told(process, Ending.CRASHED, said)
    return _told(process, Ending.UNKNOWN, "it ended without a word")


def _told(process: int, ending: Ending, detail: str) -> Predecessor | None:
    return Predecessor(process, ending, detail) if 0 <= process < 2**64 else None
