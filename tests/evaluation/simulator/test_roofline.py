"""Step times and memory by arithmetic, against what is published and against sums by hand."""

import pytest

from octavo.runtime.models.step_times import StepShape
from octavo.simulator.hardware import (
    GIB,
    GPUS,
    MODELS,
    PAPER_OVERHEAD,
    Efficiency,
    Overhead,
    Roofline,
    kv_bytes,
    kv_slots,
    replica,
)

IDEAL = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0)
NO_OVERHEAD = Overhead(0.0, 0.0, 0.0, 0.0)
OPT_13B, A100 = MODELS["opt-13b"], GPUS["a100-40gb"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-1.3b", 1.316),
        ("opt-6.7b", 6.658),
        ("opt-13b", 12.853),
        ("opt-30b", 29.975),
        ("opt-66b", 65.72),
        ("opt-175b", 174.6),
        ("llama-7b", 6.738),
        ("llama-13b", 13.016),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.554),
        ("qwen3-8b", 8.191),
        ("smollm2-135m", 0.1345),
    ],
)
def test_shapes_have_as_many_parameters_as_the_published_checkpoints(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "gib", "slots"),
    [
        ("opt-13b", "a100-40gb", 1, 12, 15_700),
        ("opt-66b", "a100-40gb", 4, 21, 9_700),
        ("opt-175b", "a100-80gb", 8, 264, 60_100),
    ],
)
def test_the_paper_s_servers_have_the_kv_memory_of_its_table_1(
    model: str, gpu: str, tp: int, gib: float, slots: int
) -> None:
    assert kv_bytes(MODELS[model], GPUS[gpu], tp) / GIB == pytest.approx(gib, rel=0.03)
    assert kv_slots(MODELS[model], GPUS[gpu], tp) == pytest.approx(slots, rel=0.02)


def test_llama_13b_has_as_large_tokens_as_opt_13b_and_a_little_less_room() -> None:
    llama = MODELS["llama-13b"]
    assert llama.kv_bytes_per_token == OPT_13B.kv_bytes_per_token == 819_200
    assert kv_slots(llama, A100) == pytest.approx(15_400, rel=0.01)


def test_grouped_heads_make_tokens_small() -> None:
    assert MODELS["llama-3-8b"].kv_bytes_per_token == 2 * 32 * 8 * 128 * 2


def test_a_model_that_does_not_fit_is_refused_with_what_would_help() -> None:
    with pytest.raises(ValueError, match=r"opt-66b has 122.4 GiB of weights.* 1 x a100-40gb .*more GPUs"):
        kv_slots(MODELS["opt-66b"], A100)


@pytest.mark.parametrize("tp", [0, 3])
def test_heads_that_cannot_be_shared_out_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=f"opt-13b has 40 heads, which {tp} GPUs cannot share"):
        Roofline(OPT_13B, A100, tp)


def test_a_small_step_takes_as_long_as_reading_weights_and_context() -> None:
    roofline = Roofline(OPT_13B, A100, efficiency=IDEAL, overhead=NO_OVERHEAD)
    read = (OPT_13B.layer_parameters + OPT_13B.head_parameters) * 2 + 1000 * 819_200
    assert roofline.seconds(StepShape(1, 1, 1000)) == pytest.approx(read / 1555e9)


def test_a_large_step_takes_as_long_as_its_products() -> None:
    roofline = Roofline(OPT_13B, A100, efficiency=IDEAL, overhead=NO_OVERHEAD)
    pairs = 2048 * 2049 / 2
    flops = 2 * 2048 * OPT_13B.layer_parameters + 2 * 50272 * 5120 + 4 * 40 * 5120 * pairs
    assert roofline.seconds(StepShape(2048, 1, 0, pairs)) == pytest.approx(flops / 312e12)


def test_less_efficient_hardware_takes_longer_in_proportion() -> None:
    half = Efficiency(0.5, 0.5, 0.5, 0.5, 0.5)
    shape = StepShape(32, 32, 10_000, 64.0, 2, 3, 1)
    fast, slow = (Roofline(OPT_13B, A100, efficiency=each, overhead=NO_OVERHEAD) for each in (IDEAL, half))
    assert slow.seconds(shape) == pytest.approx(2 * fast.seconds(shape))


def test_overheads_are_added_to_steps_that_compute() -> None:
    plain, burdened = (
        Roofline(OPT_13B, A100, overhead=each) for each in (NO_OVERHEAD, Overhead(0.01, 0.001, 0.0, 0.0))
    )
    shape = StepShape(8, 8, 100)
    assert burdened.seconds(shape) - plain.seconds(shape) == pytest.approx(0.018)
    assert burdened.seconds(StepShape(blocks_out=3)) == plain.seconds(StepShape(blocks_out=3))


def test_gpus_share_reading_and_add_reductions() -> None:
    model, gpu = MODELS["opt-66b"], GPUS["a100-80gb"]
    overhead = Overhead(0.0, 0.0, all_reduce_s=1e-5, transfer_s=0.0)
    two, four = (Roofline(model, gpu, tp, efficiency=IDEAL, overhead=overhead) for tp in (2, 4))
    shape = StepShape(16, 16, 4000)
    fixed = 2 * 64 * 1e-5
    reduced = {tp: 2 * 64 * 16 * 2 * (tp - 1) / tp * 9216 * 2 / 300e9 for tp in (2, 4)}
    read = {2: two.seconds(shape) - fixed - reduced[2], 4: four.seconds(shape) - fixed - reduced[4]}
    assert read[2] == pytest.approx(2 * read[4])


def test_scattered_swaps_take_the_longer_by_token_the_smaller_blocks_are() -> None:
    def by_token(block_size: int, overhead: Overhead) -> float:
        roofline = Roofline(OPT_13B, A100, block_size=block_size, overhead=overhead)
        return roofline.seconds(StepShape(blocks_out=512 // block_size)) / 512

    assert by_token(1, PAPER_OVERHEAD) > 8 * by_token(16, PAPER_OVERHEAD) > 8 * by_token(256, PAPER_OVERHEAD)
    assert by_token(1, Overhead()) == pytest.approx(by_token(256, Overhead()))


def test_costs_are_those_of_its_steps() -> None:
    roofline = Roofline(OPT_13B, A100, overhead=PAPER_OVERHEAD)
    swap = roofline.costs.swap
    assert roofline.seconds(StepShape(blocks_out=7)) == pytest.approx(swap.moves_s + 7 * swap.block_out_s)
    prefill = roofline.costs.prefill
    steps = [roofline.seconds(StepShape(tokens, 1, 0, 1e5)) for tokens in (1024, 2048)]
    assert steps[1] - steps[0] == pytest.approx(1024 * prefill.token_s)
    assert prefill.step_s > OPT_13B.weight_bytes / A100.bandwidth


def test_a_replica_has_the_blocks_that_fit_unless_it_is_told_otherwise() -> None:
    spec = replica(OPT_13B, A100, block_size=32)
    assert (spec.num_blocks, spec.num_cpu_blocks) == (kv_slots(OPT_13B, A100) // 32,) * 2
    assert (spec.max_model_len, spec.vocab_size, spec.name) == (2048, 50272, "opt-13b")
    spec = replica(OPT_13B, A100, num_blocks=100, num_cpu_blocks=0)
    assert (spec.num_blocks, spec.num_cpu_blocks) == (100, 0)
