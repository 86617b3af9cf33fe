"""Which batch sizes are captured, and what is done for the others."""

import pytest
import torch

from octavo.worker.gpu.graphs import DecodeGraphs, Outputs, graph_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 100, 256, 1000])
def test_every_batch_up_to_the_largest_has_a_size_not_much_larger(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for batch in range(1, largest + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded - batch < max(8, batch / 4)


def test_a_batch_is_computed_at_the_next_size() -> None:
    computed: list[int] = []

    def compute(size: int) -> Outputs:
        computed.append(size)
        return torch.zeros(size, 2), torch.zeros(size, 3)

    graphs = DecodeGraphs(compute, 20, torch.device("cpu"), captured=False)
    graphs.capture_all()
    assert computed == []
    assert [graphs.padded(batch) for batch in (1, 3, 5, 16, 17, 20)] == [1, 4, 8, 16, 20, 20]
    hidden, logits = graphs.replay(graphs.padded(3))
    assert (computed, len(hidden), len(logits)) == ([4], 4, 4)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_a_captured_size_computes_with_what_its_buffers_hold_when_it_is_replayed() -> None:
    device = torch.device("cuda")
    inputs = torch.arange(8.0, device=device)[:, None]
    graphs = DecodeGraphs(lambda size: (inputs[:size] * 2, inputs[:size] + 1), 8, device, captured=True)
    graphs.capture_all()
    inputs += 10
    for size in (8, 1, 4):
        hidden, logits = graphs.replay(size)
        torch.testing.assert_close(hidden, inputs[:size] * 2)
        torch.testing.assert_close(logits, inputs[:size] + 1)


@pytest.mark.gpu
@needs_gpu
def test_what_was_dropped_is_captured_anew_when_it_is_wanted() -> None:
    device = torch.device("cuda")
    inputs, weight = torch.randn(8, 64, device=device), torch.randn(64, 64, device=device)
    graphs = DecodeGraphs(lambda size: (inputs[:size] @ weight, inputs[:size] + 1), 8, device, captured=True)
    graphs.capture_all()
    graphs.drop()
    for size in (2, 8):
        hidden, _ = graphs.replay(size)
        torch.testing.assert_close(hidden, inputs[:size] @ weight)


@pytest.mark.gpu
@needs_gpu
def test_what_waits_for_the_device_is_refused_and_leaves_torch_as_it_was() -> None:
    device = torch.device("cuda")
    inputs, stream = torch.randn(8, 64, device=device), torch.cuda.current_stream()

    def compute(size: int) -> Outputs:
        largest = inputs[:size].max().item()
        return inputs[:size] * largest, inputs[:size]

    with pytest.raises(RuntimeError, match="synchroniz"):
        DecodeGraphs(compute, 8, device, captured=True).capture_all()
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.randn(8, device=device).isfinite().all()
    graphs = DecodeGraphs(lambda size: (inputs[:size] * 2, inputs[:size]), 8, device, captured=True)
    graphs.capture_all()
    torch.testing.assert_close(graphs.replay(4)[0], inputs[:4] * 2)
