"""Deltas joined are the decoding of all ids, for every family of tokenizer, every split and every nonsense."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from octavo.frontend.text.detokenizer import UnsupportedDecoder, Vocabulary
from octavo.testing.small import tokenizers as make

FAMILIES: list[Callable[[], Tokenizer]] = [
    make.byte_level_tokenizer,
    make.byte_fallback_tokenizer,
    make.unstripped_tokenizer,
    make.metaspace_tokenizer,
    make.word_piece_tokenizer,
    make.word_end_tokenizer,
    make.spaced_tokenizer,
]
BYTE_FALLBACK = ["byte_fallback_tokenizer", "unstripped_tokenizer"]
WITH_BYTES = ["byte_level_tokenizer", *BYTE_FALLBACK]
TOKENIZERS = {family.__name__: family() for family in FAMILIES}
VOCABULARIES = {family: Vocabulary(tokenizer) for family, tokenizer in TOKENIZERS.items()}
BYTE_IDS = {
    VOCABULARIES["byte_level_tokenizer"].pieces[i]: i
    for i in range(TOKENIZERS["byte_level_tokenizer"].get_vocab_size())
}

every_family = pytest.mark.parametrize("family", TOKENIZERS)
quickly = settings(max_examples=80, deadline=None, derandomize=True)


def stream(family: str, chunks: list[list[int]], skip_special_tokens: bool) -> list[str]:
    detokenizer = VOCABULARIES[family].detokenizer(skip_special_tokens=skip_special_tokens)
    pieces, held = [], detokenizer.start
    for chunk in chunks:
        piece, held = detokenizer.feed(held, chunk)
        pieces.append(piece)
    return [*pieces, detokenizer.finish(held)]


def any_id(family: str) -> st.SearchStrategy[int]:
    """Of the rare kinds as often as of the others, and a little beyond the vocabulary too: models pad theirs."""
    tokenizer = TOKENIZERS[family]
    size = tokenizer.get_vocab_size()
    by_kind = [st.integers(0, size + 3), st.integers(size - 4, size - 1)]
    if family in BYTE_FALLBACK:
        odd = ["", "▁", *(f"<0x{byte:02X}>" for byte in "é日🙂".encode())]
        by_kind.append(st.sampled_from([make.id_of(tokenizer, token) for token in odd]))
    return st.one_of(by_kind)


@every_family
@quickly
@given(data=st.data(), skip=st.booleans())
def test_random_ids_in_random_chunks(family: str, data: st.DataObject, skip: bool) -> None:
    chunks = data.draw(st.lists(st.lists(any_id(family), max_size=6), max_size=12))
    whole = [i for chunk in chunks for i in chunk]
    assert "".join(stream(family, chunks, skip)) == TOKENIZERS[family].decode(whole, skip_special_tokens=skip)


@every_family
@quickly
@given(data=st.data(), skip=st.booleans())
def test_what_was_let_out_stands_whatever_follows(family: str, data: st.DataObject, skip: bool) -> None:
    """So no half of a character ever flashes up as a replacement for it."""
    ids, more = data.draw(st.lists(any_id(family), max_size=12)), data.draw(st.lists(any_id(family), max_size=6))
    let_out = "".join(stream(family, [[i] for i in ids], skip)[:-1])
    assert TOKENIZERS[family].decode(ids + more, skip_special_tokens=skip).startswith(let_out)


@pytest.mark.parametrize("family", WITH_BYTES)
@quickly
@given(text=st.text(max_size=20))
def test_bytes_of_characters_never_become_replacements(family: str, text: str) -> None:
    ids = [byte_token(TOKENIZERS[family], family, byte) for byte in ("x" + text).encode()]
    assert "".join(stream(family, [[i] for i in ids], False)) == "x" + text


@pytest.mark.parametrize("family", WITH_BYTES)
@quickly
@given(bytes_=st.binary(max_size=24), skip=st.booleans())
def test_invalid_utf8_from_single_bytes(family: str, bytes_: bytes, skip: bool) -> None:
    tokenizer = TOKENIZERS[family]
    ids = [byte_token(tokenizer, family, byte) for byte in bytes_]
    assert "".join(stream(family, [[i] for i in ids], skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@quickly
@given(text=st.text(max_size=40))
def test_any_text_survives_encoding_and_streaming(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream("byte_level_tokenizer", [[i] for i in ids], False)) == text


def test_no_delta_holds_half_a_character() -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = [byte_token(tokenizer, "byte_level_tokenizer", byte) for byte in "日🙂".encode()]
    assert stream("byte_level_tokenizer", [[i] for i in ids], False) == ["", "", "日", "", "", "", "🙂", ""]


def test_an_unfinished_character_is_flushed_as_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = [byte_token(tokenizer, "byte_level_tokenizer", byte) for byte in "日".encode()[:2]]
    assert stream("byte_level_tokenizer", [[i] for i in ids], False) == ["", "", "�"]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = TOKENIZERS["byte_fallback_tokenizer"]
    ids = [byte_token(tokenizer, "byte_fallback_tokenizer", byte) for byte in "ü".encode()]
    assert stream("byte_fallback_tokenizer", [[ids[0]], [ids[1]], [make.id_of(tokenizer, "x")]], False) == [
        "",
        "",
        "üx",
        "",
    ]


def test_tokens_without_text_do_not_hide_what_came_before() -> None:
    tokenizer = TOKENIZERS["byte_fallback_tokenizer"]
    ids = [make.id_of(tokenizer, token) for token in ("a", *[""] * 6, "▁a")]
    assert "".join(stream("byte_fallback_tokenizer", [[i] for i in ids], False)) == tokenizer.decode(ids) == "a a"


def test_special_tokens_are_skipped_only_when_asked() -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    ids = [make.id_of(tokenizer, token) for token in ("<|start|>", "a", "<think>", "<|end|>")]
    assert "".join(stream("byte_level_tokenizer", [ids], True)) == "a<think>"
    assert "".join(stream("byte_level_tokenizer", [ids], False)) == "<|start|>a<think><|end|>"


# One of: an ordinary token, an empty one, special ones, bytes that are no character, bytes that are one.
RUNS = {
    "word": ["▁hello"],
    "start": ["▁"],
    "empty": [""],
    "special": ["<|start|>"],
    "broken": ["<0xE6>"],
    "characters": ["<0xE6>", "<0x97>", "<0xA5>"],
    "mixed": ["<0xE6>", "", "<|start|>", ""],
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("before", [[], ["▁hello"]])
def test_work_per_token_does_not_grow(run: str, skip: bool, before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["byte_fallback_tokenizer"]
    vocabulary = Vocabulary(tokenizer)
    ids = [make.id_of(tokenizer, token) for token in before + RUNS[run] * 300]
    assert [vocabulary.kinds[i] for i in ids]
    decode, decoded = vocabulary.decode, 0

    def counted(token_ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decode(token_ids)

    monkeypatch.setattr(vocabulary, "decode", counted)
    detokenizer = vocabulary.detokenizer(skip_special_tokens=skip)
    text, held = "", detokenizer.start
    for token_id in ids:
        piece, held = detokenizer.feed(held, [token_id])
        text += piece
    text += detokenizer.finish(held)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert decoded <= 10 * len(ids)


@pytest.mark.parametrize(
    ("family", "token", "piece"),
    [
        ("byte_level_tokenizer", "a", b"a"),
        ("byte_level_tokenizer", "<|end|>", b"<|end|>"),
        ("byte_level_tokenizer", "日記 é", "日記 é".encode()),
        ("byte_fallback_tokenizer", "▁hello", b" hello"),
        ("byte_fallback_tokenizer", "<0xE6>", b"\xe6"),
        ("byte_fallback_tokenizer", "", b""),
        ("metaspace_tokenizer", "▁a", b" a"),
        ("word_piece_tokenizer", "##lo", b"lo"),
        ("word_piece_tokenizer", "hello", b" hello"),
        ("word_end_tokenizer", "hello</w>", b"hello "),
        ("spaced_tokenizer", "hello", b" hello"),
    ],
)
def test_the_bytes_that_a_token_stands_for(family: str, token: str, piece: bytes) -> None:
    assert VOCABULARIES[family].pieces[make.id_of(TOKENIZERS[family], token)] == piece


@pytest.mark.parametrize("family", WITH_BYTES)
@quickly
@given(text=st.text(max_size=20))
def test_pieces_joined_are_the_text(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    ids = [byte_token(tokenizer, family, byte) for byte in text.encode()]
    assert b"".join(VOCABULARIES[family].pieces[i] for i in ids) == text.encode()


def test_an_id_beyond_the_vocabulary_stands_for_nothing() -> None:
    assert all(vocabulary.pieces[10**6] == b"" for vocabulary in VOCABULARIES.values())


@pytest.mark.parametrize(
    "decoder", [decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), decoders.CTC()]
)
def test_a_decoder_that_cannot_be_followed_is_refused(decoder: decoders.Decoder) -> None:
    tokenizer = make.byte_level_tokenizer()
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedDecoder, match="ByteLevel must be alone"):
        Vocabulary(tokenizer)


def byte_token(tokenizer: Tokenizer, family: str, byte: int) -> int:
    if family == "byte_level_tokenizer":
        return BYTE_IDS[bytes([byte])]
    return make.id_of(tokenizer, f"<0x{byte:02X}>")
