"""Makes what whole systems are given: requests by their lengths, and model directories without weights."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from octavo.bench.gpu.shapes import MODELS, DecoderShape
from octavo.bench.workloads import CaseRequest

# Ids below are control tokens in many vocabularies.
_FIRST_ID, _LAST_ID = 17, 10_000


@dataclass(frozen=True)
class RequestBatch:
    """Requests that arrive together."""

    title: str
    jobs: list[CaseRequest]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Returns prompt and output tokens of each request."""
        return [(len(job.prompt_token_ids), job.num_tokens) for job in self.jobs]

    @property
    def num_output_tokens(self) -> int:
        return sum(job.num_tokens for job in self.jobs)


def equal_load(count: int, num_prompt: int, num_output: int, key: str) -> RequestBatch:
    """Makes a load of requests of one length, with other token ids for every `key`."""
    rng = random.Random(key)
    jobs = [CaseRequest(rng.choices(range(_FIRST_ID, _LAST_ID), k=num_prompt), num_output) for _ in range(count)]
    return RequestBatch(f"{count} x {num_prompt}/{num_output}", jobs)


def mixed_load(count: int = 256, least: int = 100, most: int = 1024) -> RequestBatch:
    """Makes a load with prompts and outputs of `least` to `most` tokens, drawn from Python's generator of seed 0 as the
    throughput script of nano-vllm draws them: 142,827 tokens in and 133,966 out."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, _LAST_ID) for _ in range(rng.randint(least, most))] for _ in range(count)]
    jobs = [CaseRequest(prompt, rng.randint(least, most)) for prompt in prompts]
    return RequestBatch("mixed lengths", jobs)


def warm_up_load() -> RequestBatch:
    """Makes a little of everything, so that no case pays for first use."""
    rng = random.Random("warm-up")
    lengths = [(1, 8), (30, 40), (300, 24), (1000, 8), *[(500, 24)] * 16]
    return RequestBatch(
        "warm-up", [CaseRequest(rng.choices(range(_FIRST_ID, _LAST_ID), k=num), new) for num, new in lengths]
    )


def write_model(name: str, parent: Path) -> Path:
    """Writes the directory of the model called `name`, with a tokenizer that has a text for each id of its
    vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory = parent / name
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(MODELS / name / "config.json", directory)
    end = "<|end|>"
    pieces = vocabulary(DecoderShape.read(name).vocab_size - 1)
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
    """Makes `size` pieces, none twice: the letters of byte-level BPE, then words that no text splits into."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, *(_word(number) for number in range(size - len(letters)))]


def _word(number: int) -> str:
    """Makes a word, with the space before it that byte-level BPE writes so."""
    text = ""
    for _ in range(5):
        number, letter = divmod(number, 26)
        text += chr(ord("a") + letter)
    return "Ġ" + text
