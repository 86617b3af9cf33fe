"""In exact mode a token's bits are the same however its sequence is computed: whole, in chunks, token by token, alone,
in a batch, under any bound of contexts. In the interpreter this shows that the order of all operations is fixed."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.triton import tiles
from octavo.kernels.triton.attention import TritonAttention
from octavo.testing.depth import deep
from octavo.testing.oracles.paged_batches import PagedBatch, on_a_gpu, random_paged_batch

SPLIT = 32
WINDOWS = [21, *deep(0)]
LENGTHS = [37, 34, 9]


@dataclass
class Sequences:
    """Some sequences that stand in a cache whole, of which a step may compute any chunks."""

    batch: PagedBatch
    attention: TritonAttention

    def attend(self, *chunks: tuple[int, int, int], max_context_len: int = 0) -> list[Tensor]:
        """Of `chunks` (sequence, from this position, up to that one) in one step."""
        batch = self.batch
        starts = [sum(batch.query_lens[:row]) for row in range(len(batch.query_lens))]
        query = torch.cat([batch.query[starts[row] + begin : starts[row] + end] for row, begin, end in chunks])
        contexts, lengths = [end for _, _, end in chunks], [end - begin for _, begin, end in chunks]
        tables = batch.block_tables[[row for row, _, _ in chunks]]
        group = GroupBatch(torch.zeros(len(query), dtype=torch.int64), tables, contexts, lengths, batch.window)
        step = self.attention.step(group)
        step = replace(step, max_context_len=max(max_context_len, step.max_context_len))
        output = self.attention.attend(
            query,
            batch.key_cache,
            batch.value_cache,
            step,
            batch.scale,
            softcap=batch.softcap,
            sinks=batch.sinks,
            alibi_slopes=batch.alibi_slopes,
        )
        return list(torch.split(output, lengths))

    def in_chunks(self, row: int, size: int) -> Tensor:
        """One sequence in steps of up to `size` tokens."""
        length = self.batch.context_lens[row]
        chunks = [(row, begin, min(begin + size, length)) for begin in range(0, length, size)]
        return torch.cat([output for chunk in chunks for output in self.attend(chunk)])


@pytest.fixture(params=WINDOWS, ids=lambda window: f"window {window}")
def sequences(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Sequences:
    monkeypatch.setattr("octavo.kernels.triton.attention.EXACT_SPLIT_KEYS", SPLIT)
    return _sequences(LENGTHS, device, torch.float32, window=request.param)


def _sequences(
    lengths: list[int], device: torch.device, dtype: torch.dtype, *, window: int = 0, kv_heads: int = 1, group: int = 2
) -> Sequences:
    whole = [(length, length) for length in lengths]
    batch = random_paged_batch(
        whole, block_size=4, kv_heads=kv_heads, group=group, head_dim=32, dtype=dtype, window=window
    )
    heads = batch.query.shape[1]
    batch = replace(batch, sinks=torch.linspace(-1, 1, heads), alibi_slopes=torch.linspace(0, 0.1, heads))
    shape = CacheShape(4, kv_heads, 32, dtype)
    return Sequences(on_a_gpu(batch, device), TritonAttention(shape, device, exact=True))


def test_any_chunks_give_the_bits_of_the_whole(sequences: Sequences) -> None:
    whole = sequences.attend((0, 0, 37))[0]
    for size in (9, 33):
        assert torch.equal(sequences.in_chunks(0, size), whole)


@pytest.mark.deep
def test_single_tokens_give_the_bits_of_the_whole(sequences: Sequences) -> None:
    assert torch.equal(sequences.in_chunks(0, 1), sequences.attend((0, 0, 37))[0])


def test_neighbours_leave_the_bits_alone(sequences: Sequences) -> None:
    alone = [sequences.attend((row, 0, length))[0] for row, length in enumerate(LENGTHS)]
    for together, lone in zip(sequences.attend((0, 0, 37), (1, 0, 34), (2, 0, 9)), alone, strict=True):
        assert torch.equal(together, lone)
    mixed = sequences.attend((2, 8, 9), (0, 36, 37), (1, 30, 34))
    for chunk, lone in zip(mixed, (alone[2][8:], alone[0][36:], alone[1][30:]), strict=True):
        assert torch.equal(chunk, lone)


def test_a_larger_bound_of_contexts_leaves_the_bits_alone(sequences: Sequences) -> None:
    """As in a CUDA graph, which is captured for the longest context."""
    short = sequences.attend((2, 8, 9), (1, 20, 25))
    for bound in (2 * SPLIT + 1, 40 * SPLIT):
        bounded = sequences.attend((2, 8, 9), (1, 20, 25), max_context_len=bound)
        assert all(map(torch.equal, bounded, short))


@pytest.mark.parametrize("programs", [1, 2])
def test_however_few_programs_share_the_splits_the_bits_are_those(
    programs: int, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has as many programs whatever there is to do."""
    monkeypatch.setattr("octavo.kernels.triton.attention.EXACT_SPLIT_KEYS", 16)
    each = sequences.attend((1, 33, 34), (0, 34, 37), max_context_len=6 * SPLIT)
    monkeypatch.setattr("octavo.kernels.triton.launch.listed_programs", lambda *_: programs)
    shared = sequences.attend((1, 33, 34), (0, 34, 37), max_context_len=6 * SPLIT)
    assert all(map(torch.equal, shared, each))


def test_a_window_that_begins_in_another_split_leaves_the_bits_alone(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Of a chunk's first query, which decides what its tile reads. Splits are combined by pairs."""
    monkeypatch.setattr("octavo.kernels.triton.attention.EXACT_SPLIT_KEYS", 16)
    monkeypatch.setattr("octavo.kernels.triton.launch.TILE_SPLITS", 2)
    sequences = _sequences([120], device, torch.float32, window=70)
    chunk = sequences.attend((0, 84, 92))[0]
    for position in (84, 87, 91):
        assert torch.equal(sequences.attend((0, position, position + 1))[0], chunk[position - 84 :][:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *deep(torch.float16)])
def test_so_it_is_in_16_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr("octavo.kernels.triton.attention.EXACT_SPLIT_KEYS", 64)
    sequences = _sequences([70], device, dtype, group=1)
    whole = sequences.attend((0, 0, 70))[0]
    assert torch.equal(sequences.in_chunks(0, 35), whole)
    assert torch.equal(sequences.attend((0, 69, 70))[0], whole[69:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_begin_where_tiles_do(dtype: torch.dtype) -> None:
    for head_dim in (64, 80, 128, 256):
        assert tiles.EXACT_SPLIT_KEYS % tiles.exact_tiles(4, head_dim, dtype).keys == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [0, 700])
def test_so_it_is_at_the_length_of_real_splits(window: int, dtype: torch.dtype, gpu: torch.device) -> None:
    sequences = _sequences([5000, 1300, 2049], gpu, dtype, window=window, kv_heads=2, group=4)
    whole = [sequences.attend((row, 0, length))[0] for row, length in enumerate(sequences.batch.context_lens)]
    assert torch.equal(sequences.in_chunks(0, 512), whole[0])
    together = sequences.attend((1, 1299, 1300), (2, 2047, 2048), (0, 4990, 5000), (1, 0, 1300), max_context_len=40960)
    expected = whole[1][1299:], whole[2][2047:2048], whole[0][4990:], whole[1]
    assert all(map(torch.equal, together, expected))
    singles = [sequences.attend((1, position, position + 1))[0] for position in range(0, 1300, 97)]
    assert torch.equal(torch.cat(singles), whole[1][::97])
