"""Model directories without weights, whole enough for every process: configuration and a made-up tokenizer."""

import json
import shutil
from pathlib import Path

from octavo.bench.gpu.shapes import MODELS, ModelShape


def write_model(name: str, parent: Path) -> Path:
    """The directory of the model called `name`, with a tokenizer that has a text for each id of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory = parent / name
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(MODELS / name / "config.json", directory)
    end = "<|end|>"
    pieces = vocabulary(ModelShape.read(name).vocab_size - 1)
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "generation_config.json").write_text('{"do_sample": false}', encoding="utf-8")
    return directory


def vocabulary(size: int) -> list[str]:
    """The letters of byte-level BPE, then words that no text splits into: `size` pieces, none twice."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, *(_word(number) for number in range(size - len(letters)))]


def _word(number: int) -> str:
    """With the space before it that byte-level BPE writes so."""
    text = ""
    for _ in range(5):
        number, letter = divmod(number, 26)
        text += chr(ord("a") + letter)
    return "Ġ" + text
