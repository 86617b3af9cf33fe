"""What waits for what when blocks move beside a model, and that they arrive."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import reference
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.gpu.swap import Pairs, Pools
from octavo.worker.step.block_mover import BlockMover, block_mover

NUM_BLOCKS, NUM_CPU_BLOCKS = 6, 4
Moves = Sequence[tuple[int, int]]
Place = tuple[str, int]


def numbered(num_blocks: int, first: int = 0) -> Tensor:
    """[num_blocks, 1, 2, 1, 1, 1]; every block holds its own number, and `first`."""
    return (torch.arange(num_blocks) + first).view(-1, 1, 1, 1, 1, 1).expand(-1, 1, 2, 1, 1, 1).clone()


def numbers(pool: Tensor) -> list[int]:
    return [int(number) for number in pool[:, 0, 0, 0, 0, 0]]


@dataclass(frozen=True)
class Op:
    """Work on a stream. `before`: the ops that are certainly done when it begins, as bits."""

    before: int
    reads: frozenset[Place]
    writes: frozenset[Place]
    run: Callable[[], object]

    def conflicts(self, other: "Op") -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


@dataclass
class Machine:
    """Streams that only note what they are given; `run` does it later, in any order that they allow."""

    ops: list[Op] = field(default_factory=list)
    active: "NotingStream | None" = None

    def run(self, rng: random.Random) -> None:
        done, waiting = 0, set(range(len(self.ops)))
        while waiting:
            number = rng.choice([number for number in sorted(waiting) if not self.ops[number].before & ~done])
            self.ops[number].run()
            waiting.remove(number)
            done |= 1 << number


class NotingStream:
    """`octavo.worker.step.block_mover.DeviceStream`. An event is the ops that it stands for, as bits."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._before = 0
        self.num_waits = 0

    def record(self) -> int:
        return self._before

    def wait(self, event: int) -> None:
        self._before |= event
        self.num_waits += 1

    @contextmanager
    def active(self) -> Iterator[None]:
        outer, self._machine.active = self._machine.active, self
        yield
        self._machine.active = outer

    def passed(self, event: int) -> bool:
        """Nothing is done before `Machine.run`, except nothing."""
        return event == 0

    def finish(self) -> None:
        raise AssertionError("no test waits for a stream")

    def give(self, reads: set[Place], writes: set[Place], run: Callable[[], object]) -> Op:
        op = Op(self._before, frozenset(reads), frozenset(writes), run)
        self._before |= 1 << len(self._machine.ops)
        self._machine.ops.append(op)
        return op


class Scene:
    """A mover between noting streams, and beside it the same pools where everything is done at once."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.main, self.side = NotingStream(self.machine), NotingStream(self.machine)
        self.blocks, self.cpu_blocks = numbered(NUM_BLOCKS), numbered(NUM_CPU_BLOCKS, 100)
        self.expected_blocks, self.expected_cpu_blocks = self.blocks.clone(), self.cpu_blocks.clone()
        self.seen: list[tuple[Tensor, list[int]]] = []
        self.mover = BlockMover(
            [self.blocks],
            [self.cpu_blocks],
            self.main,
            self.side,
            swap=self._swap,
            copy=lambda pools, p: self._swap(pools, pools, p),
        )

    def _swap(self, sources: Pools, targets: Pools, pairs: Pairs) -> None:
        [source], [target] = sources, targets
        stream = self.machine.active or self.main
        reads = {(self._name(source), block) for block, _ in pairs}
        writes = {(self._name(target), block) for _, block in pairs}
        stream.give(reads, writes, lambda: reference.move_blocks(source, target, pairs))

    def _name(self, pool: Tensor) -> str:
        return "device" if pool is self.blocks else "cpu"

    def move(self, *, swap_out: Moves = (), swap_in: Moves = (), copy: Moves = ()) -> None:
        self.mover.move(BlockMoves(*([BlockMove(*pair) for pair in pairs] for pairs in (swap_out, swap_in, copy))))
        reference.move_blocks(self.expected_blocks, self.expected_cpu_blocks, swap_out)
        reference.move_blocks(self.expected_cpu_blocks, self.expected_blocks, swap_in)
        reference.move_blocks(self.expected_blocks, self.expected_blocks, copy)

    def step(self, *, reads: Sequence[int] = (), writes: Mapping[int, int]) -> Op:
        """The model reads blocks, then writes numbers into some."""
        self.mover.before_writing(writes)
        seen: list[int] = []

        def run() -> None:
            seen.extend(numbers(self.blocks[list(reads)]))
            for block, number in writes.items():
                self.blocks[block] = number

        self.seen.append((self.expected_blocks[list(reads)].clone(), seen))
        for block, number in writes.items():
            self.expected_blocks[block] = number
        op = self.main.give({("device", block) for block in reads}, {("device", block) for block in writes}, run)
        self.mover.used([list(reads), list(writes)])
        return op


def random_pairs(rng: random.Random, num_sources: int, num_targets: int) -> Pairs:
    targets = rng.sample(range(num_targets), rng.randint(1, 3))
    return list(zip(rng.sample(range(num_sources), len(targets)), targets, strict=True))


def random_scene(rng: random.Random) -> Scene:
    scene = Scene()
    for number in range(12):
        match rng.choice(["step", "step", "out", "in", "copy", "all", "clear"]):
            case "step":
                writes = dict.fromkeys(rng.sample(range(NUM_BLOCKS), rng.randint(0, 2)), 1000 + number)
                scene.step(reads=rng.sample(range(NUM_BLOCKS), 2), writes=writes)
            case "out":
                scene.move(swap_out=random_pairs(rng, NUM_BLOCKS, NUM_CPU_BLOCKS))
            case "in":
                scene.move(swap_in=random_pairs(rng, NUM_CPU_BLOCKS, NUM_BLOCKS))
            case "copy":
                scene.move(copy=random_pairs(rng, NUM_BLOCKS, NUM_BLOCKS))
            case "all":
                swap_out = random_pairs(rng, NUM_BLOCKS, NUM_CPU_BLOCKS)
                swap_in = random_pairs(rng, NUM_CPU_BLOCKS, NUM_BLOCKS)
                scene.move(swap_out=swap_out, swap_in=swap_in, copy=random_pairs(rng, NUM_BLOCKS, NUM_BLOCKS))
            case "clear":
                scene.mover.before_writing_any()
                everything = {("device", block) for block in range(NUM_BLOCKS)}
                scene.main.give(set(), everything, lambda: scene.blocks.zero_())
                scene.mover.used([range(NUM_BLOCKS)])
                scene.expected_blocks.zero_()
    return scene


@settings(max_examples=150)
@given(seed=st.integers(0, 2**31))
def test_whatever_touches_the_same_block_is_in_order(seed: int) -> None:
    ops = random_scene(random.Random(seed)).machine.ops
    for number, op in enumerate(ops):
        for earlier in range(number):
            assert op.before >> earlier & 1 or not op.conflicts(ops[earlier]), (earlier, number)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31))
def test_in_every_order_that_the_streams_allow_blocks_arrive_as_if_all_was_done_at_once(seed: int) -> None:
    rng = random.Random(seed)
    scene = random_scene(rng)
    scene.machine.run(rng)
    assert torch.equal(scene.blocks, scene.expected_blocks)
    assert torch.equal(scene.cpu_blocks, scene.expected_cpu_blocks)
    assert all(numbers(expected) == seen for expected, seen in scene.seen)


def test_a_swap_out_runs_on_while_the_model_reads_those_blocks_and_writes_others() -> None:
    scene = Scene()
    scene.move(swap_out=[(0, 0), (1, 1)])
    scene.step(reads=[0, 1], writes={2: 7})
    scene.move(copy=[(0, 3)])
    assert scene.main.num_waits == 0
    scene.step(writes={1: 8})
    assert scene.main.num_waits == 1


def test_the_model_waits_once_for_all_swap_outs_up_to_the_one_it_needs() -> None:
    scene = Scene()
    scene.move(swap_out=[(0, 0)])
    scene.move(swap_out=[(1, 1)])
    scene.move(swap_out=[(2, 2)])
    scene.step(writes={1: 7, 0: 7})
    assert scene.main.num_waits == 1
    scene.step(writes={0: 8})
    assert scene.main.num_waits == 1
    scene.step(writes={2: 8})
    assert scene.main.num_waits == 2


def test_a_block_that_leaves_twice_is_waited_for_until_the_second_time() -> None:
    scene = Scene()
    scene.move(swap_out=[(0, 0)])
    scene.move(swap_out=[(1, 1)])
    scene.move(swap_out=[(0, 2)])
    second = scene.machine.ops[-1]
    scene.step(writes={1: 7})
    op = scene.step(writes={0: 7})
    assert op.before >> scene.machine.ops.index(second) & 1
    assert scene.main.num_waits == 2


def test_after_a_swap_in_no_earlier_swap_out_is_waited_for() -> None:
    scene = Scene()
    scene.move(swap_out=[(0, 0)])
    scene.move(swap_in=[(0, 3)])
    scene.step(reads=[3], writes={0: 7})
    assert scene.main.num_waits == 1


@pytest.mark.parametrize("kind", ["swap_in", "swap_out"])
def test_a_swap_waits_for_the_last_step_that_used_its_blocks_and_for_none_after(kind: str) -> None:
    scene = Scene()
    ops = [scene.step(reads=[1], writes={2: 7}), scene.step(reads=[1], writes={}), scene.step(reads=[4], writes={3: 8})]
    scene.move(**{kind: [(0, 1) if kind == "swap_in" else (2, 1)]})
    known = [scene.machine.ops[-1].before >> scene.machine.ops.index(op) & 1 for op in ops]
    assert known == ([1, 1, 0] if kind == "swap_in" else [1, 0, 0])


@pytest.mark.parametrize("kind", ["swap_in", "swap_out"])
def test_a_swap_of_blocks_that_no_step_used_waits_for_nothing(kind: str) -> None:
    scene = Scene()
    scene.step(reads=[1], writes={2: 7})
    scene.move(copy=[(3, 4)])
    scene.move(**{kind: [(0, 0)]})
    assert scene.side.num_waits == 0


def test_moves_of_which_one_cannot_be_leave_everything_where_it_is() -> None:
    scene = Scene()
    for wrong in ({"swap_out": [(6, 0)]}, {"swap_in": [(0, 1), (1, 1)]}, {"copy": [(0, -1)]}):
        with pytest.raises(ValueError, match=r"cannot move|two moves"):
            scene.move(**({"swap_out": [(1, 1)], "swap_in": [(1, 2)], "copy": [(2, 4)]} | wrong))
    assert not scene.machine.ops


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31))
def test_on_a_cpu_blocks_move_at_once(seed: int) -> None:
    rng = random.Random(seed)
    scene, blocks, cpu_blocks = Scene(), numbered(NUM_BLOCKS), numbered(NUM_CPU_BLOCKS, 100)
    mover = block_mover([blocks], [cpu_blocks])
    for _ in range(4):
        pairs = {
            "swap_out": random_pairs(rng, NUM_BLOCKS, NUM_CPU_BLOCKS),
            "swap_in": random_pairs(rng, NUM_CPU_BLOCKS, NUM_BLOCKS),
            "copy": random_pairs(rng, NUM_BLOCKS, NUM_BLOCKS),
        }
        mover.move(BlockMoves(**{kind: [BlockMove(*pair) for pair in some] for kind, some in pairs.items()}))
        scene.move(**pairs)
        mover.before_writing(range(NUM_BLOCKS))
        assert (numbers(blocks), numbers(cpu_blocks)) == (
            numbers(scene.expected_blocks),
            numbers(scene.expected_cpu_blocks),
        )
