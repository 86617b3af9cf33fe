"""Masks of grammars: what a plain walk through every token finds, however the matcher got there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.runtime.models import grammar
from octavo.runtime.models.directory import ModelDirectoryError
from octavo.runtime.models.grammar import GrammarError, compile_grammar, load_vocabulary
from octavo.testbed.tiny_model import END_TOKEN_ID, START_TOKEN_ID, write_byte_model
from octavo.testing.oracles.choosers import choosing_sequence
from octavo.testing.small.constraints import DIGITS, WORDS, compiled, ids_of_mask, schema_constraint
from octavo.testing.small.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, id_of, metaspace_tokenizer
from octavo.worker.sampling import grammars as grammars_module
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sequences import WorkerSequence

CONSTRAINTS = {
    "regex": Constraint(ConstraintKind.REGEX, "(a|日)[b-d]{0,3} lo*"),
    "digits": DIGITS,
    "words": WORDS,
    "schema": schema_constraint({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    "object": Constraint(ConstraintKind.JSON_OBJECT),
    "grammar": Constraint(ConstraintKind.GRAMMAR, 'start: item ("," item)*\nitem: "x" | "(" item ")"'),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of models whose tokens are single bytes, pieces of characters, and words beside bytes."""
    root = tmp_path_factory.mktemp("models")
    write_byte_model(root / "bytes")
    for name, tokenizer in (("byte level", byte_level_tokenizer()), ("byte fallback", byte_fallback_tokenizer())):
        (root / name).mkdir()
        tokenizer.save(str(root / name / "tokenizer.json"))
        config = {"eos_token_id": [id_of(tokenizer, "<|end|>"), id_of(tokenizer, "<|start|>")]}
        (root / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def vocabularies(directories: dict[str, Path]) -> dict[str, LLTokenizer]:
    return {name: load_vocabulary(path) for name, path in directories.items()}


@pytest.fixture
def grammars(directories: dict[str, Path]) -> Grammars:
    return Grammars(directories["bytes"])


def sequence_with(
    constraint: Constraint, vocabulary: LLTokenizer, generated: list[int] | None = None
) -> WorkerSequence:
    return choosing_sequence(generated=generated, grammar=compiled(constraint, vocabulary))


def tokens_of(vocabulary: LLTokenizer, text: str) -> list[int]:
    return vocabulary.tokenize_str(text)


@settings(max_examples=60)
@given(
    st.sampled_from(["bytes", "byte level", "byte fallback"]),
    st.sampled_from(sorted(CONSTRAINTS)),
    st.lists(st.integers(0, 2**20), max_size=8),
)
def test_a_token_is_allowed_just_where_the_matcher_takes_it(
    directories: dict[str, Path], vocabularies: dict[str, LLTokenizer], model: str, kind: str, walk: list[int]
) -> None:
    """But where only one text can follow: of its tokens the one comes that the tokenizer would make of it."""
    vocabulary, grammars = vocabularies[model], Grammars(directories[model])
    sequence = sequence_with(CONSTRAINTS[kind], vocabulary)
    for number in [*walk, 0]:
        allowed = ids_of_mask(grammars.allowed(sequence))
        taken = ids_taken(grammars.progress(sequence).matcher, vocabulary)
        forced = grammars.progress(sequence).matcher.compute_ff_bytes()
        assert allowed == taken or (forced and allowed < taken)
        assert allowed, "a text can always go on or end"
        going_on = sorted(allowed - set(vocabulary.eos_tokens))
        if not going_on:
            break
        sequence.token_ids.append(going_on[number % len(going_on)])


@settings(max_examples=60)
@given(
    st.sampled_from(["bytes", "byte level", "byte fallback"]),
    st.sampled_from(sorted(CONSTRAINTS)),
    st.lists(st.integers(0, 2**20), max_size=6),
    st.lists(st.integers(0, 2**20), max_size=8),
)
def test_a_follower_comes_back_from_any_draft(
    directories: dict[str, Path],
    vocabularies: dict[str, LLTokenizer],
    model: str,
    kind: str,
    walk: list[int],
    guesses: list[int],
) -> None:
    """One that fits or not, that ends the text, or goes on after its end; and the masks on the way are those of a
    sequence that has these tokens."""
    vocabulary, grammars = vocabularies[model], Grammars(directories[model])
    sequence = sequence_with(CONSTRAINTS[kind], vocabulary)

    def fitting(after: WorkerSequence, number: int) -> int:
        allowed = sorted(ids_of_mask(grammars.allowed(after)))
        return number % vocabulary.vocab_size if number % 5 == 0 else allowed[number % len(allowed)]

    for number in walk:
        if (token := fitting(sequence, number)) in ids_of_mask(grammars.allowed(sequence)) - set(vocabulary.eos_tokens):
            sequence.token_ids.append(token)
    before, ahead = grammars.allowed(sequence), sequence.fork(2, 0)
    draft: list[int] = []
    for number in guesses:
        token = fitting(ahead, number)
        fits = token in ids_taken(grammars.progress(ahead).matcher, vocabulary)
        has_ended = grammars.progress(ahead).matcher.is_stopped()
        draft.append(token)
        ahead.token_ids.append(token)
        if has_ended or not fits:
            with pytest.raises(GrammarError, match="drafted do not fit"):
                grammars.allowed_after(sequence, draft)
            break
        assert grammars.allowed_after(sequence, draft) == grammars.allowed(ahead)
        assert grammars.allowed(sequence) == before
    assert grammars.allowed(sequence) == before


def ids_taken(matcher: LLMatcher, vocabulary: LLTokenizer) -> set[int]:
    ends = set(vocabulary.eos_tokens)
    inside = set(range(vocabulary.vocab_size)) - ends
    taken = {token for token in inside if not matcher.is_stopped() and matcher.validate_tokens([token])}
    return taken | ends if matcher.is_accepting() else taken


def test_a_text_may_end_with_every_eos_token_where_the_grammar_lets_it(
    directories: dict[str, Path], vocabularies: dict[str, LLTokenizer]
) -> None:
    vocabulary, grammars = vocabularies["byte level"], Grammars(directories["byte level"])
    ends = set(vocabulary.eos_tokens)
    assert len(ends) == 2
    for text, may_end, must_end in [("", False, False), ("12", True, False), ("123456", True, True)]:
        allowed = ids_of_mask(grammars.allowed(sequence_with(DIGITS, vocabulary, tokens_of(vocabulary, text))))
        assert (ends <= allowed, allowed <= ends) == (may_end, must_end)


@pytest.mark.parametrize("constraint", [WORDS, DIGITS])
@pytest.mark.parametrize("stepwise", [True, False])
def test_after_the_end_there_is_only_the_end(grammars: Grammars, constraint: Constraint, stepwise: bool) -> None:
    """Where the next step was planned before the end was known, or the end does not count."""
    text = "no" if constraint is WORDS else "1"
    sequence = sequence_with(constraint, grammars.vocabulary, tokens_of(grammars.vocabulary, text))
    for _ in range(3):
        if stepwise:
            grammars.allowed(sequence)
        sequence.token_ids.append(END_TOKEN_ID)
    assert ids_of_mask(grammars.allowed(sequence)) == {END_TOKEN_ID}
    assert sequence.follower is not None
    assert not sequence.follower.matcher.is_error()


def test_control_tokens_are_never_a_part_of_a_text(grammars: Grammars) -> None:
    anything = Constraint(ConstraintKind.REGEX, r"(.|\n)*")
    assert START_TOKEN_ID not in ids_of_mask(grammars.allowed(sequence_with(anything, grammars.vocabulary)))


def test_a_matcher_catches_up_whatever_its_sequence_went_through(grammars: Grammars) -> None:
    constraint = CONSTRAINTS["schema"]
    tokens = tokens_of(grammars.vocabulary, '{"a": -12')
    stepwise = sequence_with(constraint, grammars.vocabulary)
    for count in range(len(tokens) + 1):
        stepwise.token_ids[stepwise.prompt_length :] = tokens[:count]
        expected = grammars.allowed(stepwise)
        assert grammars.allowed(sequence_with(constraint, grammars.vocabulary, tokens[:count])) == expected
        fork = stepwise.fork(99, 1)
        assert grammars.allowed(fork) == expected
        fork.token_ids.append(END_TOKEN_ID)
    assert grammars.allowed(stepwise) == expected


def test_choosing_with_a_grammar_takes_the_values_of_earlier_tokens(grammars: Grammars) -> None:
    assert sequence_with(DIGITS, grammars.vocabulary).reads_generated
    assert not choosing_sequence().reads_generated


def test_a_token_that_does_not_fit_is_an_error_without_the_text(grammars: Grammars) -> None:
    secret = tokens_of(grammars.vocabulary, "secret")
    with pytest.raises(GrammarError, match="no token can follow the 6 generated") as error:
        grammars.allowed(sequence_with(DIGITS, grammars.vocabulary, secret))
    assert "secret" not in str(error.value)


def test_a_grammar_that_does_not_compile_is_an_error_without_its_text(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="cannot compile it") as error:
        grammars.allowed(choosing_sequence(grammar="start: secret"))
    assert "secret" not in str(error.value)


@pytest.fixture
def compiled_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every grammar that is compiled, in order."""
    texts: list[str] = []

    def counting(text: str, vocabulary: LLTokenizer) -> LLMatcher:
        texts.append(text)
        return grammar.compile_grammar(text, vocabulary)

    monkeypatch.setattr(grammars_module, "compile_grammar", counting)
    return texts


def test_each_grammar_is_compiled_once_while_it_is_among_the_last(
    grammars: Grammars, compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "_MOST_COMPILED", 2)
    for letter in "abacac":
        grammars.allowed(choosing_sequence(grammar=f'start: "{letter}"'))
    assert [text[-2] for text in compiled_texts] == ["a", "b", "c"]
    grammars.allowed(choosing_sequence(grammar='start: "b"'))
    assert len(compiled_texts) == 4


def test_long_grammars_are_kept_only_while_there_is_memory_for_them(
    grammars: Grammars, compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = 'start: "' + "a" * 20_000 + '"'
    monkeypatch.setattr(grammars_module, "_MOST_BYTES", 2_000_000)
    for text in (long, 'start: "b"', long, 'start: "c"', long + "\n", long, 'start: "c"'):
        grammars.allowed(choosing_sequence(grammar=text))
    assert compiled_texts == [long, 'start: "b"', 'start: "c"', long + "\n", long, 'start: "c"']


def test_a_grammar_that_is_much_used_makes_place_for_others(
    grammars: Grammars, compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its sequences meet is kept with it."""
    texts = ['start: "a"', 'start: "b"']
    monkeypatch.setattr(grammars_module, "_MOST_BYTES", 1_000_000)
    for text in texts * 2:
        grammars.allowed(choosing_sequence(grammar=text))
    assert compiled_texts == texts
    busy = choosing_sequence(grammar=texts[0])
    for _ in range(400):
        grammars.allowed(busy)
    grammars.allowed(choosing_sequence(grammar=texts[1]))
    assert compiled_texts == texts
    grammars.allowed(choosing_sequence(grammar=texts[0]))
    assert compiled_texts == [*texts, texts[0]]
    assert grammars.allowed(busy)


def test_what_is_larger_than_the_memory_for_all_is_followed_all_the_same(
    grammars: Grammars, compiled_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "_MOST_BYTES", 0)
    assert [grammars.allowed(choosing_sequence(grammar='start: "a"')) for _ in range(2)]
    assert len(compiled_texts) == 2


def test_no_sequence_fails_for_what_others_made_of_a_grammar_that_they_share(
    directories: dict[str, Path], vocabularies: dict[str, LLTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All matchers of a grammar count the states of one lexer: many texts exhaust what each alone does not."""
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(max_lexer_states=120, verbose_errors=False))
    texts = [format(number, "012b").replace("0", "a").replace("1", "b") for number in range(0, 4096, 91)]
    constraint = Constraint(ConstraintKind.REGEX, "(a|b)*a(a|b){8}")
    vocabulary = vocabularies["bytes"]
    base = grammar.compile_grammar(compiled(constraint, vocabulary), vocabulary)
    shared = [base.deep_copy() for _ in texts]
    assert not all(each.consume_tokens(tokens_of(vocabulary, text)) for each, text in zip(shared, texts, strict=True))
    grammars = Grammars(directories["bytes"])
    for text in texts:
        assert grammars.allowed(sequence_with(constraint, vocabulary, tokens_of(vocabulary, text)))


@pytest.mark.parametrize("rule", ['s s | s s s | "a" | ""', '"a" s | s "a" | s "a" s | "a" | ""'])
def test_what_can_be_read_in_ever_more_ways_is_given_up_before_a_step_takes_long(grammars: Grammars, rule: str) -> None:
    """The time of a mask grows with the square of the ways in which its text can be read so far."""
    constraint = Constraint(ConstraintKind.GRAMMAR, f"start: s\ns: {rule}")
    sequence = sequence_with(constraint, grammars.vocabulary)
    sequence.token_ids += tokens_of(grammars.vocabulary, "a" * 30)
    grammars.allowed(sequence)
    sequence.token_ids += tokens_of(grammars.vocabulary, "a" * 120)
    with pytest.raises(GrammarError, match="no token can follow the 150 generated"):
        grammars.allowed(sequence)


def test_objects_may_have_a_hundred_optional_properties(grammars: Grammars) -> None:
    properties = {f"property{number}": {"type": "string"} for number in range(100)}
    text = json.dumps({"property7": "x", "property99": "y"})
    schema = schema_constraint({"type": "object", "properties": properties, "additionalProperties": False})
    sequence = sequence_with(schema, grammars.vocabulary)
    for token_id in tokens_of(grammars.vocabulary, text):
        assert token_id in ids_of_mask(grammars.allowed(sequence))
        sequence.token_ids.append(token_id)
    assert END_TOKEN_ID in ids_of_mask(grammars.allowed(sequence))


def test_a_long_chain_of_rules_does_not_overflow_the_stack(grammars: Grammars) -> None:
    chain = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(6000)), 'a6000: "x"'])
    assert ids_of_mask(grammars.allowed(choosing_sequence(grammar=chain))) == set(tokens_of(grammars.vocabulary, "x"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "tokenizer.json").unlink(), "does not tell the bytes of its tokens"),
        (lambda path: metaspace_tokenizer().save(str(path / "tokenizer.json")), "does not tell the bytes"),
        (lambda path: (path / "config.json").write_text("{}"), "names no eos_token_id"),
        (lambda path: (path / "config.json").write_text('{"eos_token_id": 4000}'), "out of range"),
        (lambda path: (path / "config.json").write_text('{"eos_token_id": "end"}'), "does not tell"),
        (lambda path: (path / "config.json").write_text('{"eos_token_id": [-1]}'), "does not tell"),
        (lambda path: (path / "config.json").write_text("["), "cannot be read as JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "no JSON object"),
    ],
)
def test_without_a_usable_vocabulary_only_grammars_fail(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    write_byte_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    damage(tmp_path)
    with pytest.raises(ModelDirectoryError, match=reason):
        load_vocabulary(tmp_path)
    grammars = Grammars(tmp_path)
    grammars.load()
    for _ in range(2):
        with pytest.raises(GrammarError, match="no vocabulary of its model"):
            grammars.allowed(choosing_sequence(grammar='start: "a"'))


def test_what_ends_a_text_is_what_the_generation_config_says_before_the_config(tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    assert load_vocabulary(tmp_path).eos_tokens == [END_TOKEN_ID]
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [3, 257, 3]}}', encoding="utf-8")
    assert sorted(load_vocabulary(tmp_path).eos_tokens) == [3, END_TOKEN_ID]


def test_equality_of_sequences_does_not_know_how_far_a_matcher_is(grammars: Grammars) -> None:
    sequence = sequence_with(DIGITS, grammars.vocabulary)
    before = replace(sequence)
    grammars.allowed(sequence)
    assert before == sequence


def test_tables_for_fast_masks_are_made_once_with_the_first_grammar_and_change_no_mask(
    bundled_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, grammars = load_vocabulary(bundled_model), Grammars(bundled_model)
    grammars.load()
    loaded = grammars.vocabulary
    with caplog.at_level("INFO"):
        for constraint, text in (
            (CONSTRAINTS["object"], '{"a b'),
            (CONSTRAINTS["object"], '{"a": [1, '),
            (schema_constraint({"type": "string", "maxLength": 20}), '"abc'),
            (Constraint(ConstraintKind.REGEX, "(.|\n)*END"), "what a"),
        ):
            sequence = sequence_with(constraint, plain, tokens_of(plain, text))
            matcher = compile_grammar(sequence.sampling.grammar, plain)
            for token in sequence.token_ids[sequence.prompt_length :]:
                matcher.consume_token(token)
            assert grammars.allowed(sequence) == matcher.compute_bitmask()[: grammars.mask_bytes]
            assert any(grammars.allowed(sequence))
    assert grammars.vocabulary is not loaded
    assert [each for each in caplog.messages if "tables of masks" in each] == [caplog.messages[0]]
