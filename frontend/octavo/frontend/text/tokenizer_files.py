"""Reads a model directory's tokenizer and chat templates into texts that can be sent to another process."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.frontend.text import tokenizer_cache
from octavo.runtime.models.directory import ModelDirectoryError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TokenizerFiles(msgspec.Struct, frozen=True, tag=True):
    """Holds a tokenizer and chat templates. `tokenizer` is the text of a tokenizer.json.

    `chat_template` may be empty, as may `tool_template`, which is for chats with tools and mostly the same.
    `special_tokens` are variables of the templates: bos_token and its like.
    """

    directory: str
    tokenizer: str
    chat_template: str = ""
    tool_template: str = ""
    special_tokens: dict[str, str] = {}


class _Failure(msgspec.Struct, frozen=True, tag=True):
    """Tells why reading failed. `missing` is a module that is not installed."""

    message: str
    missing: str = ""


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Reads the files in `directory`, and runs no code that comes with the model.

    Raises `ModelDirectoryError` if `directory` holds no tokenizer that can be used.
    """
    library = _load(directory)
    return TokenizerFiles(
        directory=str(directory),
        tokenizer=library.backend_tokenizer.to_str(),
        chat_template=_template(library, with_tools=False),
        tool_template=_template(library, with_tools=True),
        special_tokens=library.special_tokens_map,
    )


def read_tokenizer_files_apart(directory: Path) -> TokenizerFiles:
    """Reads the files in a process of its own, or from the cache, so that this process need not import the library.

    Raises `ModelDirectoryError`, and `ModuleNotFoundError` where the library is not installed.
    """
    place = tokenizer_cache.place_of(directory)
    if place is not None and (content := tokenizer_cache.read(place)) is not None:
        with contextlib.suppress(msgspec.MsgspecError):
            known = msgspec.msgpack.decode(content, type=TokenizerFiles)
            return msgspec.structs.replace(known, directory=str(directory))
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(directory)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
        check=False,
    )
    if done.returncode:
        raise ModelDirectoryError(f"reading the tokenizer in {directory} ended with status {done.returncode}")
    found = msgspec.msgpack.decode(done.stdout, type=TokenizerFiles | _Failure)
    if isinstance(found, _Failure):
        if found.missing:
            raise ModuleNotFoundError(found.message, name=found.missing)
        raise ModelDirectoryError(found.message)
    if place is not None:
        tokenizer_cache.write(place, done.stdout)
    return found


def _main(directory: Path) -> None:
    answer, sys.stdout = sys.stdout, sys.stderr
    # The library loads torch where it finds it, which is of no use for a tokenizer.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        found: TokenizerFiles | _Failure = read_tokenizer_files(directory)
    except ModelDirectoryError as error:
        found = _Failure(str(error))
    except ModuleNotFoundError as error:
        found = _Failure(str(error), error.name or "")
    answer.buffer.write(msgspec.msgpack.encode(found))


def _load(directory: Path) -> "PreTrainedTokenizerFast":
    # The import takes a second and 100 MB, which a process that gets a tokenizer's files does without.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # The library raises whatever a broken file makes it stumble over.
        raise ModelDirectoryError(f"cannot load the tokenizer in {directory}: {_reason(error)}") from error
    if not isinstance(library, PreTrainedTokenizerFast):
        raise ModelDirectoryError(f"the tokenizer in {directory} has no tokenizer.json; convert it to a fast one")
    return library


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it is code of the model's own (auto_map), which is never run; serve a model with a tokenizer.json"
    return " ".join(str(error).split()) or type(error).__name__


def _template(library: "PreTrainedTokenizerFast", *, with_tools: bool) -> str:
    try:
        return str(library.get_chat_template(tools=[] if with_tools else None))
    except ValueError:
        # There is no template, or none for chats with tools.
        return ""


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
