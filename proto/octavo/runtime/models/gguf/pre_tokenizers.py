r"""The ways in which byte-level BPE tokenizers cut a text into words, by the names that GGUF files give to them.

A pattern is that of the tokenizer.json that a name stands for: a fact of the models trained with it. llama.cpp lists
the names in src/llama-vocab.cpp.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Cuts by each of `patterns` in turn: what matches is a word, and so is what lies between.

    With `nfc`, texts are brought to Unicode's composed form before. With `ignore_merges`, a word that is a token is
    that token. `adds_bos`: BOS comes before a text if the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yields the steps of a tokenizer.json."""
        for pattern in self.patterns:
            yield {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Words that end where lower case turns to upper case.
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _words(digits: str) -> str:
    return "|".join((_CONTRACTIONS, _WORDS, digits, _MARKS, _LINES_AND_SPACES))


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_GPT4O = "|".join((*(f"{words}{_CONTRACTIONS}?" for words in _CASED), r"\p{N}{1,3}", _CASED_MARKS, _LINES_AND_SPACES))
_TEKKEN = "|".join((*_CASED, r"\p{N}", _CASED_MARKS, _LINES_AND_SPACES))
_SEED = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES_AND_SPACES))
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}""",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)

_BY_DIGIT = PreTokenizer(patterns=(_DIGIT, _GPT2))
_LIKE_LLAMA3 = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, adds_bos=True)
_LIKE_QWEN2 = PreTokenizer(patterns=(_QWEN2,), nfc=True)

PRE_TOKENIZERS: Final = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "exaone4", "trillion", "gigachat"), PreTokenizer(patterns=(_GPT2,))),
        "olmo": PreTokenizer(patterns=(_GPT2,), nfc=True),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _BY_DIGIT),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LIKE_LLAMA3),
        **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(patterns=(_LLAMA3,))),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _LIKE_QWEN2),
        **dict.fromkeys(("stablelm2", "hunyuan"), PreTokenizer(patterns=(_QWEN2,))),
        "gpt-4o": PreTokenizer(patterns=(_GPT4O,)),
        "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, adds_bos=True),
        "seed-coder": PreTokenizer(patterns=(_SEED,)),
        "deepseek-v3": PreTokenizer(patterns=_DEEPSEEK3),
        "deepseek-coder": PreTokenizer(patterns=_DEEPSEEK_CODER),
    }
)
