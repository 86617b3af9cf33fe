"""Deltas joined are the decoding of all ids, for every family of tokenizer, every split and every nonsense."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from octavo.frontend.detokenizer import UnsupportedDecoder, Vocabulary
from octavo.testing import tokenizers as make

FAMILIES: list[Callable[[], Tokenizer]] = [
    make.byte_level_tokenizer,
    make.byte_fallback_tokenizer,
    make.metaspace_tokenizer,
    make.word_piece_tokenizer,
]
TOKENIZERS = {family.__name__: family() for family in FAMILIES}
_vocabulary = Vocabulary(TOKENIZERS["byte_level_tokenizer"])
BYTE_IDS = {_vocabulary.bytes_of(i): i for i in range(TOKENIZERS["byte_level_tokenizer"].get_vocab_size())}

every_family = pytest.mark.parametrize("family", TOKENIZERS)
quickly = settings(max_examples=150, deadline=None, derandomize=True)


def stream(tokenizer: Tokenizer, chunks: list[list[int]], skip_special_tokens: bool) -> list[str]:
    detokenizer = Vocabulary(tokenizer).detokenizer(skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.feed(chunk) for chunk in chunks), detokenizer.finish()]


@every_family
@quickly
@given(data=st.data(), skip=st.booleans())
def test_random_ids_in_random_chunks(family: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[family]
    # A little beyond the vocabulary too: models pad theirs.
    token_id = st.integers(0, tokenizer.get_vocab_size() + 3)
    chunks = data.draw(st.lists(st.lists(token_id, max_size=6), max_size=12))
    whole = [i for chunk in chunks for i in chunk]
    assert "".join(stream(tokenizer, chunks, skip)) == tokenizer.decode(whole, skip_special_tokens=skip)


@pytest.mark.parametrize("family", ["byte_level_tokenizer", "byte_fallback_tokenizer"])
@quickly
@given(bytes_=st.binary(max_size=24), skip=st.booleans())
def test_invalid_utf8_from_single_bytes(family: str, bytes_: bytes, skip: bool) -> None:
    tokenizer = TOKENIZERS[family]
    ids = [byte_token(tokenizer, family, byte) for byte in bytes_]
    assert "".join(stream(tokenizer, [[i] for i in ids], skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@quickly
@given(text=st.text(max_size=40))
def test_any_text_survives_encoding_and_streaming(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, [[i] for i in ids], False)) == text


def test_no_delta_holds_half_a_character() -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = [byte_token(tokenizer, "byte_level_tokenizer", byte) for byte in "日🙂".encode()]
    assert stream(tokenizer, [[i] for i in ids], False) == ["", "", "日", "", "", "", "🙂", ""]


def test_an_unfinished_character_is_flushed_as_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = [byte_token(tokenizer, "byte_level_tokenizer", byte) for byte in "日".encode()[:2]]
    assert stream(tokenizer, [[i] for i in ids], False) == ["", "", "�"]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = TOKENIZERS["byte_fallback_tokenizer"]
    ids = [byte_token(tokenizer, "byte_fallback_tokenizer", byte) for byte in "ü".encode()]
    assert stream(tokenizer, [[ids[0]], [ids[1]], [make.id_of(tokenizer, "x")]], False) == ["", "", "üx", ""]


def test_tokens_without_text_do_not_hide_what_came_before() -> None:
    tokenizer = TOKENIZERS["byte_fallback_tokenizer"]
    ids = [make.id_of(tokenizer, token) for token in ("a", *[""] * 6, "▁a")]
    assert "".join(stream(tokenizer, [[i] for i in ids], False)) == tokenizer.decode(ids) == "a a"


def test_special_tokens_are_skipped_only_when_asked() -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = [make.id_of(tokenizer, token) for token in ("<|start|>", "a", "<think>", "<|end|>")]
    assert "".join(stream(tokenizer, [ids], True)) == "a<think>"
    assert "".join(stream(tokenizer, [ids], False)) == "<|start|>a<think><|end|>"


@pytest.mark.parametrize("family", ["byte_fallback_tokenizer", "metaspace_tokenizer"])
def test_work_per_token_does_not_grow(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[family]
    vocabulary = Vocabulary(tokenizer)
    decoded: list[int] = []
    decode = vocabulary.decode

    def counted(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    monkeypatch.setattr(vocabulary, "decode", counted)
    detokenizer = vocabulary.detokenizer(skip_special_tokens=True)
    for token_id in [make.id_of(tokenizer, "▁hello")] * 500:
        detokenizer.feed([token_id])
    assert max(decoded) <= 8


def test_a_decoder_that_cannot_be_followed_is_refused() -> None:
    tokenizer = make.byte_level_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(UnsupportedDecoder, match="ByteLevel must be alone"):
        Vocabulary(tokenizer)


def byte_token(tokenizer: Tokenizer, family: str, byte: int) -> int:
    if family == "byte_level_tokenizer":
        return BYTE_IDS[bytes([byte])]
    return make.id_of(tokenizer, f"<0x{byte:02X}>")
