"""What a model thinks is set apart, counted and bounded, in every family's format and however the text is cut."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.frontend.answer_parsers.reasoning import Reasoning
from octavo.frontend.answer_parsers.reasoning_formats import REASONING_FORMATS, reasoning_format
from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.text.grammars import bare_grammar, grammar_of, load_vocabulary
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.runtime.models.grammar import compile_grammar
from octavo.runtime.options.common import REASONING_PARSER
from octavo.runtime.options.option import OneOf
from octavo.testbed.tiny_model import END_TOKEN_ID, write_byte_model

HARMONY = (
    "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)
CASES = [
    ("qwen3", "<think>\na </ b\n</think>\n\nHi. ", False, "a </ b", "Hi. "),
    ("deepseek_r1", "\na\n</think>Hi", True, "a", "Hi"),
    ("deepseek_r1", "Hi <think>", False, "", "Hi <think>"),
    ("deepseek_r1", "<think> never ends ", False, "never ends", ""),
    ("mistral", "[THINK]a[/THINK]Hi", False, "a", "Hi"),
    ("granite", "Here is my thought process: a\n\nHere is my response: b", False, "a", "b"),
    ("ernie45", "<think>a</think> <response> b </c> </response> ", False, "a", "b </c>"),
    ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb</answer>", False, "a", "b"),
    ("cohere", "<|START_THINKING|>a<|START_ACTION|>[{}]", False, "a", "<|START_ACTION|>[{}]"),
    ("openai_gptoss", HARMONY, False, "a < b", 'Well.<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'),
    ("openai_gptoss", "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", False, "a", "b"),
    ("openai_gptoss", "Hello.", False, "", "Hello."),
]
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'


def split(name: str, pieces: Sequence[str], *, is_open: bool) -> tuple[str, str]:
    parser = REASONING_FORMATS[name].parser(is_open=is_open)
    found = [*map(parser.feed, pieces), parser.finish()]
    return "".join(each.reasoning for each in found), "".join(each.text for each in found)


@pytest.mark.parametrize(("name", "text", "is_open", "reasoning", "content"), CASES)
def test_reasoning_is_set_apart_however_the_text_is_cut(
    name: str, text: str, is_open: bool, reasoning: str, content: str
) -> None:
    assert split(name, [text], is_open=is_open) == (reasoning, content)
    assert split(name, list(text), is_open=is_open) == (reasoning, content)
    for seed in range(60):
        ends = sorted(random.Random(seed).randrange(len(text) + 1) for _ in range(5))
        pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert split(name, pieces, is_open=is_open) == (reasoning, content)


def test_tokens_are_counted_with_the_markers() -> None:
    parser = REASONING_FORMATS["qwen3"].parser()
    for text in ("<thi", "nk>", "a", "b", "</think>", "\n", "Hi"):
        parser.feed(text)
    assert parser.num_tokens == 5
    plain = REASONING_FORMATS["qwen3"].parser()
    for text in ("<thi", "s is it", "."):
        plain.feed(text)
    assert plain.num_tokens == 0
    harmony = REASONING_FORMATS["openai_gptoss"].parser()
    for text in ("<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant"):
        harmony.feed(text)
    for text in ("<|channel|>", "final", "<|message|>", "b"):
        harmony.feed(text)
    assert harmony.num_tokens == 5


def test_a_prompt_may_have_begun_or_ended_the_reasoning() -> None:
    form = REASONING_FORMATS["qwen3"]
    assert form.after("assistant\n<think>\n") == Reasoning(form, is_open=True)
    assert form.after("assistant\n<think>\n\n</think>\n\n") == Reasoning(form, is_over=True)
    assert form.after("<think> asked by a user <|im_end|>assistant\n") == Reasoning(form)
    assert form.after("", "<think>so far") == Reasoning(form, is_open=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_byte_model(tmp_path, markers=["<think>", "</think>"])
    return tmp_path


@pytest.mark.parametrize("is_constrained", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_the_budget_forces_the_end_after_which_the_constraint_begins(
    model: Path, is_constrained: bool, is_open: bool
) -> None:
    tokenizer, vocabulary = ModelTokenizer(model), load_vocabulary(model)
    around = Reasoning(REASONING_FORMATS["qwen3"], is_open=is_open).grammar(
        tokenizer.added_token_id, ends={END_TOKEN_ID}, max_tokens=3, is_constrained=is_constrained
    )
    schema = Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA)
    grammar = grammar_of(schema, vocabulary, around) if is_constrained else bare_grammar(around, vocabulary)
    matcher = compile_grammar(grammar, vocabulary)
    opening, closing = ([] if is_open else tokenizer.encode("<think>")), tokenizer.encode("</think>")
    thought = [*opening, *tokenizer.encode("abc")]
    assert matcher.consume_tokens(thought)
    mask = matcher.compute_bitmask()
    assert [token_id for token_id in range(260) if mask[token_id // 8] >> token_id % 8 & 1] == closing
    # A draft that is given back leaves the count as it was; a copy follows alone, as a fork's does.
    fork = matcher.deep_copy()
    assert matcher.try_consume_tokens(closing) == 1
    assert matcher.rollback(1)
    assert not matcher.try_consume_tokens(tokenizer.encode("d"))
    assert fork.consume_tokens([*closing, *tokenizer.encode('{"a":1}')])
    assert fork.is_accepting()
    wrong = matcher.deep_copy()
    taken = wrong.try_consume_tokens([*closing, *tokenizer.encode("no")])
    assert taken == (1 if is_constrained else 3)


def test_a_budget_without_tokens_around_the_reasoning_is_refused() -> None:
    reasoning = Reasoning(REASONING_FORMATS["granite"])
    with pytest.raises(ValueError, match="its end cannot be forced"):
        reasoning.grammar(lambda text: None, ends={1}, max_tokens=5, is_constrained=False)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>') }}", "qwen3"),
        ("<|channel|>analysis<|message|>", "openai_gptoss"),
        ("[THINK]", "mistral"),
        ("Here is my thought process:", "granite"),
        ("<think></think><response></response>", "ernie45"),
    ],
)
def test_the_format_is_what_the_template_shows(template: str, name: str) -> None:
    assert reasoning_format("auto", template, lambda text: False) == REASONING_FORMATS[name]
    assert reasoning_format("none", template, lambda text: False) is None


def test_tokens_show_a_format_too() -> None:
    assert reasoning_format("auto", "", lambda text: "THINK]" in text) == REASONING_FORMATS["mistral"]
    assert reasoning_format("auto", "{{ messages }}", lambda text: False) is None


def test_the_option_names_every_format() -> None:
    assert isinstance(REASONING_PARSER.values, OneOf)
    assert set(REASONING_PARSER.values.words) == {"auto", "none", *REASONING_FORMATS}
