"""GGUF files of the many architectures that transformers can read: dequantized to bfloat16."""

import importlib.util
from pathlib import Path
from typing import Any

from octavo.worker.gguf_model import GGUFError


def convert_with_transformers(gguf: Path, directory: Path) -> None:
    """Writes the model in `gguf`, its configuration and its tokenizer to `directory`.

    Raises `GGUFError` if transformers cannot read them, `ModuleNotFoundError` without the package it needs for this.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ModuleNotFoundError("transformers reads GGUF files with accelerate only", name="accelerate")
    # A second to import, for files of this kind only.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, **_dequantized(), dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # The library raises whatever a file that it does not understand makes it stumble over.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GGUFError(f"{gguf} can be read neither here nor by transformers: {reason}") from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _dequantized() -> dict[str, Any]:
    """What makes this version of transformers dequantize: older ones always do."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
