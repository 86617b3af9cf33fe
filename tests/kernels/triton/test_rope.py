"""Norms of heads, rotary embedding and the write to the cache in one launch, against the same one by one in torch."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.triton.layers.rope import rope_and_cache

EPS = 1e-6
MAX_POSITION = 50
BLOCK_SIZE, NUM_BLOCKS = 4, 6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A layer's heads, and one step's tokens with their slots."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    normed: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    slots: tuple[int, ...] = (9, 3, 20)
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True)
class Tensors:
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    angles: tuple[Tensor | None, Tensor | None]
    norms: tuple[Tensor | None, Tensor | None]
    caches: tuple[Tensor, Tensor]


def tensors(case: Case, device: torch.device) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    turns = random(MAX_POSITION, case.rotary_dim // 2)
    # Those of one layer of three, in blocks whose heads lie one after the other.
    pool = torch.full((NUM_BLOCKS, 3, 2, case.num_kv_heads, BLOCK_SIZE, case.head_dim), 7.0, device=device)
    layer = pool.to(case.cache_dtype or case.dtype)[:, 1].transpose(2, 3)
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    return Tensors(
        qkv=random(len(case.slots), width).to(case.dtype),
        positions=torch.randint(MAX_POSITION, (len(case.slots),), generator=generator).to(device),
        slots=torch.tensor(case.slots, dtype=torch.int64, device=device),
        angles=(turns.cos(), turns.sin()) if case.rotary_dim else (None, None),
        norms=(random(case.head_dim), random(case.head_dim)) if case.normed else (None, None),
        caches=(layer[:, 0], layer[:, 1]),
    )


def launch(case: Case, given: Tensors) -> Tensor:
    return rope_and_cache(
        given.qkv,
        given.positions,
        *given.angles,
        *given.norms,
        EPS,
        *given.caches,
        given.slots,
        case.num_heads,
        case.num_kv_heads,
        case.key_scale,
        case.value_scale,
    )


def turned(heads: Tensor, norm: Tensor | None, given: Tensors) -> Tensor:
    """[tokens, heads, head_dim] fp32."""
    heads = heads.float()
    if norm is not None:
        heads = F.rms_norm(heads, norm.shape, norm, EPS)
    cos, sin = (None if table is None else table[given.positions][:, None] for table in given.angles)
    if cos is None or sin is None:
        return heads
    first, second, rest = heads.tensor_split([cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (values / scale).clamp(-448, 448).to(dtype) if dtype == FP8 else values.to(dtype)


def assert_right(case: Case, device: torch.device) -> None:
    given = tensors(case, device)
    heads = given.qkv.view(len(case.slots), -1, case.head_dim)
    query, key, value = heads.tensor_split([case.num_heads, case.num_heads + case.num_kv_heads], dim=1)
    expected = [cache.clone() for cache in given.caches]
    for cache, rows, scale in (
        (expected[0], turned(key, given.norms[1], given), case.key_scale),
        (expected[1], value.float(), case.value_scale),
    ):
        for slot, row in zip(case.slots, rows, strict=True):
            if slot >= 0:
                cache[divmod(slot, BLOCK_SIZE)] = stored(row, scale, cache.dtype)
    found = launch(case, given)
    tolerance = TOLERANCE[case.dtype]
    wanted = turned(query, given.norms[0], given).to(case.dtype)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    assert found.is_contiguous()
    if expected[0].dtype == FP8:
        # The last bit of an fp8 is an eighth.
        tolerance = 0.13
    for cache, right in zip(given.caches, expected, strict=True):
        torch.testing.assert_close(cache.float(), right.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normed", [False, True])
def test_queries_turn_and_keys_and_values_reach_their_slots(
    dtype: torch.dtype, normed: bool, device: torch.device
) -> None:
    assert_right(Case(dtype=dtype, normed=normed), device)


@pytest.mark.parametrize(
    "case",
    [
        Case(num_heads=1, num_kv_heads=1, slots=(5,)),
        Case(num_heads=7, num_kv_heads=1),
        Case(num_heads=28, num_kv_heads=4, slots=(2, 9)),
        Case(num_heads=12, num_kv_heads=12, normed=True),
        Case(num_heads=20, num_kv_heads=10),
        Case(num_heads=16, num_kv_heads=1),
        Case(head_dim=80, rotary_dim=80, normed=True),
        Case(head_dim=24, rotary_dim=12, normed=True),
        Case(head_dim=96, rotary_dim=72),
        Case(head_dim=128, rotary_dim=64, normed=True),
        Case(rotary_dim=0),
        Case(rotary_dim=0, normed=True),
        Case(rotary_dim=0, head_dim=7),
    ],
    ids=lambda case: f"{case.num_heads}/{case.num_kv_heads}x{case.head_dim}, {case.rotary_dim}",
)
def test_heads_of_any_number_size_and_rotation(case: Case, device: torch.device) -> None:
    assert_right(case, device)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_fp8_cache_holds_keys_and_values_by_their_scales(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(dtype=dtype, cache_dtype=FP8, key_scale=0.5, value_scale=0.003)
    assert_right(case, device)
    given = tensors(case, device)
    given.qkv[2, -1] = torch.nan
    launch(case, given)
    values = given.caches[1].float()
    # Cut off at the largest; what is broken stays so.
    assert values[divmod(case.slots[0], BLOCK_SIZE)].abs().max() == 448
    assert values[divmod(case.slots[2], BLOCK_SIZE)].isnan().sum() == 1
    assert values.isnan().sum() == 1


def test_what_has_no_slot_is_not_written(device: torch.device) -> None:
    assert_right(Case(slots=(-1, 4, -1)), device)
    case = Case(slots=(-1,))
    given = tensors(case, device)
    launch(case, given)
    assert all((cache == 7.0).all() for cache in given.caches)


def test_a_step_without_tokens_is_none(device: torch.device) -> None:
    assert launch(Case(slots=()), tensors(Case(slots=()), device)).shape == (0, 6, 16)


def test_a_token_is_the_same_alone_and_among_others(device: torch.device) -> None:
    case = Case(normed=True)
    given = tensors(case, device)
    together = launch(case, given)
    for row in range(len(case.slots)):
        only = slice(row, row + 1)
        alone = replace(given, qkv=given.qkv[only], positions=given.positions[only], slots=given.slots[only])
        assert torch.equal(launch(case, alone)[0], together[row])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = Case(normed=True)
    given = tensors(case, device)
    for wrong_case, wrong, message in (
        (replace(case, num_heads=4), given, r"qkv is \[3, 160\].*expected \[tokens, 128\]"),
        (replace(case, num_heads=5), given, "5 query heads do not share 2 KV heads evenly"),
        (replace(case, num_kv_heads=3), given, "3 KV heads for a cache of 2"),
        (replace(case, key_scale=2.0), given, "only fp8 has some"),
        (case, replace(given, positions=given.positions[:2]), r"positions is \[2\]"),
        (case, replace(given, slots=given.slots.int()), r"slot_mapping is .* torch.int32"),
        (case, replace(given, qkv=given.qkv.bfloat16()), "a cache of torch.float32 for torch.bfloat16"),
        (case, replace(given, norms=(given.norms[0], None)), "norms of heads: there is one without the other"),
        (case, replace(given, norms=(torch.ones(15), torch.ones(15))), r"norms of heads are \[15\]"),
        (case, replace(given, angles=(torch.ones(50, 9), torch.ones(50, 9))), "18 dimensions of a head of 16 turn"),
        (case, replace(given, angles=(torch.ones(50, 8).half(),) * 2), "cos and sin are"),
    ):
        with pytest.raises(ValueError, match=message):
            launch(wrong_case, wrong)
