"""Fetches models named by their id on the Hugging Face hub into the hub library's own cache, or finds them there."""

import errno
import re
from pathlib import Path

# An organisation, a name, and perhaps a branch, tag or commit.
_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_CACHED = re.compile(r"models--(.+?)--(.+)")
# Configuration, tokenizer and chat template, whatever the weights are.
_OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Other formats and other models lie in folders; Mistral's own format lies beside the usual one.
_UNWANTED = ("*/*", "consolidated*")


class HubError(Exception):
    """Says why a model cannot be had from the hub, and what to do about it."""


def is_hub_id(model: str) -> bool:
    """Returns whether `model` is written like an id of the hub, `org/name` or `org/name@revision`."""
    return _ID.fullmatch(model) is not None and not model.startswith(".")


def fetch(model: str, weight_files: str | None = "*.safetensors") -> Path:
    """Returns the directory of the hub's `model`, with the files that match the pattern `weight_files`; with none if
    that is None. Raises `HubError` if the model cannot be had."""
    # A library that takes part of a second to import, for those who need it.
    from huggingface_hub import snapshot_download

    name, _, revision = model.partition("@")
    wanted = [*_OTHER_FILES, *([weight_files] if weight_files else [])]
    try:
        directory = Path(
            snapshot_download(name, revision=revision or None, allow_patterns=wanted, ignore_patterns=list(_UNWANTED))
        )
    except Exception as error:  # The library lets through what its transport, the hub and the disk raise.
        raise HubError(f"no directory {model} is here, and {_what_failed(name, error)}") from error
    if weight_files and not any(directory.glob(weight_files)):
        raise HubError(
            f"{model} has no {weight_files} on the hub (with HF_HUB_OFFLINE: in its cache); if it has"
            f" pytorch_model.bin, run `octavo convert-weights {model} --output {name.partition('/')[2]}` and serve that"
            " directory"
        )
    return directory


def hub_name(directory: Path) -> str | None:
    """Returns the id, without revision, of a directory in the hub's cache; None for other directories."""
    match = _CACHED.fullmatch(directory.parent.parent.name) if directory.parent.name == "snapshots" else None
    return f"{match[1]}/{match[2]}" if match else None


def _what_failed(name: str, error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return f"the hub gives {name} only to those who accepted its terms: do so there, and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return f"the hub has no model {name}, or not for you: check the name, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"the hub's {name} has no such revision: check what follows the @"
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError():
            return (
                f"the hub cannot be reached (or HF_HUB_OFFLINE is set) and {name} is not in its cache: fetch it where"
                " there is a network, or name a directory that holds config.json"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EROFS | errno.EACCES | errno.EIO):
            return (
                f"{name} could not be written to the hub library's cache ({error}): make room there, or name another"
                " place with HF_HOME"
            )
    return f"fetching {name} from the hub failed: {' '.join(str(error).split()) or type(error).__name__}"
