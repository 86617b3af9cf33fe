"""Fetches models named by their id on the Hugging Face hub into the hub library's own cache, or finds them there."""

import errno
import re
from pathlib import Path
from typing import Any

# An organisation, a name, and perhaps a branch, tag or commit.
_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_CACHED = re.compile(r"models--(.+?)--(.+)")
# Configuration, tokenizer and chat template, whatever the weights are.
_OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Other formats and other models lie in folders; Mistral's own format lies beside the usual one.
_UNWANTED = ("*/*", "consolidated*")
# The quantizations of GGUF files that are taken, the first that there is, where none is named.
_USUAL_TAGS = ("Q4_K_M", "Q8_0")
# Files beside a model's that are no model.
_BESIDE_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


class HubError(Exception):
    """Says why a model cannot be had from the hub, and what to do about it."""


class NoSafetensors(HubError):
    """Raised for a model whose repository has no such files: it may have others."""


def is_hub_id(model: str) -> bool:
    """Returns whether `model` is written like an id of the hub, `org/name` or `org/name@revision`."""
    return _ID.fullmatch(model) is not None and not model.startswith(".")


def split_tag(model: str) -> tuple[str, str | None]:
    """Returns the id and the quantization of `org/name:Q4_K_M`; anything else as it is, with None."""
    name, _, tag = model.rpartition(":")
    return (name, tag) if is_hub_id(name) and re.fullmatch(r"[\w.-]+", tag) else (model, None)


def fetch_gguf(model: str, tag: str | None) -> Path:
    """Returns the GGUF file of the hub's `model` that `tag` names, the first part if it has several; all are fetched.

    The file is chosen as llama.cpp chooses it: the first whose name has the tag before a dot or a dash, in any case;
    without a tag Q4_K_M, else Q8_0, else the first file. Raises `HubError`.
    """
    from huggingface_hub import snapshot_download

    name, _, revision = model.partition("@")
    where: dict[str, Any] = {"revision": revision or None}
    try:
        files = _gguf_files(name, where)
        chosen = _chosen(model, tag, files)
        return Path(snapshot_download(name, **where, allow_patterns=_all_parts(chosen))) / chosen
    except HubError:
        raise
    except Exception as error:  # The library lets through what its transport, the hub and the disk raise.
        raise HubError(f"no file of {model} is here, and {_what_failed(name, error)}") from error


def _gguf_files(name: str, where: dict[str, Any]) -> list[str]:
    """Returns the paths of the models in GGUF files that the hub has, or, where it cannot be asked, its cache."""
    from huggingface_hub import errors, list_repo_files, snapshot_download

    try:
        files = list_repo_files(name, **where)
    except (errors.OfflineModeIsEnabled, ConnectionError, OSError) as error:
        if isinstance(error, errors.HfHubHTTPError):
            raise
        directory = Path(snapshot_download(name, **where, local_files_only=True))
        files = [str(path.relative_to(directory)) for path in directory.rglob("*.gguf")]
    return sorted(
        path for path in files if path.endswith(".gguf") and not any(word in Path(path).name for word in _BESIDE_MODELS)
    )


def _chosen(model: str, tag: str | None, files: list[str]) -> str:
    """Returns the one of `files` that `tag` names, or the usual one. Raises `HubError` if there is none."""
    firsts = [path for path in files if (part := _PART.search(path)) is None or int(part[1]) == 1]
    for wanted in _USUAL_TAGS if tag is None else (tag,):
        pattern = re.compile(f"{re.escape(wanted)}[.-]", re.IGNORECASE)
        for path in firsts:
            if pattern.search(path):
                return path
    if tag is None and firsts:
        return firsts[0]
    there = f"; it has {', '.join(firsts)}" if firsts else ""
    raise HubError(
        f"{model} has no GGUF file{f' of {tag}' if tag else ''} on the hub (or offline, in its cache){there}"
    )


def _all_parts(path: str) -> list[str]:
    part = _PART.search(path)
    if part is None:
        return [path]
    return [f"{path[: part.start()]}-{number:05}-of-{part[2]}.gguf" for number in range(1, int(part[2]) + 1)]


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
        raise NoSafetensors(
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
