"""Which batch sizes are captured, and what is done for the others."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from octavo.worker.gpu.graphs import CapturePlace, Outputs, StepGraphs, chunk_sizes, graph_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 100, 256, 1000])
def test_every_batch_up_to_the_largest_has_a_size_not_much_larger(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for batch in range(1, largest + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded - batch < max(8, batch / 4)


@pytest.mark.parametrize("largest", [1, 32, 100, 768])
def test_every_number_of_tokens_has_a_size_that_is_not_much_larger(largest: int) -> None:
    sizes = chunk_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for tokens in range(1, largest + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens < max(64, tokens / 4)
    assert chunk_sizes(0) == []


def test_all_kinds_of_steps_are_captured_on_one_stream_in_one_pool(cuda: "_FakeCuda") -> None:
    place = CapturePlace(torch.device("cpu"))
    for outputs in (1, 2):
        StepGraphs(lambda size, n=outputs: (torch.ones(size, 2),) * n, [1, 4], place, captured=True).capture_all()  # type: ignore[misc]
    assert len(cuda.made) == 1
    assert cuda.pools == [None, "pool", "pool", "pool"]


def test_a_batch_is_computed_at_the_next_size() -> None:
    computed: list[int] = []

    def compute(size: int) -> Outputs:
        computed.append(size)
        return torch.zeros(size, 2), torch.zeros(size, 3)

    graphs = StepGraphs(compute, graph_sizes(20), CapturePlace(torch.device("cpu")), captured=False)
    graphs.capture_all()
    assert computed == []
    assert [graphs.padded(batch) for batch in (1, 3, 5, 16, 17, 20)] == [1, 4, 8, 16, 20, 20]
    hidden, logits = graphs.replay(graphs.padded(3))
    assert (computed, len(hidden), len(logits)) == ([4], 4, 4)


class _FakeCuda:
    """Captures on the CPU: what is queued has been computed, and `torch.cuda` behaves as it does with `faults`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mode, self.warned = 0, False
        self.current: object = self.Stream("default")
        self.made: list[object] = []
        self.used: list[object] = []
        self.pools: list[object] = []
        self.error_modes: list[str] = []
        for name in ("get_sync_debug_mode", "set_sync_debug_mode", "current_stream", "set_stream", "stream", "graph"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "Stream", self.new_stream)
        patch.setattr(torch.cuda, "CUDAGraph", self.Graph)

    class Stream:
        def __init__(self, device: object) -> None:
            self.device = device

        def wait_stream(self, stream: object) -> None:
            """All is done already."""

    class Graph:
        def pool(self) -> object:
            return "pool"

        def replay(self) -> None:
            """The CPU computed when it was captured."""

    def new_stream(self, device: object) -> object:
        self.made.append(self.Stream(device))
        return self.made[-1]

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Torch warns once, after it has set the mode."""
        self.mode = {"default": 0, "error": 2}[mode] if isinstance(mode, str) else mode
        if not self.warned:
            self.warned = True
            warnings.warn("Synchronization debug mode is a prototype feature and does not ...", stacklevel=1)

    def current_stream(self, device: object = None) -> object:
        return self.current

    def set_stream(self, stream: object) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        self.used.append(stream)
        yield
        self.current = before

    @contextmanager
    def graph(
        self, graph: object, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """One that cannot be ended leaves its stream current; an empty one is warned of."""
        self.pools.append(pool)
        self.error_modes.append(capture_error_mode)
        self.current = stream or self.new_stream("another")
        self.used.append(self.current)
        before = self.current
        try:
            yield
        except RuntimeError:
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)
            raise
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _FakeCuda:
    return _FakeCuda(monkeypatch)


def test_a_warning_of_torch_is_no_error_and_no_mode_stays(cuda: _FakeCuda) -> None:
    """This suite makes errors of warnings."""
    modes: list[int] = []

    def compute(size: int) -> Outputs:
        modes.append(cuda.mode)
        return torch.ones(size, 2), torch.ones(size, 3)

    default = cuda.current
    StepGraphs(compute, graph_sizes(2), CapturePlace(torch.device("cpu")), captured=True).capture_all()
    # Each size is computed once to warm up, and once more where waiting is refused.
    assert modes == [0, 2, 0, 2]
    assert (cuda.mode, cuda.current) == (0, default)


def test_a_capture_that_fails_leaves_the_stream_and_the_mode_as_they_were(cuda: _FakeCuda) -> None:
    default = cuda.current

    def compute(size: int) -> Outputs:
        if cuda.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.ones(size, 2), torch.ones(size, 3)

    with pytest.raises(RuntimeError, match="synchronizing"):
        StepGraphs(compute, graph_sizes(2), CapturePlace(torch.device("cpu")), captured=True).capture_all()
    assert (cuda.mode, cuda.current) == (0, default)


def test_all_sizes_are_captured_on_one_stream(cuda: _FakeCuda) -> None:
    """Libraries keep some 32 MiB for every stream that they have seen."""
    graphs = StepGraphs(
        lambda size: (torch.ones(size, 2), torch.ones(size, 3)),
        graph_sizes(8),
        CapturePlace(torch.device("cpu")),
        captured=True,
    )
    graphs.capture_all()
    graphs.drop()
    graphs.replay(4)
    assert len(cuda.made) == 1
    assert set(cuda.used) == set(cuda.made)


def test_threads_that_ask_a_watched_device_end_no_capture(cuda: _FakeCuda) -> None:
    for is_watched in (False, True):
        place = CapturePlace(torch.device("cpu"), is_watched=is_watched)
        StepGraphs(lambda size: (torch.ones(size, 2),), [2], place, captured=True).capture(2)
    assert cuda.error_modes == ["global", "thread_local"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_a_captured_size_computes_with_what_its_buffers_hold_when_it_is_replayed() -> None:
    device = torch.device("cuda")
    inputs = torch.arange(8.0, device=device)[:, None]
    graphs = StepGraphs(
        lambda size: (inputs[:size] * 2, inputs[:size] + 1), graph_sizes(8), CapturePlace(device), captured=True
    )
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
    graphs = StepGraphs(
        lambda size: (inputs[:size] @ weight, inputs[:size] + 1), graph_sizes(8), CapturePlace(device), captured=True
    )
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
        StepGraphs(compute, graph_sizes(8), CapturePlace(device), captured=True).capture_all()
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.randn(8, device=device).isfinite().all()
    graphs = StepGraphs(
        lambda size: (inputs[:size] * 2, inputs[:size]), graph_sizes(8), CapturePlace(device), captured=True
    )
    graphs.capture_all()
    torch.testing.assert_close(graphs.replay(4)[0], inputs[:4] * 2)
