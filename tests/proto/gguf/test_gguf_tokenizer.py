"""Tokenizers out of GGUF metadata: the tokens of the tokenizer that the metadata was written from, and every text
again."""

import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.frontend.text.detokenizer import Vocabulary
from octavo.runtime.models.gguf.metadata import Metadata
from octavo.runtime.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from octavo.runtime.models.gguf.tokenizer import GGUFTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = [
    "The quick brown fox doesn't jump over 12 lazy dogs, and we'll see 345 of them in 2026!",
    "HelloWorld camelCase snake_case x=1;\n\n\tfor i in range(100):\r\n  print(i)   # three spaces",
    "Grüße aus Köln, 日本語のテキスト, русский текст, 한국어, العربية, ไทย, emoji 🎉🎉 and e\u0301 combined",
    "https://example.org/path?query=1&other=2#part  'quoted' \"text\" (in) [brackets] {and} <tags/>",
] * 3
SPECIAL = "<|end|>"

# The patterns as tokenizer.json files of the families have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


BY_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
KNOWN: dict[str, list[Any]] = {
    "gpt-2": [BY_REGEX],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), BY_REGEX],
    "refact": [pre_tokenizers.Digits(individual_digits=True), BY_REGEX],
    "llama-bpe": split(LLAMA3),
    "dbrx": split(LLAMA3),
    "qwen2": split(QWEN2),
    "stablelm2": split(QWEN2),
    "tekken": split(TEKKEN),
    "gpt-4o": split(GPT4O),
}
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                "a",
                "The",
                " ",
                "  ",
                "\n",
                "\r\n",
                "\t",
                "12",
                "'ll",
                "'S",
                "É",
                "e\u0301",
                "日本",
                "🎉",
                "!?",
                "/",
                SPECIAL,
            ]
        )
    ).map("".join),
)


def metadata(values: Mapping[str, Any]) -> Metadata:
    return Metadata(Path("model.gguf"), {"general.architecture": "llama", "llama.context_length": 64, **values})


def built(values: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(GGUFTokenizer(metadata(values)).tokenizer_json()))


def trained(name: str) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer of the library, trained with the known steps, and the one that its metadata make."""
    known = PRE_TOKENIZERS[name]
    original = Tokenizer(models.BPE(ignore_merges=known.ignore_merges))
    original.pre_tokenizer = pre_tokenizers.Sequence(KNOWN[name])
    original.decoder = decoders.ByteLevel()
    if name == "qwen2":
        original.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    original.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    original.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    described = json.loads(original.to_str())
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": array("i", [CONTROL if token == SPECIAL else NORMAL for token in tokens]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocabulary[SPECIAL],
        "tokenizer.ggml.add_bos_token": False,
    }
    return original, built(values)


@pytest.fixture(scope="module", params=KNOWN)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer]:
    return trained(request.param)


@given(text=TEXTS)
def test_byte_level_tokens_are_those_of_the_original(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    original, found = pair
    expected = original.encode(text).ids
    assert found.encode(text).ids == expected
    assert found.decode(expected, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize("text", CORPUS[:4])
def test_byte_level_text_comes_back(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    found = pair[1]
    normal = normalizers.NFC().normalize_str(text)
    assert found.decode(found.encode(normal).ids) == normal


# -- SentencePiece -----------------------------------------------------------------------------------------------------

PIECES = [
    "▁",
    "e",
    "t",
    "a",
    "o",
    "h",
    "n",
    "b",
    "l",
    "▁t",
    "he",
    "▁the",
    "an",
    "▁a",
    "ll",
    "▁b",
    "all",
    "ball",
    "▁ball",
    "hea",
    "th",
]
NAMED = ["<unk>", "<s>", "</s>", "<0x00>"]
BYTES = [f"<0x{value:02X}>" for value in range(1, 256)]
ADDED = ["  ", "<tag>"]
TOKENS = [*NAMED, *BYTES, *PIECES, *ADDED]
FIRST_PIECE = len(NAMED) + len(BYTES)
# In another order than the pieces, and some as good as another.
SCORES = [0.0] * FIRST_PIECE + [-float(place * 7 % 17) for place in range(len(PIECES))] + [0.0] * len(ADDED)
TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), *[USER_DEFINED] * len(ADDED)]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": array("f", SCORES),
        "tokenizer.ggml.token_type": array("i", TYPES),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def merged(word: str) -> list[int]:
    """The tokens of text without added tokens: of all neighbours that make a piece, those of the best one are joined
    first, the leftmost of equals."""
    symbols = list(word)
    while True:
        places = [
            (-SCORES[TOKENS.index(pair)], place)
            for place in range(len(symbols) - 1)
            if (pair := symbols[place] + symbols[place + 1]) in PIECES
        ]
        if not places:
            break
        _, place = min(places)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids = []
    for symbol in symbols:
        ids += [TOKENS.index(symbol)] if symbol in PIECES else [3 + byte for byte in symbol.encode()]
    return ids


SPM_TEXTS = st.one_of(st.text(max_size=20), st.text("the banall o", max_size=30).filter(lambda text: "  " not in text))


@given(text=SPM_TEXTS)
def test_sentencepiece_joins_the_best_neighbours_first(text: str) -> None:
    found = built(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assume(not any(added in text for added in ADDED))
    expected = merged(text.replace(" ", "▁"))
    assert found.encode(text).ids == expected
    assert found.decode(expected) == text


@given(text=SPM_TEXTS)
def test_sentencepiece_begins_with_a_space_where_the_file_wants_it(text: str) -> None:
    found = built(sentencepiece(add_space_prefix=True, add_bos_token=False))
    assume(text and not any(added in f" {text}" for added in ADDED))
    expected = merged("▁" + text.replace(" ", "▁"))
    assert found.encode(text).ids == expected
    assert Vocabulary(found).decode(expected) == text


def test_added_tokens_are_found_before_text_is_cut() -> None:
    found = built(sentencepiece(add_space_prefix=False))
    assert found.encode("the  ball<tag>a</s>").tokens == ["<s>", "t", "he", "  ", "ball", "<tag>", "a", "</s>"]
    assert found.decode(found.encode("the  ball<tag>a</s>").ids, skip_special_tokens=True) == "the  ball<tag>a"


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, (True, False)),
        ({"add_bos_token": False}, (False, False)),
        ({"add_eos_token": True}, (True, True)),
        ({"add_bos_token": False, "add_eos_token": True}, (False, True)),
    ],
)
def test_begin_and_end_are_added_as_the_file_says(changes: dict[str, Any], ends: tuple[bool, bool]) -> None:
    tokens = built(sentencepiece(add_space_prefix=False, **changes)).encode("a").tokens
    assert (tokens[0] == "<s>", tokens[-1] == "</s>") == ends


# -- what stands beside tokens -----------------------------------------------------------------------------------------


def byte_level(tokens: list[str], **changes: Any) -> GGUFTokenizer:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        **{f"tokenizer.{name}": value for name, value in changes.items()},
    }
    return GGUFTokenizer(metadata(values))


def test_ends_are_those_that_the_file_names_and_those_that_look_so() -> None:
    tokens = ["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|stop|>", "<eos>"]
    named = {"ggml.eos_token_id": 3, "ggml.eot_token_id": 4, "ggml.bos_token_id": 2, "ggml.padding_token_id": 1}
    found = byte_level(tokens, **named).generation_config()
    assert found == {"bos_token_id": 2, "eos_token_id": [3, 4, 1, 5], "pad_token_id": 1}


def test_chat_templates_come_along_with_their_names() -> None:
    ends: dict[str, Any] = {"ggml.eos_token_id": 0}
    assert "chat_template" not in byte_level(["a"], **ends).tokenizer_config()
    one = byte_level(["a"], **ends, chat_template="{{ messages }}").tokenizer_config()
    assert one["chat_template"] == "{{ messages }}"
    several = {
        "chat_template": "{{ 1 }}",
        "chat_templates": ["default", "tool_use"],
        "chat_template.tool_use": "{{ 2 }}",
    }
    found = byte_level(["a"], **ends, **several).tokenizer_config()["chat_template"]
    assert found == [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]


def test_the_special_tokens_of_phi_3_take_the_space_behind_them() -> None:
    tokens = ["a", "<s>", "<|user|>", "<|end|>"]
    types = {"ggml.token_type": array("i", [NORMAL, CONTROL, CONTROL, CONTROL])}
    values = metadata(
        {
            "general.name": "Phi 3 Mini".replace(" ", "-"),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.token_type": types["ggml.token_type"],
        }
    )
    added = {token["content"]: token["rstrip"] for token in GGUFTokenizer(values).tokenizer_json()["added_tokens"]}
    assert added == {"<s>": False, "<|user|>": True, "<|end|>": True}


def test_every_way_of_cutting_words_is_one_that_the_library_knows() -> None:
    for name, known in PRE_TOKENIZERS.items():
        tokenizer = Tokenizer.from_str(json.dumps(byte_level(["a", "b"], **{"ggml.pre": name}).tokenizer_json()))
        assert tokenizer.pre_tokenizer is not None
        cut = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab 123 (x)\n 'll")]
        assert "".join(cut) == "abĠ123Ġ(x)ĊĠ'll", known
        assert len(cut) > 4
