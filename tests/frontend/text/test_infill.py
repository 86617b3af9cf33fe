"""Gaps to fill as prompts, in each family's own control tokens."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from octavo.frontend.request.infill import FilePiece, Infill
from octavo.frontend.text.infill import find_infill_format
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.testbed.tiny_model import write_byte_model

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
# The tokens that a family's tokenizer has, and what its published code makes of `before` and `after`.
FAMILIES = {
    "qwen": (QWEN, "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"),
    "starcoder": (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        "<fim_prefix>before<fim_suffix>after<fim_middle>",
    ),
    "codellama": (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "▁<PRE>before▁<SUF>after▁<MID>"),
    "deepseek": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>before<｜fim▁hole｜>after<｜fim▁end｜>",
    ),
    "codestral": (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]after[PREFIX]before"),
}


def model_with(directory: Path, *tokens: str) -> ModelTokenizer:
    write_byte_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    return ModelTokenizer(directory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return model_with(tmp_path_factory.mktemp("qwen"), *QWEN)


def written(tokenizer: ModelTokenizer, infill: Infill) -> str:
    return tokenizer.decode(tokenizer.encode_infill(infill), skip_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gap_is_written_as_its_family_was_trained(tmp_path: Path, family: str) -> None:
    tokens, expected = FAMILIES[family]
    assert written(model_with(tmp_path, *tokens), Infill("before", "after")) == expected


def test_a_model_without_such_tokens_has_no_format(tmp_path: Path) -> None:
    assert model_with(tmp_path, "<fim_prefix>", "<fim_suffix>").infill_format is None


def test_what_is_filled_already_stands_last(qwen: ModelTokenizer) -> None:
    expected = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>so far"
    assert written(qwen, Infill("a", "b", begun="so far")) == expected


def test_pieces_of_other_files_stand_first_under_their_names(qwen: ModelTokenizer) -> None:
    infill = Infill("a", "b", pieces=(FilePiece("x.py", "one\n"), FilePiece("", "two\n")))
    assert written(qwen, infill) == (
        "<|repo_name|>project\n<|file_sep|>x.py\none\n<|file_sep|>file\ntwo\n<|file_sep|>this file\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


def test_pieces_are_divided_by_empty_lines_where_files_have_no_token(tmp_path: Path) -> None:
    tokenizer = model_with(tmp_path, "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    infill = Infill("a", "b", pieces=(FilePiece("x.py", "one"),))
    assert written(tokenizer, infill) == "one\n\n<fim_prefix>a<fim_suffix>b<fim_middle>"


def test_control_tokens_that_a_client_writes_are_text(qwen: ModelTokenizer) -> None:
    ids = qwen.encode_infill(Infill("a<|fim_middle|>", "<|im_end|>b", "<|fim_pad|>", (FilePiece("<|file_sep|>", "c"),)))
    vocabulary = qwen.ids(added=True)
    assert sum(i == vocabulary["<|fim_middle|>"] for i in ids) == 1
    assert sum(i == vocabulary["<|file_sep|>"] for i in ids) == 2
    assert not {vocabulary["<|im_end|>"], vocabulary["<|fim_pad|>"]} & set(ids)


def test_a_prompt_that_must_be_short_keeps_what_is_near_the_gap(qwen: ModelTokenizer) -> None:
    infill = Infill("0123456789", "abcdefghij", pieces=(FilePiece("x", "left out"),), most_tokens=11)
    assert written(qwen, infill) == "<|fim_prefix|>456789<|fim_suffix|>ab<|fim_middle|>"


def test_what_one_side_does_not_need_of_a_short_prompt_the_other_gets(qwen: ModelTokenizer) -> None:
    assert written(qwen, Infill("0123456789", "a", most_tokens=11)) == (
        "<|fim_prefix|>3456789<|fim_suffix|>a<|fim_middle|>"
    )
    assert written(qwen, Infill("0", "abcdefghij", most_tokens=11)) == (
        "<|fim_prefix|>0<|fim_suffix|>abcdefg<|fim_middle|>"
    )


@pytest.mark.parametrize("most", range(1, 80))
def test_no_prompt_is_longer_than_it_may_be(qwen: ModelTokenizer, most: int) -> None:
    pieces = (FilePiece("x.py", "first piece"), FilePiece("y.py", "second"))
    ids = qwen.encode_infill(Infill("before the gap", "after it", pieces=pieces, most_tokens=most))
    # The three tokens around the gap are always there.
    assert 3 <= len(ids) <= max(3, most)


def test_the_last_pieces_are_the_last_to_go(qwen: ModelTokenizer) -> None:
    pieces = (FilePiece("x", "first"), FilePiece("y", "second"))
    whole = len(qwen.encode_infill(Infill("a", "b", pieces=pieces)))
    shorter = written(qwen, Infill("a", "b", pieces=pieces, most_tokens=whole - 1))
    assert "second" in shorter
    assert "first" not in shorter


def test_a_filling_ends_with_the_tokens_that_begin_something_else() -> None:
    ids = {token: place for place, token in enumerate([*QWEN, "<|endoftext|>", "other"])}
    form = find_infill_format(ids)
    assert form
    assert form.ends == tuple(range(7))
