"""Llama-family models on Triton's kernels, against the same weights in torch's operations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
    SmolLM3Config,
)

from octavo.kernels.attention import TorchAttention
from octavo.kernels.backend import AttentionBackend, GroupBatch
from octavo.kernels.triton.attention import TritonAttention
from octavo.testing.depth import deep
from octavo.worker.loading.load_format import DummyWeights
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.models import linear
from octavo.worker.models.compiled import compiled
from octavo.worker.models.config import read_config
from octavo.worker.models.decoder import Decoder, LayerCache, PagedStep
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.linear import LinearKind
from octavo.worker.models.llama import LlamaModel
from octavo.worker.step.kv_cache import KVCache, KVLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 40
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
# Between them they have all that sets members of the family apart.
CONFIGS: dict[str, Any] = {
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, architectures=["LlamaForCausalLM"]),
    "exact gelu": LlamaConfig(**SIZES, hidden_act="gelu", architectures=["LlamaForCausalLM"]),
    "norms of heads": Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"]),
    "norms of all heads, and after": Olmo2Config(**SIZES, architectures=["Olmo2ForCausalLM"]),
    "soft caps": Gemma2Config(**SIZES, sliding_window=3, architectures=["Gemma2ForCausalLM"]),
    "windows, four norms, two rotations": Gemma3TextConfig(
        **SIZES,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
        architectures=["Gemma3ForCausalLM"],
    ),
    "partly and interleaved rotary": Glm4Config(**SIZES, attention_bias=True, architectures=["Glm4ForCausalLM"]),
    "one tensor of queries, keys and values": Phi3Config(
        **{**SIZES, "hidden_size": 64, "partial_rotary_factor": 0.75}, architectures=["Phi3ForCausalLM"]
    ),
    "scaled residuals": GraniteConfig(
        **{**SIZES, "hidden_size": 64}, **MULTIPLIERS, architectures=["GraniteForCausalLM"]
    ),
    "layers without positions": SmolLM3Config(**SIZES, no_rope_layers=[1, 0], architectures=["SmolLM3ForCausalLM"]),
}
# Ids of three sequences, and how many of each a step computes: chunks, then tokens one by one.
SEQUENCES = [[7, 3, 8], [1, 4, 1, 5, 9], [*range(40, 48)]]
STEPS = [(1, 3, 5), (1, 1, 3), (1, 1, 0)]


class RandomWeights(DummyWeights):
    """Of a size that tells tokens apart, with norms and biases that are not all alike."""

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        tensor = super().take(name.removesuffix("weight"), shape, part)
        return 1 + 10 * tensor if len(shape) == 1 and name.endswith("weight") else 12 * tensor


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights lie on a CPU as they would on a GPU."""
    monkeypatch.setattr(linear, "best_kind", lambda weight: LinearKind.PLAIN)


def model_of(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    CONFIGS[name].save_pretrained(directory)
    return LlamaModel(read_config(directory), RandomWeights(), dtype, DEVICE)


@dataclass
class Machine:
    """A decoder with its cache, and how far each of `SEQUENCES` has come."""

    decoder: Decoder
    attention: AttentionBackend
    layout: KVLayout
    caches: list[LayerCache]
    reached: list[int]

    def step(self, counts: Sequence[int]) -> PagedStep:
        """Of so many tokens of each sequence."""
        works = [(row, self.reached[row], count) for row, count in enumerate(counts) if count]
        self.reached = [reached + count for reached, count in zip(self.reached, counts, strict=True)]
        ids = [token for row, start, count in works for token in SEQUENCES[row][start : start + count]]
        positions = [position for _, start, count in works for position in range(start, start + count)]
        ends = torch.tensor([count for _, _, count in works]).cumsum(0) - 1
        return PagedStep(
            input_ids=torch.tensor(ids, device=DEVICE),
            positions=torch.tensor(positions, device=DEVICE),
            rows=ends.to(DEVICE),
            attention=self.attention,
            groups=[self.attention.step(self._batch(works, group)) for group in range(len(self.layout.groups))],
            caches=self.caches,
        )

    def _batch(self, works: list[tuple[int, int, int]], group: int) -> GroupBatch:
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(group))
        tables = blocks[: 6 * len(SEQUENCES)].view(len(SEQUENCES), 6)[[row for row, _, _ in works]]
        # Groups share the pool, but no block.
        tables = (tables + group * NUM_BLOCKS).to(torch.int64)
        slots = [
            int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for table, (_, start, count) in zip(tables, works, strict=True)
            for position in range(start, start + count)
        ]
        return GroupBatch(
            slot_mapping=torch.tensor(slots),
            block_tables=tables,
            context_lens=[start + count for _, start, count in works],
            query_lens=[count for _, _, count in works],
            window=self.layout.groups[group].window,
        )

    @torch.inference_mode()
    def logits(self, counts: Sequence[int]) -> Tensor:
        """[sequences, vocab_size], after the last token of each sequence that has some in this step."""
        return self.decoder.logits(self.decoder.forward(self.step(counts))).clone()


def machine_of(
    decoder: Decoder,
    attention_class: type[TorchAttention] | type[TritonAttention],
    dtype: torch.dtype = torch.float32,
    scales: tuple[float, float] = (1.0, 1.0),
    **options: Any,
) -> Machine:
    layout = KVLayout.of(decoder.config, BLOCK_SIZE, dtype)
    cache = KVCache(
        layout,
        num_blocks=NUM_BLOCKS * len(layout.groups),
        num_cpu_blocks=0,
        device=DEVICE,
        scales=[scales] * len(decoder.config.windows),
    )
    attention: Any = attention_class(layout.cache_shape, DEVICE, **options)
    if attention.masks_unwritten:
        for layer in cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    return Machine(decoder, attention, layout, cache.layers, [0] * len(SEQUENCES))


def all_logits(machine: Machine, steps: Sequence[Sequence[int]] = STEPS) -> Tensor:
    """[rows, vocab_size], of all `steps`."""
    return torch.cat([machine.logits(counts) for counts in steps])


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_same_model_in_torch(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    expected = all_logits(machine_of(model, TorchAttention))
    assert expected.std() > 0.5
    machine = machine_of(FusedLlama(model), TritonAttention)
    torch.testing.assert_close(all_logits(machine), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", ["norms of heads", *deep("windows, four norms, two rotations")])
def test_bfloat16_strays_no_further_than_torchs(name: str, tmp_path: Path) -> None:
    truth = all_logits(machine_of(model_of(name, tmp_path), TorchAttention))
    narrow = model_of(name, tmp_path, torch.bfloat16)
    theirs = all_logits(machine_of(narrow, TorchAttention, torch.bfloat16))
    ours = all_logits(machine_of(FusedLlama(narrow), TritonAttention, torch.bfloat16))
    assert (ours - truth).abs().mean() < 1.3 * (theirs - truth).abs().mean()


@pytest.mark.usefixtures("plain")
def test_exact_tokens_do_not_depend_on_the_batch_or_on_chunks(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    model = FusedLlama(model_of("norms of heads", tmp_path, dtype), exact=True)
    together = machine_of(model, TritonAttention, dtype, exact=True)
    found = [together.logits(counts) for counts in STEPS]
    for row, last in ((0, found[2][0]), (1, found[2][1]), (2, found[1][2])):
        alone = machine_of(model, TritonAttention, dtype, exact=True)
        tokens = sum(counts[row] for counts in STEPS)
        whole = alone.logits([tokens if other == row else 0 for other in range(len(SEQUENCES))])
        assert torch.equal(whole[0], last)


@pytest.mark.usefixtures("plain")
def test_exact_logits_are_those_of_the_same_model_in_torch(tmp_path: Path) -> None:
    model = model_of("biases", tmp_path)
    expected = all_logits(machine_of(model, TorchAttention), STEPS[:2])
    machine = machine_of(FusedLlama(model, exact=True), TritonAttention, exact=True)
    torch.testing.assert_close(all_logits(machine, STEPS[:2]), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("plain")
def test_an_fp8_cache_is_written_and_read_by_its_scales(tmp_path: Path) -> None:
    model = model_of("biases", tmp_path)
    expected = all_logits(machine_of(model, TorchAttention), STEPS[:2])
    scales = (0.02, 0.03)
    found = all_logits(machine_of(FusedLlama(model), TritonAttention, torch.float8_e4m3fn, scales), STEPS[:2])
    assert (found - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.usefixtures("plain")
def test_the_rows_that_are_wanted_are_given_in_their_order(tmp_path: Path) -> None:
    model = model_of("biases", tmp_path)
    fused = FusedLlama(model)
    step = machine_of(fused, TritonAttention).step((1, 3, 0))
    with torch.inference_mode():
        every = fused.forward(replace(step, rows=torch.arange(4, device=DEVICE)))
        some = fused.forward(replace(step, rows=torch.tensor([3, 0, 3], device=DEVICE)))
        torch.testing.assert_close(some, every[[3, 0, 3]], atol=1e-5, rtol=1e-5)
        for decoder in (fused, FusedLlama(model, exact=True)):
            assert decoder.logits(every[:0]).shape == (0, SIZES["vocab_size"])


@pytest.mark.usefixtures("plain")
def test_triton_attention_brings_triton_layers(tmp_path: Path) -> None:
    model = model_of("biases", tmp_path)
    shape = KVLayout.of(model.config, BLOCK_SIZE, torch.float32).cache_shape
    attention = TritonAttention(shape, DEVICE)
    chosen = compiled(model, attention)
    assert isinstance(chosen, FusedLlama)
    assert not chosen.exact
    exact = compiled(model, attention, exact=True)
    assert isinstance(exact, FusedLlama)
    assert exact.exact
    assert chosen.config is model.config
    assert compiled(model, TorchAttention(shape, DEVICE)) is model
    # One that transformers computes, say.
    assert compiled(chosen, attention) is chosen


def test_weights_that_lie_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not linear.prepacking_available(torch.float32):
        pytest.skip("this torch or CPU does not prepack fp32")
    monkeypatch.setattr(linear, "best_kind", lambda weight: LinearKind.ONEDNN)
    with pytest.raises(ValueError, match="a weight is multiplied by onednn; kernels for a GPU take plain ones"):
        FusedLlama(model_of("biases", tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("exact", [False, True])
def test_a_decode_step_can_be_captured_in_a_graph(exact: bool, tmp_path: Path) -> None:
    fused = FusedLlama(model_of("norms of all heads, and after", tmp_path), exact=exact)
    machine = machine_of(fused, TritonAttention, exact=exact)
    machine.logits(STEPS[0])
    step = machine.step((1, 1, 1))
    with torch.inference_mode():
        expected = fused.logits(fused.forward(step)).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fused.logits(fused.forward(step))
        graph.replay()
    torch.testing.assert_close(captured, expected, atol=0, rtol=0)
