"""The store of responses alone: tenants, chains, pages, room, age, lost frontends, several writers."""

import json
import multiprocessing
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.frontend.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded, Reason, ServiceError
from octavo.frontend.openai.response_answer import event_of
from octavo.frontend.stored.database import StoreError
from octavo.frontend.stored.store import OVERHEAD, Store
from octavo.frontend.stored.values import Kind, Limits, NewRecord, Outcome, Progress

ROOMY = Limits(1 << 30, 0, 1000.0)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = Store(tmp_path / "responses", ROOMY, clock)
    yield store
    store.close()


def output(text: str) -> list[dict[str, Any]]:
    return [{"id": f"msg_{text}", "type": "message", "role": "assistant", "content": text}]


def body_of(text: str, status: str = "completed") -> bytes:
    return msgspec.json.encode({"status": status, "output": output(text)})


def add(store: Store, name: str, *, tenant: str = "t", status: str = "completed", **fields: Any) -> int:
    new = NewRecord(
        Kind.RESPONSE, tenant, f"resp_{name}", body_of(name, status), json.dumps(f"asked {name}").encode(), **fields
    )
    return store.add(new, ended=status not in ("queued", "in_progress"))


def add_conversation(store: Store, name: str, items: list[dict[str, Any]]) -> int:
    return store.add(NewRecord(Kind.CONVERSATION, "t", name, b"{}", json.dumps(items).encode()))


def said(texts: Any) -> list[str]:
    """What the items of turns say, in order."""
    contents = [item["content"] for text in texts for item in msgspec.json.decode(text)]
    return [content if isinstance(content, str) else content[0]["text"] for content in contents]


def find(store: Store, name: str, tenant: str = "t") -> Any:
    return store.find(Kind.RESPONSE, tenant, f"resp_{name}")


def is_there(store: Store, name: str, tenant: str = "t") -> bool:
    try:
        find(store, name, tenant)
    except NotFound:
        return False
    return True


def test_a_response_is_found_by_its_tenant_alone(store: Store) -> None:
    add(store, "a")
    assert msgspec.json.decode(find(store, "a").body)["status"] == "completed"
    with pytest.raises(NotFound) as other:
        find(store, "a", "someone else")
    with pytest.raises(NotFound) as missing:
        find(store, "b")
    assert str(other.value).replace("resp_a", "resp_b") == str(missing.value), "it tells that another has it"
    with pytest.raises(NotFound):
        store.find(Kind.CONVERSATION, "t", "resp_a")
    for tenant, name in (("x", "resp_a"), ("t", "resp_b\ud800")):
        with pytest.raises(InvalidRequest) as refused:
            store.turns_before(tenant, name)
        assert refused.value.reason is Reason.PREVIOUS_RESPONSE_NOT_FOUND
    add(store, "a", tenant="someone else")
    with pytest.raises(AlreadyExists):
        add(store, "a")


def test_turns_come_oldest_first_with_what_was_asked_before_what_was_answered(store: Store) -> None:
    key = None
    for name in "abc":
        key = add(store, name, previous=key)
    before = store.turns_before("t", "resp_c")
    assert before.key == key
    assert said(before.items) == ["asked a", "a", "asked b", "b", "asked c", "c"]


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_nothing_goes_on_from_a_response_without_a_whole_answer(store: Store, status: str) -> None:
    add(store, "a", status=status)
    with pytest.raises(InvalidRequest, match=f"previous_response_id is 'resp_a', which is {status}, but"):
        store.turns_before("t", "resp_a")


def test_a_chain_with_a_hole_is_no_chain_even_where_the_id_is_taken_again(store: Store) -> None:
    first = add(store, "a")
    second = add(store, "b", previous=first)
    store.remove(Kind.RESPONSE, "t", "resp_a")
    with pytest.raises(InvalidRequest, match="'resp_b' follows a response that was deleted"):
        store.turns_before("t", "resp_b")
    # With ids alone the two would follow from each other.
    assert add(store, "a", previous=second) > second
    with pytest.raises(InvalidRequest, match="'resp_a' follows a response that was deleted"):
        store.turns_before("t", "resp_a")


def test_what_came_before_is_bounded_as_a_body_is(store: Store) -> None:
    key = None
    for name in "abc":
        new = NewRecord(
            Kind.RESPONSE, "t", f"resp_{name}", body_of(name), json.dumps("x" * 2_000_000).encode(), previous=key
        )
        key = store.add(new, ended=True)
    store.turns_before("t", "resp_b")
    with pytest.raises(InvalidRequest) as refused:
        store.turns_before("t", "resp_c")
    assert refused.value.reason is Reason.TOO_LARGE


def test_items_are_listed_in_pages_both_ways(store: Store) -> None:
    items = [{"id": f"item{place}", "type": "message", "role": "user", "content": str(place)} for place in range(5)]
    key = store.add(NewRecord(Kind.RESPONSE, "t", "resp_a", body_of("a"), json.dumps(items).encode()), ended=True)

    def page(after: str | None, limit: int, *, newest_first: bool) -> list[str]:
        found = store.items(key, after, limit, newest_first=newest_first)
        return [msgspec.json.decode(item)["id"] for item in found]

    assert page(None, 2, newest_first=False) == ["item0", "item1"]
    assert page("item1", 2, newest_first=False) == ["item2", "item3"]
    assert page(None, 9, newest_first=True) == ["item4", "item3", "item2", "item1", "item0"]
    assert page("item1", 9, newest_first=True) == ["item0"]
    assert page("item4", 9, newest_first=False) == []
    with pytest.raises(InvalidRequest, match="after is 'item9'"):
        page("item9", 9, newest_first=False)


def test_a_conversation_gets_the_turns_that_have_an_answer(store: Store) -> None:
    add_conversation(store, "conv_a", [{"id": "x", "type": "message", "role": "user", "content": "0"}])
    key = store.conversation_before("t", "conv_a").key
    add(store, "a", conversation=key)
    add(store, "b", conversation=key, status="failed")
    background = add(store, "c", conversation=key, status="queued", is_background=True)
    store.advance([Progress(background, 0, [], body_of("c", "incomplete"), ended=True)])
    assert said(store.conversation_before("t", "conv_a").items) == ["0", "asked a", "a", "asked c", "c"]
    store.remove(Kind.CONVERSATION, "t", "conv_a")
    # Its responses stay, and one that ends later does no harm.
    last = add(store, "d", conversation=key, status="queued", is_background=True)
    assert store.advance([Progress(last, 0, [], body_of("d"), ended=True)]) == {last: Outcome.KEPT}
    assert all(is_there(store, name) for name in "abcd")


def test_an_id_that_a_conversation_has_is_given_no_second_item(store: Store) -> None:
    item = {"id": "x", "type": "message", "role": "user", "content": "0"}
    add_conversation(store, "conv_a", [item])
    [again] = store.add_items("t", "conv_a", [item])
    assert msgspec.json.decode(again)["id"].startswith("msg_")
    store.remove_item("t", "conv_a", "x")
    with pytest.raises(NotFound):
        store.item(store.conversation_before("t", "conv_a").key, "x")
    assert said(store.conversation_before("t", "conv_a").items) == ["0"]


def test_items_are_named_by_their_tenant_alone(store: Store, clock: Clock) -> None:
    answer = [{"id": "msg_0_a", "type": "message", "role": "assistant", "content": "a"}]
    body = msgspec.json.encode({"status": "completed", "output": answer})
    mine = [{"id": "mine", "type": "message", "role": "user", "content": "first"}]
    store.add(NewRecord(Kind.RESPONSE, "t", "resp_a", body, json.dumps(mine).encode()), ended=True)
    add_conversation(store, "conv_a", [{**mine[0], "content": "second"}, {**answer[0], "content": "b"}])
    found = store.items_named("t", {"mine": "", "msg_0_a": ""})
    # The latest that was said under that id; and what was answered, whoever says something else.
    assert said([b"[%b]" % item for item in found.values()]) == ["second", "a"]
    for item_id in ("mine", "msg_0_a"):
        with pytest.raises(NotFound) as refused:
            store.items_named("someone else", {item_id: "input[3].id"})
        assert refused.value.metadata["field"] == "input[3].id"
    store.remove(Kind.RESPONSE, "t", "resp_a")
    assert said([b"[%b]" % item for item in store.items_named("t", {"msg_0_a": ""}).values()]) == ["b"]
    clock.time += 1100
    with pytest.raises(NotFound):
        store.items_named("t", {"mine": ""})
    large = [{"id": str(n), "type": "message", "role": "user", "content": "x" * 1_000_000} for n in range(5)]
    add_conversation(store, "conv_b", large)
    with pytest.raises(InvalidRequest, match="what was said before has more than"):
        store.items_named("t", {item["id"]: "" for item in large})


# -- room and age ------------------------------------------------------------------------------------------------------


def test_what_is_used_least_makes_way_of_the_tenant_that_exceeds_its_bound(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path / "s", ROOMY, clock)
    add(store, "other", tenant="other")
    (size,) = store._connection.execute("SELECT num_bytes FROM records").fetchone()
    # By less than a record the names may make them longer.
    store._limits = Limits(1 << 30, 3 * size + size // 2, 1000.0)
    for name in "abc":
        clock.time += 100
        add(store, name)
    clock.time += 100
    find(store, "a")
    for name in "de":
        clock.time += 1
        add(store, name)
    assert [name for name in "abcde" if is_there(store, name)] == ["a", "d", "e"]
    assert is_there(store, "other", "other")
    assert store.removals.evicted == 2
    store.close()


def test_one_tenant_cannot_push_out_another(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path / "s", Limits(6 * (OVERHEAD + 200), 0, 1000.0), clock)
    add(store, "mine", tenant="small")
    for number in range(20):
        clock.time += 1
        add(store, str(number), tenant="large")
    assert is_there(store, "mine", "small")
    assert is_there(store, "19", "large")
    store.close()


def test_what_alone_takes_more_than_there_may_be_is_refused_and_removes_nothing(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path / "s", Limits(10_000, 0, 1000.0), clock)
    running = add(store, "a", status="in_progress")
    with pytest.raises(Overloaded) as refused:
        store.add(NewRecord(Kind.RESPONSE, "t", "resp_b", body_of("b"), json.dumps("x" * 10_000).encode()), ended=True)
    assert refused.value.reason is Reason.STORE_FULL
    assert not is_there(store, "b")
    # What is being computed is not removed; it is told that there is no room, and its end is kept all the same.
    events = [os.urandom(20_000).hex().encode() + b"\n\n"]
    assert store.advance([Progress(running, 0, events, None, ended=False)]) == {running: Outcome.NO_ROOM}
    assert store.advance([Progress(running, 1, [], body_of("a", "failed"), ended=True)]) == {running: Outcome.KEPT}
    assert find(store, "a").ended
    store.close()


def test_what_is_not_used_expires_with_its_chain(store: Store, clock: Clock) -> None:
    first = add(store, "a")
    add(store, "alone")
    clock.time += 900
    add(store, "b", previous=store.turns_before("t", "resp_a").key)
    clock.time += 900
    assert not is_there(store, "alone"), "expired, if not swept out"
    assert said(store.turns_before("t", "resp_b").items) == ["asked a", "a", "asked b", "b"]
    # Its id is free again.
    add(store, "alone")
    assert first < find(store, "alone").key
    clock.time += 1001
    assert store.sweep() == (0, 0)
    assert store.removals.expired == 3


def test_to_go_on_from_a_response_is_a_use_however_soon_after_the_last(store: Store, clock: Clock) -> None:
    add(store, "a")
    clock.time += 30
    store.turns_before("t", "resp_a")
    clock.time += 980
    assert is_there(store, "a")


def test_what_is_still_computed_does_not_expire(store: Store, clock: Clock) -> None:
    add(store, "a", status="queued", is_background=True)
    clock.time += 5000
    store.sweep()
    assert not find(store, "a").ended


# -- what is computed --------------------------------------------------------------------------------------------------


def events_of(store: Store, key: int, first: int = 0) -> list[bytes]:
    found: list[bytes] = []
    while more := store.events(key, first + len(found)):
        found += more
    return found


def test_events_come_again_from_any_number_on_however_they_were_written(store: Store) -> None:
    key = add(store, "a", status="queued", is_background=True)
    events = [event_of("x", number, {"text": "\n\n: é"}) for number in range(100)]
    first = 0
    for size in (1, 0, 40, 59):
        assert store.advance([Progress(key, first, events[first : first + size], None, ended=False)])
        first += size
    for number in (0, 1, 2, 40, 99, 100):
        assert events_of(store, key, number) == events[number:]
    # The writer has not heard of its last success.
    store.advance([Progress(key, 41, events[41:], body_of("a"), ended=True)])
    assert events_of(store, key) == events


def test_a_frontend_learns_of_cancelled_and_removed_responses(store: Store) -> None:
    keys = [add(store, name, status="in_progress", is_background=True) for name in "abc"]
    store.cancel("t", "resp_b")
    store.cancel("other", "resp_a")
    store.remove(Kind.RESPONSE, "t", "resp_c")
    outcomes = store.advance([Progress(key, 0, [], None, ended=False) for key in keys])
    assert [outcomes[key] for key in keys] == [Outcome.KEPT, Outcome.CANCELLED, Outcome.GONE]


def test_a_response_whose_frontend_is_gone_has_failed_and_says_so(tmp_path: Path, clock: Clock, store: Store) -> None:
    gone = Store(tmp_path / "responses", ROOMY, clock)
    key = add(gone, "a", status="in_progress", is_background=True)
    gone.advance([Progress(key, 0, [event_of("created", 0, {})], None, ended=False)])
    assert not find(store, "a").ended
    # As the system does when the process ends.
    os.close(gone.owner._lock)
    found = find(store, "a")
    response = msgspec.json.decode(found.body)
    assert (found.ended, response["status"]) == (True, "failed")
    assert "frontend that computed this response ended" in response["error"]["message"]
    last = json.loads(events_of(store, key)[-1].decode().partition("data: ")[2])
    assert (last["type"], last["sequence_number"], last["response"]) == ("response.failed", 1, response)
    # What comes late from there is not taken.
    assert gone.advance([Progress(key, 1, [], body_of("a"), ended=True)]) == {key: Outcome.GONE}


def test_a_sweep_finds_the_responses_of_frontends_that_are_gone(tmp_path: Path, clock: Clock, store: Store) -> None:
    gone = Store(tmp_path / "responses", ROOMY, clock)
    add(gone, "a", status="queued", is_background=True)
    os.close(gone.owner._lock)
    store.sweep()
    [row] = store._execute("SELECT owner FROM records").fetchall()
    assert row["owner"] is None
    assert [path.name for path in (tmp_path / "responses").glob("*.lock")] == [f"frontend-{store.owner.name}.lock"]


def damage_its_items(store: Store, key: int) -> None:
    store._execute("UPDATE items SET body = ? WHERE record = ?", b"{", key)


def allow_little(store: Store, key: int) -> None:
    store._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2000)


def refuse_its_events(store: Store, key: int) -> None:
    store._execute(
        f"CREATE TRIGGER refuse BEFORE INSERT ON events WHEN new.record = {key} BEGIN"
        " SELECT raise(ABORT, 'refused'); END"
    )


def refuse_anything(store: Store, key: int) -> None:
    refuse_its_events(store, key)
    store._execute(
        f"CREATE TRIGGER refuse_it BEFORE UPDATE ON records WHEN new.key = {key} BEGIN"
        " SELECT raise(ABORT, 'refused'); END"
    )


@pytest.mark.parametrize("plant", [damage_its_items, allow_little, refuse_its_events, refuse_anything])
def test_a_response_that_cannot_be_written_fails_alone(
    store: Store, plant: Callable[[Store, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    add_conversation(store, "conv_a", [])
    conversation = store.conversation_before("t", "conv_a").key
    names = ("before", "bad", "after")
    keys = {name: add(store, name, status="in_progress", conversation=conversation) for name in names}
    plant(store, keys["bad"])
    events = [event_of("x", 0, {}), event_of("x", 1, {"text": os.urandom(4000).hex()})]
    progress = [
        Progress(keys[name], 0, events if name == "bad" else events[:1], body_of(name), ended=True) for name in names
    ]
    outcomes = store.advance(progress)
    kept = {keys["before"]: Outcome.KEPT, keys["after"]: Outcome.KEPT}
    assert outcomes == {**kept, keys["bad"]: Outcome.UNWRITABLE}
    assert "a response has failed that could not be written" in caplog.text
    store._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 30)
    for name in ("before", "after"):
        assert (find(store, name).status, events_of(store, keys[name])) == ("completed", events[:1])
    assert said(store.conversation_before("t", "conv_a").items) == [
        *("asked before", "before"),
        *("asked after", "after"),
    ]
    found = find(store, "bad")
    if plant is refuse_anything:
        # It can be read all the same, and removed.
        assert (found.status, found.ended) == ("in_progress", False)
        return
    response = msgspec.json.decode(found.body)
    assert (found.status, found.ended, response["error"]["code"]) == ("failed", True, "server_error")
    assert "could not be stored" in response["error"]["message"]
    told = [json.loads(event.decode().partition("data: ")[2]) for event in events_of(store, keys["bad"])]
    assert [event["type"] for event in told] == ([] if plant is refuse_its_events else ["response.failed"])
    if plant is not damage_its_items:
        assert_sound(store)


@pytest.mark.parametrize("damaged", [b"{", b"[]", b'{"status": "\xff"}'])
def test_a_damaged_response_of_a_frontend_that_is_gone_fails_beside_others(
    tmp_path: Path, clock: Clock, store: Store, damaged: bytes
) -> None:
    gone = Store(tmp_path / "responses", ROOMY, clock)
    for name in "abc":
        add(gone, name, status="in_progress", is_background=True)
    gone._execute("UPDATE records SET body = ? WHERE id = 'resp_a'", damaged)
    refuse_its_events(gone, find(gone, "b").key)
    os.close(gone.owner._lock)
    store.sweep()
    for name in "abc":
        response = msgspec.json.decode(find(store, name).body)
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_of_its_user_alone(tmp_path: Path, store: Store) -> None:
    add(store, "a")
    directory = tmp_path / "responses"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    with pytest.raises(StoreError, match=r"must be a directory of this user with mode 700, not 755"):
        Store(tmp_path / "s", ROOMY)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no database at all, but long enough" * 100, "file is not a database; name another place"),
        ("CREATE TABLE x (y)", "is a database of something else; name another directory"),
        (f"PRAGMA application_id = {0x4F637476}; PRAGMA user_version = 99", "has version 99 of the store"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line(tmp_path: Path, content: Any, told: str) -> None:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    path = directory / "responses.sqlite"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with sqlite3.connect(path) as connection:
            connection.executescript(content)
        connection.close()
    with pytest.raises(StoreError, match=told) as refused:
        Store(directory, ROOMY)
    assert "\n" not in str(refused.value)


def test_a_full_disk_loses_nothing_that_was_stored(store: Store) -> None:
    add(store, "a")
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.add(NewRecord(Kind.RESPONSE, "t", "resp_b", body_of("b"), json.dumps("x" * 100_000).encode()), ended=True)
    assert is_there(store, "a")
    assert not is_there(store, "b")
    store._connection.execute("PRAGMA max_page_count = 100000")
    add(store, "b")


def test_what_cannot_be_written_is_read_all_the_same(store: Store, clock: Clock) -> None:
    add(store, "a")
    clock.time += 500
    store._connection.execute("PRAGMA query_only = ON")
    assert find(store, "a").status == "completed"
    assert said(store.turns_before("t", "resp_a").items) == ["asked a", "a"]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        add(store, "b")


def _write_many(directory: Path, name: str, count: int, problems: Any) -> None:
    try:
        store = Store(directory, Limits(1 << 30, 40 * OVERHEAD, 1000.0))
        key = None
        for number in range(count):
            key = add(store, f"{name}{number}", previous=key)
            store.add_items("t", "conv_both", [{"id": f"{name}{number}", "type": "message", "content": "x"}])
        store.close()
    except Exception as error:
        problems.put(repr(error))


def test_two_processes_write_into_one_store(tmp_path: Path) -> None:
    directory, context = tmp_path / "s", multiprocessing.get_context("fork")
    with_both = Store(directory, ROOMY)
    add_conversation(with_both, "conv_both", [])
    problems = context.Queue()
    writers = [context.Process(target=_write_many, args=(directory, name, 30, problems)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert problems.empty(), problems.get()
    assert [writer.exitcode for writer in writers] == [0, 0]
    # The later of the two has pushed out what it had no room for.
    assert any(is_there(with_both, f"{name}29") for name in "ab")
    assert with_both.sweep()[1] <= 40 * OVERHEAD
    assert_sound(with_both)
    with_both.close()


def assert_sound(store: Store) -> None:
    """The file is whole, and all sums are what they are sums of."""
    assert store._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert store._connection.execute("PRAGMA foreign_key_check").fetchall() == []
    wrong = """
        SELECT id FROM records WHERE num_bytes != ? + length(body)
        + (SELECT coalesce(sum(length(body)), 0) FROM items WHERE record = key)
        + (SELECT coalesce(sum(length(body)), 0) FROM events WHERE record = key)"""
    assert store._connection.execute(wrong, (OVERHEAD,)).fetchall() == []
    sums = "SELECT tenant, sum(num_bytes) FROM records GROUP BY tenant ORDER BY tenant"
    tenants = "SELECT name, num_bytes FROM tenants ORDER BY name"
    assert store._connection.execute(sums).fetchall() == store._connection.execute(tenants).fetchall()


# -- any order ---------------------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Two frontends do anything in any order; a model in plain Python says what is there."""

    NAMES = st.sampled_from("abcde")
    TENANTS = st.sampled_from("tu")
    SIDES = st.sampled_from([0, 1])

    @initialize()
    def begin(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.clock = Clock()
        directory = Path(self.place.name) / "s"
        self.sides = [Store(directory, ROOMY, self.clock) for _ in range(2)]
        # By tenant and name: status, what its turns say, when it was used, and its chain.
        self.there: dict[tuple[str, str], dict[str, Any]] = {}

    def teardown(self) -> None:
        if hasattr(self, "sides"):
            for store in self.sides:
                store.close()
            self.place.cleanup()

    def forget_old(self) -> None:
        oldest = self.clock.time - ROOMY.expiry_s
        self.there = {key: one for key, one in self.there.items() if one["used"] >= oldest}

    def touch(self, one: dict[str, Any] | None) -> None:
        while one is not None:
            one["used"], one = self.clock.time, one["previous"]

    def whole(self, one: dict[str, Any] | None) -> bool:
        while one is not None:
            if one not in self.there.values():
                return False
            one = one["previous"]
        return True

    @rule(side=SIDES, tenant=TENANTS, name=NAMES, after=st.none() | NAMES, fails=st.booleans())
    def respond(self, side: int, tenant: str, name: str, after: str | None, fails: bool) -> None:
        self.forget_old()
        store, previous, key, texts = self.sides[side], None, None, []
        if after is not None:
            previous = self.there.get((tenant, after))
            try:
                before = store.turns_before(tenant, f"resp_{after}")
            except ServiceError:
                assert previous is None or previous["fails"] or not self.whole(previous)
                return
            assert previous
            assert said(before.items) == previous["texts"]
            self.touch(previous)
            key, texts = before.key, previous["texts"]
        status = "failed" if fails else "completed"
        try:
            add(store, name, tenant=tenant, status=status, previous=key)
        except AlreadyExists:
            assert (tenant, name) in self.there
            return
        assert (tenant, name) not in self.there
        self.there[tenant, name] = {
            "fails": fails,
            "texts": [*texts, f"asked {name}", name],
            "used": self.clock.time,
            "previous": previous,
        }

    @rule(side=SIDES, tenant=TENANTS, name=NAMES)
    def delete(self, side: int, tenant: str, name: str) -> None:
        self.forget_old()
        try:
            self.sides[side].remove(Kind.RESPONSE, tenant, f"resp_{name}")
        except NotFound:
            assert (tenant, name) not in self.there
        else:
            del self.there[tenant, name]

    @rule(seconds=st.sampled_from([30.0, 400.0, 1100.0]), side=SIDES)
    def wait(self, seconds: float, side: int) -> None:
        self.clock.time += seconds
        self.sides[side].sweep()

    @rule(side=SIDES, tenant=TENANTS, name=NAMES)
    def look(self, side: int, tenant: str, name: str) -> None:
        self.forget_old()
        assert is_there(self.sides[side], name, tenant) == ((tenant, name) in self.there)
        found = self.there.get((tenant, name))
        if found and self.clock.time - found["used"] > 60:
            self.touch(found)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "sides"):
            assert_sound(self.sides[0])


AnyOrder.TestCase.settings = settings(max_examples=6, stateful_step_count=20, deadline=None)
TestAnyOrder = AnyOrder.TestCase
