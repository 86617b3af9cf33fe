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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
