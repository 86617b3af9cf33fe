"""The whole system on the bundled model, in fp32, against transformers' own greedy generation, token by token."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.testbed.models import transformers_greedy
from octavo.testbed.stack import FinishedStream, Stack, token_request
from octavo.testing.depth import deep
from octavo.v1 import generation_pb2
from octavo.worker.loading.quantize_model import quantize_model
from octavo.worker.models.registry import quantizable

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUM_TOKENS = 16
_STORY = (
    "The lighthouse keeper counted 17 ships before dawn, wrote each name in the log, and put the kettle on. "
    "In 1923 there had been 42 of them; the sea, he thought, forgets nothing but us. "
)
# Of one token and of 1,100 (see `token_ids`), with digits, CJK, emoji, code, accents and line breaks.
TEXTS = [
    "The",
    "Once upon a time",
    "1 2 3 4 5 6 7 8 9",
    "The year 2024 minus 1999 is",
    "中文的句子：今天天气",
    "東京は日本の首都で、",
    "안녕하세요, 저는",
    "Emoji: 😀🎉👩‍👩‍👧‍👦 mean",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Ça été créé à l'époque où",
    "Q: What is the capital of France?\nA:",
    _STORY,
    _STORY * 4,
    _STORY * 30,
]
FEW = [TEXTS[0], TEXTS[1], TEXTS[4], TEXTS[7], TEXTS[11]]


@dataclass(frozen=True)
class Reference:
    """A prompt, from the beginning of `source`, and what transformers makes of it."""

    source: str
    prompt: list[int]
    token_ids: list[int]
    text: str


@pytest.fixture(scope="module", params=["few", *deep("all")])
def references(request: pytest.FixtureRequest, bundled_model: Path) -> list[Reference]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_model)
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    references = []
    for text in TEXTS if request.param == "all" else FEW:
        prompt = tokenizer(text).input_ids[:1100]
        token_ids = transformers_greedy(model, prompt, NUM_TOKENS)
        references.append(
            Reference(text, prompt, token_ids, str(tokenizer.decode(token_ids, skip_special_tokens=True)))
        )
    return references


def start(model: Path, directory: str, **environment: str) -> Stack:
    # One thread: a team of two collapses wherever another process wants a core for a moment.
    settings = {"OCTAVO_DTYPE": "float32", "OCTAVO_THREADS": "1", "OCTAVO_NUM_BLOCKS": "512", **environment}
    return Stack(model, Path(directory), settings)


@pytest.fixture(scope="module")
def stack(bundled_model: Path, references: list[Reference]) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory, start(bundled_model, directory) as stack:
        yield stack.start_all()


def requests(references: list[Reference]) -> list[generation_pb2.GenerateRequest]:
    return [token_request(reference.prompt, NUM_TOKENS) for reference in references]


def assert_equal(generations: list[FinishedStream], references: list[Reference]) -> None:
    for generation, reference in zip(generations, references, strict=True):
        assert generation.token_ids == reference.token_ids
        assert generation.text == reference.text
        assert generation.usage.prompt_tokens == len(reference.prompt)


@pytest.mark.parametrize("references", deep("all"), indirect=True)
def test_the_prompts_are_of_all_lengths(references: list[Reference]) -> None:
    lengths = [len(reference.prompt) for reference in references]
    assert (min(lengths), max(lengths)) == (1, 1100)


@pytest.mark.deep
def test_one_at_a_time_equals_transformers(stack: Stack, references: list[Reference]) -> None:
    assert_equal([stack.generate(request) for request in requests(references)], references)


def test_all_in_one_batch_equals_transformers(stack: Stack, references: list[Reference]) -> None:
    assert_equal(stack.generate_all(requests(references)), references)
    stack.wait_idle()


def test_a_prompt_found_in_the_prefix_cache_gives_the_same_tokens(stack: Stack, references: list[Reference]) -> None:
    longest = references[-1:]
    again = [stack.generate(request) for _ in range(2) for request in requests(longest)]
    assert_equal(again, longest * 2)
    # All but the block that holds the last token.
    assert again[1].usage.cached_prompt_tokens == (len(longest[0].prompt) - 1) // 16 * 16


def test_a_prompt_that_left_the_device_comes_back_from_cpu_memory_with_the_same_tokens(
    bundled_model: Path, references: list[Reference]
) -> None:
    longest = [reference for reference in references if 32 <= len(reference.prompt) <= 160][-1:]
    # Measured costs may say that moves do not pay.
    pool = {"OCTAVO_NUM_BLOCKS": "16", "OCTAVO_NUM_CPU_BLOCKS": "64", "OCTAVO_CALIBRATE": "false"}
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory, start(bundled_model, directory, **pool) as stack:
        stack.start_all()
        assert_equal([stack.generate(request) for request in requests(longest)], longest)
        # Others take every block of the device.
        for first in (1000, 2000):
            stack.generate(token_request(list(range(first, first + 230)), NUM_TOKENS))
        again = [stack.generate(request) for request in requests(longest)]
        assert_equal(again, longest)
        assert again[0].usage.cached_prompt_tokens == (len(longest[0].prompt) - 1) // 16 * 16


@pytest.mark.deep
def test_without_the_prefix_cache_the_batch_equals_transformers_too(
    bundled_model: Path, references: list[Reference]
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        start(bundled_model, directory, OCTAVO_PREFIX_CACHE="false") as stack,
    ):
        stack.start_all()
        generations = stack.generate_all(requests(references[:13]))
        assert_equal(generations, references[:13])
        assert not any(generation.usage.cached_prompt_tokens for generation in generations)


def test_text_prompts_are_tokenized_as_transformers_does(stack: Stack, references: list[Reference]) -> None:
    for reference in references[:12]:
        tokens = stack.generation.Tokenize(generation_pb2.TokenizeRequest(text=reference.source), timeout=60)
        assert list(tokens.ids) == reference.prompt


@pytest.mark.deep
def test_a_tiny_block_pool_preempts_and_gives_the_same_tokens(bundled_model: Path, references: list[Reference]) -> None:
    """By swapping or by computing again, whichever the worker has measured to cost less."""
    small = [reference for reference in references if len(reference.prompt) <= 60]
    pool = {"OCTAVO_NUM_BLOCKS": "24", "OCTAVO_NUM_CPU_BLOCKS": "24", "OCTAVO_BLOCK_SIZE": "4"}
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        start(bundled_model, directory, OCTAVO_PREEMPTION="measured", **pool) as stack,
    ):
        stack.start_all()
        generations = stack.generate_all(requests(small))
        assert_equal(generations, small)
        assert sum(generation.usage.preemptions for generation in generations) > 0
        stack.wait_idle()


@pytest.mark.deep
def test_a_quantised_copy_guesses_and_changes_no_token(
    bundled_model: Path, references: list[Reference], tmp_path: Path
) -> None:
    quantize_model(bundled_model, tmp_path / "draft", "q8_0", *quantizable(bundled_model))
    settings = {"OCTAVO_DRAFT_MODEL": str(tmp_path / "draft"), "OCTAVO_SPECULATION": "4"}
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        start(bundled_model, directory, **settings) as stack,
    ):
        stack.start_all()
        generations = stack.generate_all(requests(references))
        assert_equal(generations, references)
        checked = sum(generation.usage.drafted_tokens for generation in generations)
        right = sum(generation.usage.accepted_tokens for generation in generations)
        print(f"{right} of {checked} guesses were right")
        assert 2 * right > checked > 0
        stack.wait_idle()


@pytest.mark.deep
def test_a_seeded_sample_is_the_same_alone_and_in_a_crowd(stack: Stack, references: list[Reference]) -> None:
    def sampled(seed: int) -> generation_pb2.GenerateRequest:
        request = token_request(references[1].prompt, NUM_TOKENS)
        request.sampling.CopyFrom(generation_pb2.SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=seed))
        return request

    alone = [stack.generate(sampled(seed)).token_ids for seed in range(3)]
    crowd = stack.generate_all([*(sampled(seed) for seed in range(3)), *requests(references)[:8]])
    assert [generation.token_ids for generation in crowd[:3]] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


@pytest.mark.deep
def test_beam_search_equals_transformers(stack: Stack, bundled_model: Path, references: list[Reference]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    requests = []
    for reference in references[1:5]:
        request = token_request(reference.prompt, 8)
        search = generation_pb2.BeamSearch(beam_width=4)
        request.sampling.CopyFrom(generation_pb2.SamplingParams(num_sequences=2, beam_search=search))
        requests.append(request)
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(stack.choices, requests))
    for reference, answer in zip(references[1:5], answers, strict=True):
        output = model.generate(
            torch.tensor([reference.prompt]),
            attention_mask=torch.ones(1, len(reference.prompt), dtype=torch.int64),
            max_new_tokens=8,
            num_beams=4,
            num_return_sequences=2,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.token_ids == output[:, len(reference.prompt) :].tolist()
    stack.wait_idle()


@pytest.mark.deep
def test_sequences_of_one_request_are_the_same_alone_and_in_a_crowd(stack: Stack, references: list[Reference]) -> None:
    request = token_request(references[1].prompt, NUM_TOKENS)
    request.sampling.CopyFrom(generation_pb2.SamplingParams(temperature=1.0, seed=5, num_sequences=4))
    alone = stack.choices(request)
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(stack.generate, other) for other in requests(references)[:8]]
        crowd = stack.choices(request)
        assert_equal([other.result() for other in others], references[:8])
    assert crowd.token_ids == alone.token_ids
    assert len({tuple(tokens) for tokens in alone.token_ids}) == 4
    stack.wait_idle()
