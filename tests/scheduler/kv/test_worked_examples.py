"""The worked examples of the paper (Figs. 6-9) and of vLLM's token budget, with their block numbers."""

from collections.abc import Iterable
from typing import Any

import msgspec

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.testing.cluster import Cluster, FakeReplica, make_request, reference_tokens
from octavo.wire.requests import Request
from octavo.wire.steps import BlockMove, Remap

from ..conftest import MakeCluster
from ..views import group_of, kv_of, plans, sequence_of, table

# "Four score and seven years ago our" and "It was the best of".
FOUR_SCORE = list(range(10, 17))
BEST_OF_TIMES = list(range(30, 35))


def arrange(kv: KVCacheManager, block_ids: Iterable[int]) -> None:
    """Makes `block_ids` those of an empty pool that are taken next, in this order."""
    fillers = {}
    for _ in range(kv.num_blocks):
        filler = sequence_of([0])
        kv.allocate(group_of(filler), 1)
        ((block_id,),) = kv.block_table(filler)
        fillers[block_id] = filler
    wanted = list(block_ids)
    others = [block_id for block_id in fillers if block_id not in wanted]
    for block_id in reversed(wanted + others):
        kv.free(fillers[block_id])


def join(cluster: Cluster, block_ids: list[int]) -> FakeReplica:
    """A replica with nine blocks of four tokens, which takes `block_ids` first."""
    replica = cluster.join(num_blocks=9, block_size=4)
    arrange(kv_of(cluster), block_ids)
    return replica


def request_of(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
    request = make_request(name, 1, max_tokens, **sampling)
    return msgspec.structs.replace(request, prompt_token_ids=prompt)


def filled(cluster: Cluster, name: str) -> list[int]:
    """How many slots of each block of a request's first sequence are filled."""
    computed = cluster.groups[name].sequences[0].placement.num_computed
    return [min(4, computed - start) for start in range(0, computed, 4)]


def test_a_sequence_takes_a_block_only_when_its_last_one_is_full(make_cluster: MakeCluster) -> None:
    """Paper Fig. 6: seven prompt tokens in blocks 7 and 1; the second decoding step takes block 3."""
    cluster = make_cluster(max_steps_in_flight=1)
    replica = join(cluster, [7, 1, 3])
    request = request_of("A", FOUR_SCORE, 4)
    cluster.submit(request)
    seen = []
    for _ in range(3):
        cluster.step()
        seen.append((table(cluster, "A"), filled(cluster, "A")))
    assert seen == [([7, 1], [4, 3]), ([7, 1], [4, 4]), ([7, 1, 3], [4, 4, 1])]
    assert [work.new_block_ids for plan in plans(replica) for work in plan.work] == [[[7, 1]], [], [[3]]]
    cluster.run()
    assert cluster.tokens["A"] == reference_tokens(request)
    assert kv_of(cluster).num_free == 9


def test_two_requests_share_one_pool_without_touching(make_cluster: MakeCluster) -> None:
    """Paper Fig. 7: A in blocks 7, 1 and 3, B in blocks 5 and 2; neighbours in a table are none in memory."""
    cluster = make_cluster(max_steps_in_flight=1)
    join(cluster, [7, 1, 5, 2, 3])
    requests = [request_of("A", FOUR_SCORE, 4), request_of("B", BEST_OF_TIMES, 4)]
    cluster.submit(*requests)
    for _ in range(3):
        cluster.step()
    assert (table(cluster, "A"), filled(cluster, "A")) == ([7, 1, 3], [4, 4, 1])
    assert (table(cluster, "B"), filled(cluster, "B")) == ([5, 2], [4, 3])
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}


def test_two_samples_share_their_prompt_until_one_writes(make_cluster: MakeCluster) -> None:
    """Paper Fig. 8: blocks 7 and 1 are held twice; A1 writes to a copy of block 1 in block 3, A2 to block 1 itself."""
    cluster = make_cluster(max_steps_in_flight=1)
    replica = join(cluster, [7, 1, 3])
    kv = kv_of(cluster)
    request = request_of("A", FOUR_SCORE, 4, num_sequences=2, temperature=1.0)
    cluster.submit(request)
    cluster.step()
    assert [table(cluster, "A", index) for index in (0, 1)] == [[7, 1], [7, 1]]
    assert [kv.ref_count(block_id) for block_id in (7, 1, 3)] == [2, 2, 0]
    assert kv.num_missing(cluster.groups["A"].sequences) == 1
    cluster.step()
    assert [table(cluster, "A", index) for index in (0, 1)] == [[7, 3], [7, 1]]
    assert [kv.ref_count(block_id) for block_id in (7, 1, 3)] == [2, 1, 1]
    a1, a2 = cluster.groups["A"].sequences
    prompt, first = plans(replica)
    assert [(fork.parent_id, fork.sequence_id) for fork in prompt.forks] == [
        (a1.placement.sequence_id, a2.placement.sequence_id)
    ]
    assert [(work.num_tokens, work.new_block_ids) for work in prompt.work] == [(7, [[7, 1]])]
    assert first.moves.copy == [BlockMove(source=1, target=3)]
    assert first.remaps == [Remap(a1.placement.sequence_id, kv_group=0, logical_index=1, block_id=3)]
    cluster.run()
    assert cluster.outputs("A") == [reference_tokens(request, index) for index in (0, 1)]
    assert kv.num_free == 9


class Beams:
    """Beams over a real block manager, whose tokens and steps the test chooses."""

    def __init__(self, num_blocks: int) -> None:
        self.kv = KVCacheManager(num_blocks, block_size=4)
        self.copies = 0
        self._step_id = 0

    def start(self, prompt: list[int]) -> Sequence:
        beam = sequence_of(prompt)
        self.kv.allocate(group_of(beam), 1)
        self._computed(beam, len(prompt))
        return beam

    def fork(self, beam: Sequence) -> Sequence:
        child = beam.fork(index=0)
        self.kv.fork(beam, child)
        return child

    def decode(self, beam: Sequence, token: int) -> None:
        """The token is chosen, and computed in a step of its own."""
        beam.append(token)
        growth = self.kv.extend(beam)
        self.copies += len(growth.copies) if growth else 0
        self._computed(beam, 1)

    def _computed(self, beam: Sequence, num_tokens: int) -> None:
        self._step_id += 1
        beam.placement.num_computed += num_tokens
        assert self.kv.index(beam, self._step_id) == []
        self.kv.step_answered(self._step_id, valid=True)

    def decode_block(self, *beams: Sequence) -> None:
        """Four tokens for each, side by side and different from beam to beam."""
        for position in range(4):
            for number, beam in enumerate(beams):
                self.decode(beam, 10 * position + number)

    def table(self, beam: Sequence) -> list[int]:
        (blocks,) = self.kv.block_table(beam)
        return list(blocks)


def test_beams_share_the_blocks_of_their_common_past() -> None:
    """Paper Fig. 9: four beams with four full blocks each; the next four all come from candidates 1 and 2. Blocks 2, 4,
    5 and 8 are freed and blocks 9 to 12 allocated (the freed ones are full, so they stay findable as long as others are
    empty); nothing is copied."""
    beams = Beams(num_blocks=13)
    c0 = beams.start([1, 2, 3, 4])
    c3 = beams.fork(c0)
    for _ in range(2):
        beams.decode_block(c0, c3)
    c1, c2 = beams.fork(c0), beams.fork(c0)
    beams.decode_block(c0, c1, c2, c3)
    assert list(map(beams.table, (c0, c1, c2, c3))) == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    assert [beams.kv.ref_count(block_id) for block_id in range(13)] == [4, 3, 1, 3, 1, 1, 1, 1, 1, 0, 0, 0, 0]

    for beam in (c0, c3):
        beams.kv.free(beam)
    assert [block_id for block_id in range(9) if not beams.kv.ref_count(block_id)] == [2, 4, 5, 8]
    new = (c1, beams.fork(c1), c2, beams.fork(c2))
    for number, beam in enumerate(new):
        beams.decode(beam, 50 + number)
    assert list(map(beams.table, new)) == [[0, 1, 3, 6, 9], [0, 1, 3, 6, 10], [0, 1, 3, 7, 11], [0, 1, 3, 7, 12]]
    assert [beams.kv.ref_count(block_id) for block_id in (0, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]
    assert [beams.kv.ref_count(block_id) for block_id in (9, 10, 11, 12)] == [1, 1, 1, 1]
    assert beams.copies == 0
    beams.kv.check()


def test_a_beam_that_forks_inside_a_block_copies_that_block_alone() -> None:
    """After Fig. 9: candidate 3 goes on from candidate 2 in the middle of a block."""
    beams = Beams(num_blocks=13)
    c2 = beams.start(list(range(16)))
    for token in (50, 51):
        beams.decode(c2, token)
    c3 = beams.fork(c2)
    beams.decode(c3, 60)
    beams.decode(c2, 61)
    assert (beams.table(c2), beams.table(c3)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 5])
    assert beams.copies == 1


def test_prefill_chunks_fill_the_budget_first_come_first_served(make_cluster: MakeCluster) -> None:
    """Budget 10, prompts of 3, 5 and 12 tokens: the third gets 2, then 8, then 2."""
    cluster = make_cluster(max_num_batched_tokens=10, max_steps_in_flight=1)
    replica = cluster.join()
    cluster.submit(*(make_request(f"R{n}", length, max_tokens=8) for n, length in enumerate((3, 5, 12), 1)))
    for _ in range(4):
        cluster.step()
    shares = [[work.num_tokens for work in plan.work] for plan in plans(replica)]
    assert shares == [[3, 5, 2], [1, 1, 8], [1, 1, 2], [1, 1, 1]]
