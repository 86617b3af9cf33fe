"""Prompts by FlashInfer, which a fake with its recorded contract computes; and what stays with Triton."""

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import choice, flashinfer
from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.choice import BackendUnavailable, choose_attention
from octavo.kernels.flashinfer import FlashInferAttention
from octavo.kernels.reference import paged_attention
from octavo.kernels.triton.attention import TritonAttention, TritonStep
from octavo.kernels.triton.launch import NO_PROMPTS
from octavo.testing.fakes import flashinfer as fake
from octavo.testing.fakes.flashinfer import BatchPrefillWithPagedKVCacheWrapper as Wrapper

NUM_BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 6, 2, 64
SHAPE = CacheShape(BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16)
SCALE = 0.21


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, load = importlib.util.find_spec, importlib.import_module
    monkeypatch.setattr(
        flashinfer,
        "importlib",
        SimpleNamespace(
            util=SimpleNamespace(find_spec=lambda name: name == "flashinfer" or found(name)),
            import_module=lambda name: fake.Module if name == "flashinfer" else load(name),
        ),
    )
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 1 << 10)


def caches(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer of two: blocks are contiguous across layers, heads in a block."""
    chance = torch.Generator().manual_seed(0)
    blocks = torch.randn(NUM_BLOCKS, 2, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=chance).to(device, dtype)
    keys, values = blocks[:, 1].unbind(1)
    return keys.transpose(1, 2), values.transpose(1, 2)


def batch(lengths: Sequence[tuple[int, int]], window: int = 0) -> GroupBatch:
    """Of sequences with so many tokens in the cache and in the step."""
    width = max(-(-context // BLOCK_SIZE) for context, _ in lengths)
    ids = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))
    tables = torch.full((len(lengths), width), -7)
    used = 0
    for row, (context, _) in enumerate(lengths):
        count = -(-context // BLOCK_SIZE)
        tables[row, :count] = ids[used : used + count]
        used += count
    tokens = sum(count for _, count in lengths)
    slots = torch.zeros(tokens, dtype=torch.int64)
    return GroupBatch(slots, tables, [context for context, _ in lengths], [count for _, count in lengths], window)


def queries(tokens: int, device: torch.device) -> Tensor:
    # As they are cut out of queries, keys and values.
    chance = torch.Generator().manual_seed(2)
    return torch.randn(tokens, HEADS + 4, HEAD_DIM, generator=chance).to(device, torch.bfloat16)[:, :HEADS]


def counted(attend: Any) -> tuple[Tensor, int, int]:
    """What it gives, and how many plans and runs it took."""
    plans, runs = Wrapper.plans, Wrapper.runs
    return attend(), Wrapper.plans - plans, Wrapper.runs - runs


def assert_close(found: Tensor, query: Tensor, keys: Tensor, values: Tensor, given: GroupBatch, **special: Any) -> None:
    wanted = paged_attention(
        query.float(), keys.float(), values.float(), given.block_tables, given.context_lens, given.query_lens, SCALE,
        **special,
    )  # fmt: skip
    torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "lengths",
    [
        [(5, 5)],
        [(12, 12), (8, 3), (1, 1)],
        [(9, 1), (4, 1), (11, 6), (16, 16), (7, 2)],
    ],
)
def test_prompts_are_flashinfers_and_decodes_are_tritons(lengths: list[tuple[int, int]], device: torch.device) -> None:
    lengths = sorted(lengths, key=lambda length: length[1] > 1)
    keys, values = caches(device)
    assert not keys.is_contiguous()
    attention, given = FlashInferAttention(SHAPE, device), batch(lengths)
    step, query = attention.step(given), queries(sum(count for _, count in lengths), device)
    found, plans, runs = counted(lambda: attention.attend(query, keys, values, step, SCALE))
    assert (plans, runs) == (1, 1)
    assert_close(found, query, keys, values, given)
    # Another layer of the step.
    _, plans, runs = counted(lambda: attention.attend(query, values, keys, step, SCALE))
    assert (plans, runs) == (0, 1)


def test_plans_are_made_anew_for_each_step_and_wrappers_are_not(device: torch.device) -> None:
    keys, values = caches(device)
    attention, wrappers = FlashInferAttention(SHAPE, device), set[int]()
    for count in range(2, 14):
        given = batch([(count, count)])
        query = queries(count, device)
        step = attention.step(given)
        found, plans, _ = counted(lambda: attention.attend(query, keys, values, step, SCALE))  # noqa: B023
        assert plans == 1
        assert_close(found, query, keys, values, given)
        wrappers.update(id(plan.wrapper) for plan in attention._plans)
    assert len(wrappers) == len(attention._plans) == 8


def lengths_unknown(step: TritonStep) -> TritonStep:
    """As in steps whose lengths only the device knows."""
    return replace(step, prompts=NO_PROMPTS)


@pytest.mark.parametrize(
    ("lengths", "window", "special"),
    [
        ([(9, 1), (4, 1)], 0, {}),
        ([(9, 4)], 3, {}),
        ([(9, 4)], 0, {"softcap": 5.0}),
        ([(9, 4)], 0, {"sinks": torch.linspace(-1, 1, HEADS)}),
        ([(9, 4)], 0, {"alibi_slopes": torch.linspace(0.1, 1, HEADS)}),
    ],
)
def test_what_flashinfer_does_not_take_stays_with_triton(
    lengths: list[tuple[int, int]], window: int, special: dict[str, Any], device: torch.device
) -> None:
    keys, values = caches(device)
    attention, given = FlashInferAttention(SHAPE, device), batch(lengths, window)
    query = queries(sum(count for _, count in lengths), device)
    special = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in special.items()}
    step = attention.step(given)
    found, plans, runs = counted(lambda: attention.attend(query, keys, values, step, SCALE, **special))
    assert (plans, runs) == (0, 0)
    expected = TritonAttention(SHAPE, device).attend(query, keys, values, step, SCALE, **special)
    assert torch.equal(found, expected)


def test_lengths_that_only_the_device_knows_stay_with_triton(device: torch.device) -> None:
    keys, values = caches(device)
    attention, given, query = FlashInferAttention(SHAPE, device), batch([(9, 4)]), queries(4, device)
    step = lengths_unknown(attention.step(given))
    found, _, runs = counted(lambda: attention.attend(query, keys, values, step, SCALE))
    assert runs == 0
    assert_close(found, query, keys, values, given)


def test_writes_are_tritons(device: torch.device) -> None:
    attention = FlashInferAttention(SHAPE, device)
    keys, values = (each.clone() for each in caches(device))
    key, value = torch.randn(2, 1, KV_HEADS, HEAD_DIM, device=device).bfloat16()
    step = replace(attention.step(batch([(1, 1)])), slot_mapping=torch.tensor([9], device=device))
    attention.write(key, value, keys, values, step)
    assert torch.equal(keys[2, 1], key[0])
    assert torch.equal(values[2, 1], value[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 96}, "heads of 96: FlashInfer takes 64, 128, 256"),
        ({"dtype": torch.float32}, "keys and values of torch.float32"),
        ({"dtype": torch.float8_e4m3fn}, "keys and values of torch.float8_e4m3fn"),
    ],
)
def test_caches_that_it_does_not_take_are_refused(changes: dict[str, Any], reason: str, device: torch.device) -> None:
    shape = replace(SHAPE, **changes)
    with pytest.raises(ValueError, match=reason):
        FlashInferAttention(shape, device)
    gpu = torch.device("cuda")
    with pytest.raises(BackendUnavailable, match=reason):
        choose_attention(shape, gpu, backend="flashinfer")


class TestChoice:
    """On a GPU, whose part a CPU has."""

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        made = choice._choose_gpu_attention
        monkeypatch.setattr(
            choice,
            "_choose_gpu_attention",
            lambda shape, wanted, fallback, **options: made(shape, device, fallback, **options),
        )
        monkeypatch.setattr(choice, "TorchAttention", lambda shape, wanted: None)

    def test_flashinfer_is_taken_where_it_works(self) -> None:
        for backend in ("auto", "flashinfer"):
            found = choose_attention(SHAPE, torch.device("cuda"), backend=backend)
            assert isinstance(found.attention, FlashInferAttention)
            assert (found.reason, found.prompts) == (None, "FlashInfer")
        found = choose_attention(SHAPE, torch.device("cuda"), backend="triton")
        assert isinstance(found.attention, TritonAttention)
        assert found.prompts is None

    def test_exact_numerics_are_tritons(self) -> None:
        assert isinstance(choose_attention(SHAPE, torch.device("cuda"), exact=True).attention, TritonAttention)
        with pytest.raises(BackendUnavailable, match="sums depend on what else is computed"):
            choose_attention(SHAPE, torch.device("cuda"), exact=True, backend="flashinfer")

    def test_one_that_does_not_work_is_told(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(self: object, *given: object, **named: object) -> None:
            raise RuntimeError("no nvcc was found")

        monkeypatch.setattr(Wrapper, "plan", broken)
        with caplog.at_level("INFO"):
            found = choose_attention(SHAPE, torch.device("cuda"))
        assert isinstance(found.attention, TritonAttention)
        assert "Triton computes prompts too: FlashInfer does not work here: RuntimeError: no nvcc" in caplog.text
        with pytest.raises(BackendUnavailable, match="no nvcc was found"):
            choose_attention(SHAPE, torch.device("cuda"), backend="flashinfer")


def test_it_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(flashinfer, "importlib", missing)
    assert "FlashInfer is not installed; pip install" in (flashinfer.obstacle(SHAPE) or "")


def test_the_recorded_contract_is_that_of_the_fake() -> None:
    assert_contract(Wrapper)


def test_the_recorded_contract_is_that_of_an_installed_flashinfer() -> None:
    installed: Any = pytest.importorskip("flashinfer")
    assert_contract(installed.BatchPrefillWithPagedKVCacheWrapper)


def assert_contract(wrapper: Any) -> None:
    for method, by_place, by_name in (
        (wrapper.__init__, fake.INIT, ()),
        (wrapper.plan, fake.PLAN, fake.PLAN_NAMED),
        (wrapper.run, fake.RUN, fake.RUN_NAMED),
    ):
        _, *names = inspect.signature(method).parameters
        assert tuple(names[: len(by_place)]) == by_place
        assert set(by_name) <= set(names)
