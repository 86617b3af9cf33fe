"""Where the beginning of a request was found, and why the rest was not: what is said is what happened, and nobody is
told what others have sent."""

import msgspec
import pytest

from octavo.scheduler.core.events import CacheReset
from octavo.scheduler.core.lookups import history as lookups
from octavo.scheduler.core.lookups.history import CacheExplanation, MissReason
from octavo.scheduler.core.sequence import RequestGroup, TierTokens
from octavo.scheduler.kv import blocks
from octavo.scheduler.kv.prefix_cache import CachedBlock
from octavo.testing.cluster import Cluster, FakeDisk, make_request
from octavo.wire.requests import CacheKey, Request

from ...conftest import MakeCluster

# Blocks of 4 tokens.
OLD = make_request("old", 17, 3, tenant="a")


def like(request: Request, name: str, *, tokens: list[int] | None = None, **changes: object) -> Request:
    """The same request under another name, with other tokens or changes."""
    prompt = request.prompt_token_ids if tokens is None else tokens
    return msgspec.structs.replace(request, request_id=name, prompt_token_ids=prompt, **changes)


def serve(cluster: Cluster, *requests: Request) -> None:
    for request in requests:
        cluster.submit(request)
        cluster.run()


def told(cluster: Cluster, request: Request, asker: str | None = "a") -> CacheExplanation:
    """What is said of it once it has ended."""
    [lookup] = cluster.core.state.lookups.of(request.request_id)
    return cluster.core.state.explain_cache(lookup, asker)


def answered(cluster: Cluster, request: Request, asker: str | None = "a") -> CacheExplanation:
    serve(cluster, request)
    return told(cluster, request, asker)


@pytest.fixture
def served(make_cluster: MakeCluster) -> Cluster:
    """A cluster that has served `OLD`."""
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=40)
    serve(cluster, OLD)
    return cluster


def test_what_nobody_has_sent_was_never_computed(served: Cluster) -> None:
    found = told(served, OLD)
    assert (found.reason, found.found, found.num_tokens) == (MissReason.UNKNOWN, TierTokens(), 17)
    assert (found.position, found.worker_id) == (0, "worker-1")


def test_all_but_the_last_token_may_be_found(served: Cluster) -> None:
    found = answered(served, like(OLD, "again"))
    assert (found.reason, found.found, found.position) == (MissReason.SHORT, TierTokens(device=16), 16)


@pytest.mark.parametrize("at", [1, 4, 7, 15])
def test_the_first_token_that_differs_is_named(served: Cluster, at: int) -> None:
    tokens = [*OLD.prompt_token_ids]
    tokens[at] = (tokens[at] + 1) % 50
    found = answered(served, like(OLD, "other", tokens=tokens))
    assert (found.reason, found.position) == (MissReason.DIFFERS, at)
    assert (found.token, found.other_token) == (tokens[at], OLD.prompt_token_ids[at])
    assert found.found == TierTokens(device=at // 4 * 4)


def test_a_turn_that_goes_on_with_another_answer_differs_in_the_answer(served: Cluster) -> None:
    answer = served.tokens["old"]
    tokens = [*OLD.prompt_token_ids, answer[0], (answer[1] + 1) % 50, *range(9)]
    found = answered(served, like(OLD, "turn", tokens=tokens))
    assert (found.reason, found.position, found.other_token) == (MissReason.DIFFERS, 18, answer[1])


def test_what_was_known_may_end(served: Cluster) -> None:
    tokens = [*OLD.prompt_token_ids, *served.tokens["old"], *range(9)]
    found = answered(served, like(OLD, "turn", tokens=tokens))
    assert (found.reason, found.position, found.token) == (MissReason.ENDS, 19, None)


def test_of_several_the_longest_is_named(served: Cluster) -> None:
    nearer, asked = [*OLD.prompt_token_ids], [*OLD.prompt_token_ids]
    nearer[14] = (nearer[14] + 1) % 50
    asked[14], asked[15] = nearer[14], (asked[15] + 1) % 50
    serve(served, like(OLD, "nearer", tokens=nearer), like(OLD, "far", tokens=[*OLD.prompt_token_ids[:5], *range(12)]))
    found = answered(served, like(OLD, "asked", tokens=asked))
    assert (found.reason, found.position, found.other_token) == (MissReason.DIFFERS, 15, OLD.prompt_token_ids[15])


def test_what_made_way_is_told_with_its_time(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=6)
    serve(cluster, OLD)
    cluster.now += 10.0
    serve(cluster, make_request("new", 20, 3))
    taken_at = cluster.now
    cluster.now += 5.0
    found = answered(cluster, like(OLD, "again"))
    assert (found.reason, found.position) == (MissReason.EVICTED, 0)
    assert found.evicted_s is not None
    assert 5.0 <= found.evicted_s <= 5.0 + taken_at - 10.0
    # Even so after a long time: what counts is when the request came.
    cluster.now += 100.0
    assert told(cluster, like(OLD, "again")) == found


def test_what_others_take_later_is_no_reason(served: Cluster) -> None:
    other = like(OLD, "other", tokens=[*OLD.prompt_token_ids[:6], *range(11)])
    found = answered(served, other)
    assert found.reason is MissReason.DIFFERS
    serve(served, make_request("large", 150, 3), make_request("larger", 155, 3))
    assert told(served, other) == found
    assert answered(served, like(OLD, "last")).reason is MissReason.EVICTED


def test_another_salt_is_told_to_the_tenant_alone(served: Cluster) -> None:
    salted = like(OLD, "salted", cache_key=CacheKey(salt="s"))
    found = answered(served, salted)
    assert (found.reason, found.found, found.token, found.other_token) == (
        MissReason.OTHER_SALT,
        TierTokens(),
        None,
        None,
    )
    assert told(served, salted, None).reason is MissReason.OTHER_SALT
    for asker in ("b", ""):
        assert told(served, salted, asker).reason is MissReason.UNKNOWN


def test_no_token_behind_another_salt_is_named(served: Cluster) -> None:
    tokens = [*OLD.prompt_token_ids[:14], 1, 2, 3]
    found = answered(served, like(OLD, "salted", tokens=tokens, cache_key=CacheKey(salt="s")), None)
    assert (found.reason, found.token, found.other_token) == (MissReason.OTHER_SALT, None, None)
    short = like(OLD, "short", tokens=[*OLD.prompt_token_ids[:3], 1, 2, 3], cache_key=CacheKey(salt="t"))
    assert answered(served, short, None).reason is MissReason.UNKNOWN


def test_what_another_tenant_has_sent_is_not_known(served: Cluster) -> None:
    """Without a salt its blocks are found, as a prefix hit tells; its tokens are nobody else's."""
    theirs = like(OLD, "theirs", tokens=[*OLD.prompt_token_ids[:7], *range(10)], tenant="b")
    serve(served, theirs)
    for asker in ("b", "a", "", None):
        found = told(served, theirs, asker)
        assert (found.found, found.position) == (TierTokens(device=4), 4)
        assert (found.reason, found.token, found.other_token) == (MissReason.UNKNOWN, None, None)


def test_without_tenants_an_operator_alone_is_told_of_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=40)
    nobodys = like(OLD, "nobody's", tenant="")
    serve(cluster, nobodys)
    probe = like(nobodys, "probe", tokens=[*OLD.prompt_token_ids[:6], 1, 1, 1, 1])
    found = answered(cluster, probe, "")
    assert (found.reason, found.position, found.token, found.other_token) == (MissReason.UNKNOWN, 4, None, None)
    assert told(cluster, probe, None).reason is MissReason.DIFFERS
    ends = like(nobodys, "ends", tokens=[*nobodys.prompt_token_ids, *cluster.tokens["nobody's"], *range(9)])
    assert answered(cluster, ends, "").reason is MissReason.UNKNOWN


def test_another_worker_is_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(1, num_blocks=40)
    serve(cluster, OLD)
    cluster.leave(1)
    cluster.join(2, num_blocks=40)
    found = answered(cluster, like(OLD, "again"))
    assert (found.reason, found.elsewhere, found.worker_id) == (MissReason.OTHER_WORKER, "worker-1", "worker-2")


def test_a_reset_makes_all_forgotten(served: Cluster) -> None:
    served.handle(CacheReset(None))
    assert len(served.core.state.lookups) == served.core.state.lookups.num_tokens == 0
    assert answered(served, like(OLD, "again")).reason is MissReason.UNKNOWN


def test_a_reset_of_a_salt_leaves_the_others(served: Cluster) -> None:
    salted = like(OLD, "salted", cache_key=CacheKey(salt="s"))
    serve(served, salted)
    served.handle(CacheReset("s"))
    assert served.core.state.lookups.of("salted") == []
    assert told(served, OLD).reason is MissReason.UNKNOWN
    # Nobody else's is told for it either.
    assert answered(served, like(salted, "again")).reason is MissReason.OTHER_SALT


def test_prompts_of_which_all_is_computed_say_why(make_cluster: MakeCluster, served: Cluster) -> None:
    sampling = msgspec.structs.replace(OLD.sampling, prompt_logprobs=1)
    assert answered(served, like(OLD, "scored", sampling=sampling)).reason is MissReason.BYPASSED
    cluster = make_cluster(prefix_caching=False)
    cluster.join(num_blocks=40)
    serve(cluster, OLD)
    assert answered(cluster, like(OLD, "again")).reason is MissReason.OFF


def test_what_comes_from_cpu_memory_and_from_the_disk_is_told_apart(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(1, num_blocks=6, num_cpu_blocks=20, disk=disk, mirror=True)
    serve(cluster, OLD, make_request("new", 20, 3))
    found = answered(cluster, like(OLD, "again"))
    assert found.reason is MissReason.SHORT
    assert found.found.total == 16
    assert found.found.cpu > 0
    assert found.found.disk == 0
    for _ in range(8):
        cluster.step()
    cluster.leave(1)
    cluster.join(2, num_blocks=40, num_cpu_blocks=40, disk=disk)
    found = answered(cluster, like(OLD, "restarted"))
    assert (found.reason, found.found) == (MissReason.SHORT, TierTokens(disk=16))
    # It is on the device from then on.
    assert answered(cluster, like(OLD, "then")).found == TierTokens(device=16)
    # What has made way there is in CPU memory, wherever it had come from.
    serve(cluster, make_request("large", 150, 3))
    late = answered(cluster, like(OLD, "late")).found
    assert (late.total, late.disk) == (16, 0)
    assert late.cpu > 0


def test_what_is_remembered_is_bounded(served: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    history = served.core.state.lookups
    assert history.num_tokens == 17 + 3
    monkeypatch.setattr(lookups, "MOST_TOKENS", 50)
    serve(served, like(OLD, "second"))
    assert (len(history), history.num_tokens) == (2, 40)
    serve(served, like(OLD, "third"))
    assert (len(history), history.num_tokens) == (2, 40)
    assert history.of("old") == []
    monkeypatch.setattr(lookups, "MOST_LOOKUPS", 1)
    serve(served, like(OLD, "fourth"))
    assert (len(history), history.num_tokens) == (1, 20)


def test_evictions_that_are_remembered_are_bounded() -> None:
    evictions = blocks.Evictions()
    for at in range(blocks.MOST_EVICTIONS + 1):
        evictions.now = float(at)
        evictions.add(CachedBlock(b"%d" % at, 0, 0))
    assert evictions.last(b"0", before=1e9) is None
    assert evictions.last(b"1", before=1e9) == 1.0


def test_a_request_that_runs_is_told_too(served: Cluster) -> None:
    request = like(OLD, "again")
    served.submit(request)
    group = served.groups["again"]
    assert isinstance(group, RequestGroup)
    assert served.core.state.explain_cache_of(group, "a") is None
    served.step()
    found = served.core.state.explain_cache_of(group, "a")
    assert found is not None
    assert found.found == TierTokens(device=16)
    assert served.core.state.lookups.of("again") == []
