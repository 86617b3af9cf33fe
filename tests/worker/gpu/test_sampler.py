"""Choosing without waiting: what the CPU's sampler chooses, whatever the rows beside a row, and nothing looked at
before it has been copied back."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.triton.sampling import draw as draw_module
from octavo.kernels.triton.sampling import stats
from octavo.testbed.tiny_model import END_TOKEN_ID, VOCAB_SIZE, write_byte_model
from octavo.testing.depth import deep
from octavo.testing.oracles.choosers import beam, chooser, choosing_sequence
from octavo.testing.oracles.plain_sampler import plain_choice, plain_logprobs
from octavo.testing.small.constraints import DIGITS, WORDS, compiled
from octavo.wire.sampling import Logprobs
from octavo.wire.steps import Candidates, FailureReason
from octavo.worker.gpu import logprobs
from octavo.worker.gpu.logprobs import device_token_logprobs
from octavo.worker.gpu.sampler import launch, launch_broken, warm_up
from octavo.worker.gpu.transfer import download, mark
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks, masks_of
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sampling.logprobs import NotFiniteError, token_logprobs
from octavo.worker.sampling.row_reductions import ranked
from octavo.worker.sampling.sampler import Choices, broken, choose
from octavo.worker.sequences import Chooser

interpreter = pytest.importorskip("triton.runtime.interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Rows are short, and the interpreter takes longer for each operation than for what is in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "_TILE", 256)
        patch.setattr(draw_module, "_FEW", 64)
        patch.setattr(draw_module, "_CHUNK", 256)
        patch.setattr(draw_module, "_WAYS", 128)
        patch.setattr(draw_module, "SPANS", 16)
        yield


def chosen(logits: Tensor, rows: list[Chooser], masks: Masks = NO_MASKS) -> Choices:
    launched = launch(logits.to(DEVICE), rows, masks)
    mark(DEVICE).wait()
    assert torch.equal(launched.tokens.cpu(), launched.token_ids)
    return launched.choices()


def random_logits(rows: int, vocab_size: int, seed: int = 3) -> Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def assert_alike(found: Logprobs | None, expected: Logprobs | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert (found.rank, found.top_token_ids) == (expected.rank, expected.top_token_ids)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


def assert_same(found: Choices, expected: Choices) -> None:
    assert found.failed == expected.failed
    assert [(each.sequence_id, each.token_id) for each in found.sampled] == [
        (each.sequence_id, each.token_id) for each in expected.sampled
    ]
    for token, other in zip(found.sampled, expected.sampled, strict=True):
        assert_alike(token.logprobs, other.logprobs)
    for candidates, others in zip(found.candidates, expected.candidates, strict=True):
        assert_candidates(candidates, others)


def assert_candidates(found: Candidates, expected: Candidates) -> None:
    assert (found.sequence_id, found.token_ids) == (expected.sequence_id, expected.token_ids)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"logprobs": 7},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.95},
    {"min_p": 0.01, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 3},
    {"temperature": 3.0, "presence_penalty": 2.0, "frequency_penalty": 1.0, "logprobs": 0},
    {"allowed_token_ids": list(range(100, 300)), "top_k": 20},
    {"banned_token_ids": list(range(200)), "min_p": 0.1, "logprobs": 20},
    {"logit_bias": [(5, 9.0), (6, 9.0)], "min_tokens": 30, "stop_token_ids": [5, 77], "top_p": 0.6},
]


def mixed_rows() -> list[Chooser]:
    rows = []
    for row in range(len(KINDS) + 2):
        tokens: dict[str, Any] = {"prompt": [row, 3, 4], "generated": [row % 7, 3, 3] * (row % 5), "seed": row}
        if row < len(KINDS):
            rows.append(chooser(**tokens, **KINDS[row], index=row % 3))
        else:
            rows.append(beam(1 + row % 4, **tokens, stop_token_ids=[1, 2], frequency_penalty=0.5 * (row % 2)))
    return rows


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from((0.0, 0.3, 1.5)),
        "top_k": st.sampled_from((1, 2, 40, 200)),
        "top_p": st.sampled_from((0.001, 0.3, 0.9, 0.9999)),
        "min_p": st.sampled_from((0.001, 0.05, 0.5)),
        "repetition_penalty": st.sampled_from((0.5, 1.2)),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.lists(st.tuples(st.integers(0, 49), st.floats(-9, 9)), unique_by=lambda pair: pair[0]),
        "allowed_token_ids": st.lists(st.integers(0, 49), min_size=1, unique=True),
        "banned_token_ids": st.lists(st.integers(0, 49), unique=True),
        "logprobs": st.sampled_from((0, 1, 20)),
        "stop_token_ids": st.lists(st.integers(0, 49), unique=True),
        "min_tokens": st.sampled_from((1, 8)),
    },
)
ROW = st.tuples(SAMPLING, st.integers(0, 4), st.integers(0, 2**64 - 1), st.lists(st.integers(0, 49), max_size=6))


# In the interpreter shrinking takes minutes.
@settings(max_examples=15, phases=(Phase.explicit, Phase.generate))
@given(st.integers(50, 600), st.integers(0, 99), st.lists(ROW, min_size=1, max_size=5))
def test_every_row_chooses_what_it_does_on_a_cpu_and_by_sorting(
    size: int, seed: int, asked: list[tuple[dict[str, Any], int, int, list[int]]]
) -> None:
    logits = random_logits(len(asked), size, seed) * (1 + seed % 3)
    rows = [
        chooser(prompt=[1, 2], generated=generated, seed=key, **params)
        if width == 0 or params.get("allowed_token_ids")
        else beam(width, prompt=[1, 2], generated=generated, seed=key, **params)
        for params, width, key, generated in asked
    ]
    for row, each in enumerate(rows):
        each.sequence.sequence_id = row
    found = chosen(logits, rows)
    assert_same(found, choose(logits, rows))
    for token in found.sampled:
        values, each = logits[token.sequence_id].numpy(), rows[token.sequence_id]
        assert token.token_id == plain_choice(values, each.sequence)
        if each.sampling.logprobs is not None:
            assert_alike(token.logprobs, plain_logprobs(values, token.token_id, each.sampling.logprobs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_chooses_the_same_to_the_last_bit_alone_as_in_a_batch(dtype: torch.dtype) -> None:
    rows = mixed_rows()
    logits = random_logits(len(rows), 400).to(dtype)
    before = logits.clone()
    together = chosen(logits, rows)
    alone = [chosen(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    assert together.sampled == [token for choices in alone for token in choices.sampled]
    assert together.candidates == [found for choices in alone for found in choices.candidates]
    assert (len(together.sampled), len(together.candidates)) == (len(KINDS), 2)
    assert torch.equal(logits, before)
    assert_same(together, choose(logits, rows))


def test_many_rows_may_want_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_ROWS", 3)
    logits = random_logits(8, 50)
    rows = [chooser(temperature=0.0, seed=row, logprobs=row % 3) for row in range(8)]
    assert_same(chosen(logits, rows), choose(logits, rows))


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_rows_that_are_not_finite_fail_alone(bad: float) -> None:
    logits = random_logits(5, 300)
    good = [chooser(seed=1, logprobs=3), chooser(seed=2, top_k=4, banned_token_ids=[3])]
    bad_rows = [chooser(seed=7, logprobs=2), beam(2, seed=8), chooser(seed=9, banned_token_ids=[17], top_p=0.5)]
    healthy = chosen(logits[:2], good)
    logits[2:, slice(None) if bad == -inf else 17] = bad
    choices = chosen(logits, good + bad_rows)
    assert [(each.sequence_id, each.reason) for each in choices.failed] == [
        (seed, FailureReason.NOT_FINITE) for seed in (7, 8, 9)
    ]
    assert (choices.sampled, choices.candidates) == (healthy.sampled, [])


@pytest.mark.parametrize("drawing", [{"temperature": 0.0}, {"logprobs": 2}, {"top_k": 3, "min_p": 0.1}])
@pytest.mark.parametrize(
    "params", [{"banned_token_ids": list(range(8))}, {"allowed_token_ids": [2], "stop_token_ids": [2], "min_tokens": 1}]
)
def test_a_sequence_that_excludes_every_token_fails_alone(params: dict[str, Any], drawing: dict[str, Any]) -> None:
    logits = random_logits(4, 8)
    rows = [
        chooser(seed=1, repetition_penalty=1.2),
        chooser(seed=8, **params, **drawing),
        beam(2, seed=9, **params),
        beam(1, seed=2, banned_token_ids=[3]),
    ]
    choices = chosen(logits, rows)
    assert [(each.sequence_id, each.reason) for each in choices.failed] == [
        (8, FailureReason.NO_TOKEN_LEFT),
        (9, FailureReason.NO_TOKEN_LEFT),
    ]
    assert_same(choices, choose(logits, rows))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return Grammars(directory)


def constrained_rows(grammars: Grammars) -> list[Chooser]:
    """Some that go on, some that must end, some that cannot, between others without a grammar."""
    digits, words = compiled(DIGITS, grammars.vocabulary), compiled(WORDS, grammars.vocabulary)
    whole = grammars.vocabulary.tokenize_str("yes")
    return [
        chooser(seed=1, top_k=9),
        chooser(seed=2, grammar=digits, logprobs=3),
        chooser(seed=3, grammar=digits, temperature=0.0, repetition_penalty=1.5, generated=whole[:0]),
        beam(2, seed=4, grammar=words, stop_token_ids=[END_TOKEN_ID]),
        beam(2, seed=5),
        chooser(seed=6, grammar=words, generated=whole, top_p=0.5),
        chooser(seed=7, grammar=words, generated=whole, stop_token_ids=[END_TOKEN_ID], min_tokens=9),
        beam(1, seed=8, grammar=digits, generated=whole),
        chooser(seed=9, grammar="start: !", logit_bias=[(3, 50.0)]),
        chooser(seed=10, banned_token_ids=[4], logprobs=1),
    ]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 300, 200])
def test_grammars_leave_what_they_do_on_a_cpu(grammars: Grammars, vocab_size: int) -> None:
    rows = constrained_rows(grammars)
    masks, logits = masks_of(rows, grammars), random_logits(len(rows), vocab_size)
    found, expected = chosen(logits, rows, masks), choose(logits, rows, masks)
    assert_same(found, expected)
    assert [(each.sequence_id, each.reason) for each in found.failed][-2:] == [
        (8, FailureReason.BAD_GRAMMAR),
        (9, FailureReason.BAD_GRAMMAR),
    ]
    assert {each.sequence_id for each in found.sampled} >= {1, 2, 3, 10}
    constrained = rows[1:4]
    alone = chosen(logits[1:4], constrained, masks_of(constrained, grammars))
    ids = {each.sequence_id for each in constrained}
    assert alone.sampled == [each for each in found.sampled if each.sequence_id in ids]
    assert alone.candidates == [each for each in found.candidates if each.sequence_id in ids]


def test_nothing_waits_where_there_are_grammars(
    grammars: Grammars, strict_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = constrained_rows(grammars)
    logits = random_logits(len(rows), VOCAB_SIZE).to(DEVICE)
    with never_waiting(monkeypatch):
        masks = masks_of(rows, grammars)
        launched = launch(logits, rows, masks)
    mark(DEVICE).wait()
    assert len(launched.choices().sampled) == 5


def test_no_rows_no_choices() -> None:
    choices = chosen(torch.empty(0, 100), [])
    assert (choices.sampled, choices.candidates, choices.failed) == ([], [], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_can_be_compiled_beforehand_and_leaves_logits_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 60, dtype=dtype, device=DEVICE)
    warm_up(logits)
    assert not logits.any()


def test_every_row_needs_its_sequence() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 sequences"):
        launch(torch.zeros(2, 8), [chooser()])


def test_hidden_states_that_are_not_finite_break_their_sequence() -> None:
    hidden = torch.zeros(4, 5)
    hidden[1, 4], hidden[3, 0] = nan, -inf
    sequences = [choosing_sequence(seed=row) for row in range(4)]
    launched = launch_broken(hidden.to(DEVICE), sequences)
    mark(DEVICE).wait()
    assert launched.failures() == broken(hidden, sequences)


@pytest.mark.parametrize("size", [1, *deep(2, 60), 255, 5000])
@pytest.mark.parametrize("count", [1, *deep(3), 40, *deep(200)])
def test_the_largest_are_ranked_as_sorting_ranks_them(size: int, count: int) -> None:
    kinds = np.array([-inf, -3e38, -2.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38], dtype=np.float32)
    values = np.random.default_rng(size).choice(kinds, size=(6, size))
    found, tokens = ranked(torch.from_numpy(values).to(DEVICE), count)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    assert tokens.tolist() == order.tolist()
    assert torch.equal(found.cpu(), torch.from_numpy(np.take_along_axis(values, order, axis=-1)))


def test_logprobs_of_given_tokens_are_those_of_the_cpu() -> None:
    logits = random_logits(12, 300)
    token_ids = [row * 24 for row in range(12)]
    found = device_token_logprobs(logits.to(DEVICE), token_ids, 5)
    for one, other in zip(found, token_logprobs(logits, token_ids, 5), strict=True):
        assert_alike(one, other)
    logits[3, 8] = nan
    with pytest.raises(NotFiniteError, match="not finite"):
        device_token_logprobs(logits.to(DEVICE), token_ids, 5)


def test_what_was_copied_stays_when_the_device_goes_on() -> None:
    values = torch.arange(5, device=DEVICE)
    copied = download(values)
    values += 1
    mark(DEVICE).wait()
    assert copied.tolist() == [0, 1, 2, 3, 4]


class _Watch(TorchFunctionMode):
    """Fails on what makes the host wait for values."""

    READING = frozenset(("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "equal"))
    ASKING = frozenset(("__bool__", "__int__", "__float__", "__index__", "__contains__"))
    watching = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        assert not (self.watching and name in self.READING | self.ASKING), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same, for what comes of other operations: a mask as an index is one."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique")
    watching = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        assert not (self.watching and any(f"aten.{each}." in name for each in self.WAITING)), f"{name} waits"
        if self.watching and name.startswith(("aten.index.", "aten.index_put")):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), f"{name} by a mask waits"
        return func(*args, **(kwargs or {}))


@contextmanager
def never_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    execute = interpreter.GridExecutor.__call__
    with _Watch() as watch, _Kernels() as kernels:  # type: ignore[no-untyped-call]

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            """The interpreter reads tensors, as a GPU would."""
            watch.watching = kernels.watching = False
            execute(*args, **kwargs)
            watch.watching = kernels.watching = True

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", unwatched)
        yield


@pytest.fixture
def strict_device() -> Iterator[None]:
    """A GPU tells by itself."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def on_device() -> Tensor:
    """Logits for `mixed_rows`."""
    return random_logits(len(KINDS) + 2, 400).to(DEVICE)


def test_nothing_waits_between_launch_and_choices(
    on_device: Tensor, strict_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = mixed_rows()
    with never_waiting(monkeypatch):
        launched = launch(on_device, rows)
        launch_broken(on_device, [each.sequence for each in rows])
    mark(DEVICE).wait()
    assert len(launched.choices().sampled) == len(KINDS)


@pytest.mark.parametrize(
    "wait", [lambda t: t.item(), lambda t: t.tolist(), lambda t: bool(t), lambda t: t[t > 0], lambda t: t.nonzero()]
)
def test_what_waits_is_found(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, RuntimeError)), never_waiting(monkeypatch):
        wait(torch.ones(1, device=DEVICE))
