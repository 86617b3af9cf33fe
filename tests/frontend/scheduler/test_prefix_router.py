"""Which cell gets a request: the rule, what is remembered, and what no order of events may break."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.scheduler.prefix_router import CellLoad, PrefixRouter
from octavo.scheduler.core.sequence import Sequence as ScheduledSequence
from octavo.scheduler.kv.prefix_cache import block_hashes
from octavo.wire.requests import NO_CACHE_KEY, CacheKey

_IDLE = CellLoad(replicas=1, work_tokens=0)


def _prompt(start: int, length: int = 64) -> list[int]:
    return list(range(start, start + length))


def _busy(*work_tokens: int) -> list[CellLoad | None]:
    return [CellLoad(1, tokens) for tokens in work_tokens]


class TestLoad:
    def test_the_least_work_per_replica_wins(self) -> None:
        loads = [CellLoad(1, 100), CellLoad(10, 500), CellLoad(2, 150)]
        assert PrefixRouter(3).choose(_prompt(0), NO_CACHE_KEY, loads) == 1

    def test_cells_alike_take_turns(self) -> None:
        router = PrefixRouter(3, first=1)
        chosen = [router.choose(_prompt(100 * i), NO_CACHE_KEY, [_IDLE] * 3) for i in range(5)]
        assert chosen == [1, 2, 0, 1, 2]

    def test_a_cell_without_replicas_is_chosen_only_where_all_are(self) -> None:
        loads = [CellLoad(0, 0), CellLoad(1, 10**6)]
        assert PrefixRouter(2).choose(_prompt(0), NO_CACHE_KEY, loads) == 1
        assert PrefixRouter(2).choose(_prompt(0), NO_CACHE_KEY, [CellLoad(0, 20), CellLoad(0, 10)]) == 1

    def test_a_cell_that_cannot_take_the_request_is_left_out(self) -> None:
        assert PrefixRouter(2).choose(_prompt(0), NO_CACHE_KEY, [None, CellLoad(0, 10**6)]) == 1
        assert PrefixRouter(2).choose(_prompt(0), NO_CACHE_KEY, [None, None]) is None

    def test_a_prompt_without_a_full_block_goes_by_load(self) -> None:
        assert PrefixRouter(2).choose([1], NO_CACHE_KEY, _busy(5, 4)) == 1


class TestPrefix:
    def test_equal_beginnings_stick_to_a_cell(self) -> None:
        router = PrefixRouter(4)
        first = router.choose(_prompt(0) + _prompt(1000), NO_CACHE_KEY, [_IDLE] * 4)
        for i in range(2, 6):
            assert router.choose(_prompt(0) + _prompt(i * 1000), NO_CACHE_KEY, [_IDLE] * 4) == first

    @pytest.mark.parametrize(("excess", "chosen"), [(64, 0), (65, 1)])
    def test_a_prefix_is_worth_the_work_it_saves(self, excess: int, chosen: int) -> None:
        router = PrefixRouter(2)
        router.choose(_prompt(0), NO_CACHE_KEY, _busy(0, 1))
        assert router.choose([*_prompt(0), 7], NO_CACHE_KEY, _busy(excess, 0)) == chosen

    @pytest.mark.parametrize(("work", "chosen"), [(1264, 0), (1265, 1)])
    def test_among_busy_cells_a_share_of_the_load_more_is_borne(self, work: int, chosen: int) -> None:
        router = PrefixRouter(2, imbalance=0.2)
        router.choose(_prompt(0), NO_CACHE_KEY, _busy(0, 1))
        assert router.choose([*_prompt(0), 7], NO_CACHE_KEY, _busy(work, 1000)) == chosen

    def test_the_longest_prefix_wins_over_a_shorter_one(self) -> None:
        router = PrefixRouter(2)
        router.choose(_prompt(0, 32), NO_CACHE_KEY, _busy(0, 1))
        router.choose(_prompt(0, 64), NO_CACHE_KEY, _busy(10**6, 0))
        assert router.choose(_prompt(0, 65), NO_CACHE_KEY, _busy(0, 10)) == 1

    def test_where_the_longest_is_too_busy_a_shorter_one_serves(self) -> None:
        router = PrefixRouter(3)
        router.choose(_prompt(0, 64), NO_CACHE_KEY, _busy(0, 1, 1))
        router.choose(_prompt(0, 32), NO_CACHE_KEY, _busy(10**6, 0, 1))
        assert router.choose(_prompt(0, 65), NO_CACHE_KEY, _busy(10**6, 20, 0)) == 1

    def test_a_hot_prefix_spreads(self) -> None:
        router, work = PrefixRouter(4), [0, 0, 0, 0]
        for i in range(400):
            cell = router.choose(_prompt(0) + _prompt(1000 + i, 16), NO_CACHE_KEY, _busy(*work))
            assert cell is not None
            work[cell] += 300
        assert min(work) > 0.6 * max(work)

    @pytest.mark.parametrize(("length", "chosen"), [(16, 1), (17, 0)])
    def test_the_last_token_is_never_saved(self, length: int, chosen: int) -> None:
        router = PrefixRouter(2)
        router.choose(_prompt(0, 16), NO_CACHE_KEY, _busy(0, 1))
        assert router.choose(_prompt(0, length), NO_CACHE_KEY, _busy(1, 0)) == chosen

    def test_a_cell_that_was_lost_has_no_prefixes(self) -> None:
        router = PrefixRouter(2)
        router.choose(_prompt(0), NO_CACHE_KEY, _busy(0, 1))
        router.lost(0)
        assert len(router) == 0
        assert router.choose(_prompt(0), NO_CACHE_KEY, _busy(1, 0)) == 1


class TestSalts:
    def test_tenants_do_not_find_each_others_prompts(self) -> None:
        router = PrefixRouter(2)
        router.choose(_prompt(0), CacheKey(salt="mine"), _busy(0, 1))
        assert router.choose(_prompt(0), CacheKey(salt="yours"), _busy(1, 0)) == 1
        assert router.choose([*_prompt(0), 7], CacheKey(salt="mine"), _busy(1, 0)) == 0

    @given(
        salts=st.tuples(*[st.sampled_from(["", "mine", "yours"])] * 2),
        salted_from=st.tuples(*[st.integers(0, 12)] * 2),
        adapters=st.tuples(*[st.sampled_from(["", "mine"])] * 2),
        prompts=st.tuples(*[st.lists(st.integers(0, 1), min_size=12, max_size=13)] * 2),
        block_size=st.integers(1, 4),
    )
    def test_what_is_shared_is_what_a_scheduler_shares(
        self,
        salts: tuple[str, str],
        salted_from: tuple[int, int],
        adapters: tuple[str, str],
        prompts: tuple[list[int], list[int]],
        block_size: int,
    ) -> None:
        keys = [CacheKey(adapters[i], salts[i], salted_from[i]) for i in range(2)]
        mine, yours = (block_hashes(ScheduledSequence(0, prompts[i], [], 0, keys[i]), block_size) for i in range(2))
        usable = yours[: (len(prompts[1]) - 1) // block_size]
        shared = block_size * sum(a == b for a, b in zip(mine, usable, strict=False))

        def chosen(excess: int) -> int | None:
            router = PrefixRouter(2, block_size=block_size)
            router.choose(prompts[0], keys[0], _busy(0, 1))
            return router.choose(prompts[1], keys[1], _busy(excess, 0))

        assert chosen(shared + 1) == 1
        assert chosen(max(shared, 1)) == (0 if shared else 1)


class TestMemory:
    def test_it_is_bounded_and_the_latest_stay(self) -> None:
        router = PrefixRouter(2, max_blocks=8)
        for i in range(100):
            router.choose(_prompt(1000 * i), NO_CACHE_KEY, _busy(i % 2, 1 - i % 2))
        assert len(router) == 8
        assert router.choose([*_prompt(99_000), 7], NO_CACHE_KEY, _busy(0, 1)) == 1
        assert router.choose([*_prompt(0), 7], NO_CACHE_KEY, _busy(1, 0)) == 1

    def test_what_is_used_is_not_forgotten(self) -> None:
        router = PrefixRouter(2, max_blocks=8)
        router.choose(_prompt(0), NO_CACHE_KEY, _busy(0, 1))
        for i in range(1, 100):
            router.choose(_prompt(1000 * i), NO_CACHE_KEY, _busy(1, 0))
            assert router.choose([*_prompt(0), 7], NO_CACHE_KEY, _busy(1, 0)) == 0

    def test_a_prompt_longer_than_the_memory_keeps_its_head(self) -> None:
        router = PrefixRouter(2, max_blocks=4)
        router.choose(_prompt(0, 1600), NO_CACHE_KEY, _busy(0, 1))
        assert len(router) == 4
        assert router.choose(_prompt(0, 1600), NO_CACHE_KEY, _busy(64, 0)) == 0
        assert router.choose(_prompt(0, 1600), NO_CACHE_KEY, _busy(65, 0)) == 1


@given(data=st.data(), num_cells=st.integers(1, 5), max_blocks=st.integers(0, 12))
def test_whatever_comes_a_cell_that_may_is_chosen_and_not_too_busy_a_one(
    data: st.DataObject, num_cells: int, max_blocks: int
) -> None:
    router = PrefixRouter(num_cells, block_size=2, max_blocks=max_blocks, imbalance=0.5)
    load = st.none() | st.builds(CellLoad, st.integers(0, 2), st.integers(0, 40))
    for _ in range(data.draw(st.integers(1, 15))):
        if data.draw(st.booleans()):
            router.lost(data.draw(st.integers(0, num_cells - 1)))
        prompt = data.draw(st.lists(st.integers(0, 1), max_size=9))
        loads = data.draw(st.lists(load, min_size=num_cells, max_size=num_cells))
        chosen = router.choose(prompt, NO_CACHE_KEY, loads)
        assert len(router) <= max_blocks
        usable = [each for each in loads if each and each.replicas] or [each for each in loads if each]
        if chosen is None:
            assert not usable
            continue
        mine = loads[chosen]
        assert mine in usable
        assert _pressure(mine) <= 1.5 * min(map(_pressure, usable)) + len(prompt)


def _pressure(load: CellLoad | None) -> float:
    assert load
    return load.work_tokens / max(load.replicas, 1)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=8), st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_the_same_again_is_the_same_choice(calls: list[tuple[list[int], int, int]]) -> None:
    routers = PrefixRouter(2, block_size=2, max_blocks=6), PrefixRouter(2, block_size=2, max_blocks=6)
    for prompt, *work in calls:
        one, two = (router.choose(prompt, NO_CACHE_KEY, _busy(*work)) for router in routers)
        assert one == two
