"""Holds responses and conversations with their items and events, each tenant's apart, within limits of bytes and age.

What is used least makes way, of the tenant that has most. A tenant's id means nothing to others.
"""

import contextlib
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.frontend.api.body import UNREADABLE
from octavo.frontend.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded, Reason, bad_parameter
from octavo.frontend.http.connection import MAX_BODY
from octavo.frontend.openai.response_answer import event_of, response_of
from octavo.frontend.stored.database import Owner, connect, part, transaction
from octavo.frontend.stored.items import input_items, resolved, with_fresh_id
from octavo.frontend.stored.values import (
    ANSWERED,
    NOT_WRITTEN,
    Before,
    Kind,
    Limits,
    Named,
    NewRecord,
    Outcome,
    Progress,
    Record,
    Removals,
    Room,
    split,
)

_log = logging.getLogger(__name__)

# What a record takes beside its texts, reckoned high: with it the limits of bytes bound the number of records too.
OVERHEAD: Final = 512
# Items and events that are read at once.
MAX_PAGE: Final = 100
_BATCHES: Final = 16
# Seconds within which a second use of a record is not noted.
_SAME_USE_S: Final = 60.0
# The most bytes of the turns before a call: as many as its body may have.
MAX_BEFORE: Final = MAX_BODY
# What the disk, the file and those who share it bring about; any other failure is of the one record that is written.
_OF_ALL: Final = (sqlite3.OperationalError, OSError, MemoryError)
_LOST: Final = "the frontend that computed this response ended before the response did; send it again"


# What tells that a record is there: by its tenant, and the time of the last use before which it has expired.
_THERE: Final = "tenant = ? AND (used_at >= ? OR owner IS NOT NULL)"


class _Body(msgspec.Struct):
    status: str = ""
    output: msgspec.Raw = msgspec.Raw(b"[]")


_decode_body = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


class Store:
    """Reads and writes one store. Every method blocks, and may raise `sqlite3.Error`; one thread at a time calls
    them."""

    def __init__(self, directory: Path, limits: Limits, now: Callable[[], float] = time.time) -> None:
        """Raises `StoreError`."""
        self._connection = connect(directory)
        self.owner = Owner(directory)
        self.removals = Removals()
        self._limits = limits
        self._now = now

    @property
    def num_changes(self) -> int:
        """Returns how many rows were written so far."""
        return self._connection.total_changes

    def close(self) -> None:
        self._connection.close()
        self.owner.close()

    # -- records ----------------------------------------------------------------------------------------------------

    def add(self, new: NewRecord, *, ended: bool = True) -> int:
        """Keeps a record, and returns its key. One that has not `ended` is this frontend's until it has.

        Raises `AlreadyExists`, and `Overloaded` where there is no room.
        """
        with transaction(self._connection):
            self.check_free(new.tenant, new.id)
            # One that has expired gives up its id before it is swept out.
            self._execute("DELETE FROM records WHERE tenant = ? AND id = ?", new.tenant, new.id)
            owner = None if ended else self.owner.name
            key = self._execute(
                "INSERT INTO records (tenant, id, kind, used_at, owner, is_background, previous, conversation, body,"
                " num_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(new.tenant, new.id, new.kind, self._now(), owner, new.is_background, new.previous, new.conversation),
                *(new.body, OVERHEAD + len(new.body)),
            ).lastrowid
            assert key is not None
            self._add_items(key, input_items(new.input))
            if ended:
                self._add_turn(key)
            self._check_room(new.tenant, key)
        return key

    def check_free(self, tenant: str, record_id: str) -> None:
        """Raises `AlreadyExists` where the tenant has a record of that id."""
        if self._one(f"SELECT 1 FROM records WHERE id = ? AND {_THERE}", record_id, tenant, self._oldest):
            raise AlreadyExists(
                Reason.DUPLICATE_ID,
                f"{record_id!r} is stored already; delete it, ask with `store: false`, or leave the id out to get a"
                " fresh one",
                request_id=record_id,
            )

    def find(self, kind: Kind, tenant: str, record_id: str) -> Record:
        """Returns a record; a response whose frontend is gone has failed. Raises `NotFound`."""
        row = self._row(kind, tenant, record_id)
        if row["owner"] is not None and not self.owner.lives(row["owner"]):
            self._fail_lost([row["owner"]])
            row = self._row(kind, tenant, record_id)
        if self._now() - row["used_at"] > _SAME_USE_S:
            self._note_use(row["key"])
        ended, is_background, body = row["owner"] is None, bool(row["is_background"]), row["body"]
        status = _decode_body(body).status
        return Record(row["key"], row["id"], status, ended, is_background, row["num_events"], body)

    def change(self, kind: Kind, tenant: str, record_id: str, body: bytes) -> None:
        """Replaces the object of a record. Raises `NotFound`, `Overloaded`."""
        with transaction(self._connection):
            row = self._row(kind, tenant, record_id)
            self._set_body(row["key"], body)
            self._check_room(tenant, row["key"])

    def remove(self, kind: Kind, tenant: str, record_id: str) -> int:
        """Removes a record with all that belongs to it; returns its key. Raises `NotFound`."""
        with transaction(self._connection):
            key: int = self._row(kind, tenant, record_id)["key"]
            self._execute("DELETE FROM records WHERE key = ?", key)
        return key

    def cancel(self, tenant: str, record_id: str) -> None:
        """Asks the frontend that computes a response to end it, which it learns with its next `advance`."""
        with transaction(self._connection):
            cancelled = "UPDATE records SET is_cancelled = 1 WHERE tenant = ? AND id = ? AND owner IS NOT NULL"
            self._execute(cancelled, tenant, record_id)

    # -- what came before -------------------------------------------------------------------------------------------

    def turns_before(self, tenant: str, record_id: str) -> Before:
        """Returns the turns up to a response, that one included.

        Raises `InvalidRequest` for a response that is not there, has no whole answer, follows one that is gone, or has
        too much before it.
        """
        try:
            record = self.find(Kind.RESPONSE, tenant, record_id)
        except NotFound as error:
            raise _no_previous(
                record_id, "is not kept here; it was deleted, has expired, or never was stored"
            ) from error
        if record.status not in ANSWERED:
            advice = "go on from the one before it" if record.ended else "wait for its end"
            raise bad_parameter("previous_response_id", f"{record_id!r}, which is {record.status}", advice)
        texts: list[bytes] = []
        room, key = Room(MAX_BEFORE), record.key
        while key is not None:
            row = self._one("SELECT previous, body FROM records WHERE key = ?", key)
            if row is None:
                raise _no_previous(record_id, "follows a response that was deleted or has made way for others")
            texts += [bytes(_decode_body(row["body"]).output), self._items_as_list(key, room)]
            room.take(len(texts[-2]), 1)
            key = row["previous"]
        self._note_use(record.key)
        return Before(record.key, texts[::-1])

    def conversation_before(self, tenant: str, record_id: str) -> Before:
        """Returns all items of a conversation. Raises `NotFound`, and `InvalidRequest` where there are too many."""
        record = self.find(Kind.CONVERSATION, tenant, record_id)
        return Before(record.key, [self._items_as_list(record.key, Room(MAX_BEFORE))])

    # -- items ------------------------------------------------------------------------------------------------------

    def items(self, key: int, after: str | None, limit: int, *, newest_first: bool) -> list[bytes]:
        """Returns up to `limit` items of a record, those after the item `after` where that is given. Raises
        `InvalidRequest` for an item that is not there."""
        order, sign, edge = ("DESC", "<", 1 << 62) if newest_first else ("ASC", ">", 0)
        if after is not None:
            row = self._item(key, after)
            if row is None:
                raise bad_parameter("after", repr(after[:128]), "it must be the id of an item of the list")
            edge = row["place"]
        page = f"SELECT body FROM items WHERE record = ? AND place {sign} ? ORDER BY place {order} LIMIT ?"
        return [row["body"] for row in self._execute(page, key, edge, limit)]

    def item(self, key: int, item_id: str) -> bytes:
        """Returns an item of a record. Raises `NotFound`."""
        row = self._item(key, item_id)
        if row is None:
            raise _missing("item", item_id)
        body: bytes = row["body"]
        return body

    def resolved(self, tenant: str, field: str, said: bytes) -> bytes:
        """Returns the JSON of a field with items in the place of references to them. Raises what `items_named` does."""
        return resolved(field, said, partial(self.items_named, tenant))

    def items_named(self, tenant: str, places: Mapping[str, str]) -> dict[str, bytes]:
        """Returns items of the tenant's by their ids, which are given with the places where they are named: of answers
        or else, of what was kept under that id, the latest. Raises `NotFound`, and `InvalidRequest` for too much."""
        room, found = Room(MAX_BEFORE), {}
        answers: dict[str, dict[str, bytes]] = {}
        for item_id, place in places.items():
            response_id = response_of(item_id)
            if response_id not in answers:
                answers[response_id] = self._answer(tenant, response_id)
            item = answers[response_id].get(item_id) or self._latest_item(tenant, item_id)
            if item is None:
                raise _missing("item", item_id, field=place)
            room.take(len(item), 1)
            found[item_id] = item
        return found

    def add_items(self, tenant: str, record_id: str, items: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Appends items to a conversation, and returns them as they are kept. Raises `NotFound`, `Overloaded`."""
        with transaction(self._connection):
            key = self._row(Kind.CONVERSATION, tenant, record_id)["key"]
            added = self._add_items(key, items)
            self._touch(key)
            self._check_room(tenant, key)
        return added

    def remove_item(self, tenant: str, record_id: str, item_id: str) -> None:
        """Removes an item of a conversation. Raises `NotFound`."""
        with transaction(self._connection):
            key = self._row(Kind.CONVERSATION, tenant, record_id)["key"]
            self._grow(key, -len(self.item(key, item_id)))
            self._execute("DELETE FROM items WHERE record = ? AND id = ?", key, item_id)

    # -- what is computed -------------------------------------------------------------------------------------------

    def advance(self, progress: Iterable[Progress]) -> dict[int, Outcome]:
        """Writes how far this frontend's responses have got, in one transaction; returns what became of each. One that
        cannot be written fails alone."""
        with transaction(self._connection):
            return {each.key: self._advance_or_fail(each) for each in progress}

    def events(self, key: int, first: int) -> list[bytes]:
        """Returns some of a response's events, from the number `first` on; none where there are no more."""
        batches = "SELECT first, body FROM events WHERE record = ? AND first + count > ? ORDER BY first LIMIT ?"
        rows = self._execute(batches, key, first, _BATCHES)
        return [event for row in rows for event in split(zlib.decompress(row["body"]))[max(0, first - row["first"]) :]]

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def sweep(self) -> tuple[int, int]:
        """Removes what has expired, and fails responses of frontends that are gone. Returns the number of records,
        and their bytes."""
        mine = self.owner.name
        rows = self._execute("SELECT DISTINCT owner FROM records WHERE owner IS NOT NULL AND owner != ?", mine)
        if gone := [row["owner"] for row in rows.fetchall() if not self.owner.lives(row["owner"])]:
            self._fail_lost(gone)
        with transaction(self._connection):
            old = self._execute("DELETE FROM records WHERE used_at < ? AND owner IS NULL", self._oldest)
            self.removals.expired += old.rowcount
        return self._execute("SELECT count(*) FROM records").fetchone()[0], self._num_bytes()

    def _note_use(self, key: int) -> None:
        """Notes that a record is used, where anything can be written: it is read all the same."""
        with contextlib.suppress(sqlite3.Error), transaction(self._connection):
            self._touch(key)

    # -- inside of a transaction ------------------------------------------------------------------------------------

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = sqlite3.Row
        return cursor.execute(statement, values)

    def _one(self, statement: str, *values: object) -> sqlite3.Row | None:
        """Returns the first row, None where there is none; and for a name that cannot be written as UTF-8, which is
        nobody's."""
        try:
            row: sqlite3.Row | None = self._execute(statement, *values).fetchone()
        except UnicodeEncodeError:
            return None
        return row

    @property
    def _oldest(self) -> float:
        """Returns the time of the last use before which a record has expired."""
        return self._now() - self._limits.expiry_s

    def _row(self, kind: Kind, tenant: str, record_id: str) -> sqlite3.Row:
        found = f"SELECT * FROM records WHERE id = ? AND kind = ? AND {_THERE}"
        row = self._one(found, record_id, kind, tenant, self._oldest)
        if row is None:
            raise _missing(kind, record_id)
        return row

    def _item(self, key: int, item_id: str) -> sqlite3.Row | None:
        return self._one("SELECT place, body FROM items WHERE record = ? AND id = ?", key, item_id)

    def _answer(self, tenant: str, response_id: str) -> dict[str, bytes]:
        """Returns the items of a response's answer, by their ids; none where the response is not there."""
        try:
            body = self.find(Kind.RESPONSE, tenant, response_id).body
        except NotFound:
            return {}
        items = msgspec.json.decode(_decode_body(body).output, type=list[msgspec.Raw])
        return {msgspec.json.decode(item, type=Named).id: bytes(item) for item in items}

    def _latest_item(self, tenant: str, item_id: str) -> bytes | None:
        latest = f"SELECT items.body FROM items JOIN records ON key = record WHERE items.id = ? AND {_THERE}"
        row = self._one(f"{latest} ORDER BY key DESC LIMIT 1", item_id, tenant, self._oldest)
        return None if row is None else row["body"]

    def _add_items(self, key: int, items: Iterable[Mapping[str, Any]]) -> list[bytes]:
        (place,) = self._execute("SELECT coalesce(max(place), 0) FROM items WHERE record = ?", key).fetchone()
        added = []
        for item in items:
            place += 1
            own = with_fresh_id(item) if self._item(key, item["id"]) else item
            added.append(_encode(own))
            self._execute("INSERT INTO items VALUES (?, ?, ?, ?)", key, place, own["id"], added[-1])
        self._grow(key, sum(map(len, added)))
        return added

    def _add_turn(self, key: int) -> None:
        """Appends what a response was asked and has answered to its conversation, where it has one and an answer."""
        turn = "SELECT response.body, into_it.key AS conversation FROM records response JOIN records into_it"
        row = self._one(f"{turn} ON into_it.key = response.conversation WHERE response.key = ?", key)
        if row is None or (body := _decode_body(row["body"])).status not in ANSWERED:
            return
        asked = self._execute("SELECT body FROM items WHERE record = ? ORDER BY place", key).fetchall()
        items = [msgspec.json.decode(each["body"]) for each in asked]
        self._add_items(row["conversation"], items + msgspec.json.decode(body.output))
        self._touch(row["conversation"])

    def _advance_or_fail(self, progress: Progress) -> Outcome:
        try:
            with part(self._connection):
                return self._advance(progress)
        except _OF_ALL:
            raise
        except Exception as error:
            _log.error("a response has failed that could not be written: %r", error)
        if row := self._one("SELECT * FROM records WHERE key = ?", progress.key):
            self._fail(row, NOT_WRITTEN)
        return Outcome.UNWRITABLE

    def _advance(self, progress: Progress) -> Outcome:
        mine = "SELECT tenant, is_cancelled, num_events FROM records WHERE key = ? AND owner = ?"
        row = self._one(mine, progress.key, self.owner.name)
        if row is None:
            return Outcome.GONE
        # What a commit that failed late has written all the same is not written twice.
        news = progress.events[row["num_events"] - progress.first :]
        if news:
            self._add_events(progress.key, row["num_events"], news)
        if progress.body is not None:
            self._set_body(progress.key, progress.body)
        if progress.ended:
            self._execute("UPDATE records SET owner = NULL WHERE key = ?", progress.key)
            self._add_turn(progress.key)
        # Its end is always kept, even where that exceeds a limit.
        if not self._make_room(row["tenant"], progress.key) and not progress.ended:
            return Outcome.NO_ROOM
        return Outcome.CANCELLED if row["is_cancelled"] and not progress.ended else Outcome.KEPT

    def _add_events(self, key: int, first: int, events: Sequence[bytes]) -> None:
        text = zlib.compress(b"".join(events), 1)
        self._execute("INSERT INTO events VALUES (?, ?, ?, ?)", key, first, len(events), text)
        grown = "UPDATE records SET num_events = ?, used_at = ?, num_bytes = num_bytes + ? WHERE key = ?"
        self._execute(grown, first + len(events), self._now(), len(text), key)

    def _end(self, key: int, body: bytes) -> None:
        self._set_body(key, body)
        self._execute("UPDATE records SET owner = NULL WHERE key = ?", key)

    def _set_body(self, key: int, body: bytes) -> None:
        self._execute(
            "UPDATE records SET num_bytes = num_bytes + ? - length(body), body = ? WHERE key = ?", len(body), body, key
        )

    def _grow(self, key: int, num_bytes: int) -> None:
        self._execute("UPDATE records SET num_bytes = num_bytes + ? WHERE key = ?", num_bytes, key)

    def _touch(self, key: int) -> None:
        """Notes that a record is used, and all that it goes on from."""
        self._execute(
            "WITH RECURSIVE chain (key) AS (VALUES (?) UNION SELECT previous FROM records JOIN chain USING (key)"
            " WHERE previous IS NOT NULL) UPDATE records SET used_at = ? WHERE key IN (SELECT key FROM chain)",
            key,
            self._now(),
        )

    def _fail_lost(self, owners: Sequence[str]) -> None:
        """Ends the responses of frontends that are gone as failed, with the reason."""
        with transaction(self._connection):
            for owner in owners:
                for row in self._execute("SELECT * FROM records WHERE owner = ?", owner).fetchall():
                    self._fail(row, _LOST)

    def _fail(self, row: sqlite3.Row, message: str) -> None:
        """Ends a response as failed, as far as that can be written: where its last event cannot be, it has none."""
        try:
            response = msgspec.json.decode(row["body"], type=dict[str, Any])
        except UNREADABLE:
            response = {"id": row["id"], "object": "response", "created_at": int(row["used_at"]), "output": []}
        response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        last = event_of("failed", row["num_events"], {"response": response})
        end = partial(self._end, row["key"], _encode(response))
        tell = partial(self._add_events, row["key"], row["num_events"], [last])
        for write in (end, tell):
            try:
                with part(self._connection):
                    write()
            except _OF_ALL:
                raise
            except Exception as error:
                _log.error("that a response has failed could not be written: %r", error)
                return

    def _items_as_list(self, key: int, room: Room) -> bytes:
        bodies = []
        for row in self._execute("SELECT body FROM items WHERE record = ? ORDER BY place", key):
            bodies.append(row["body"])
            room.take(len(bodies[-1]), 1)
        return b"[" + b",".join(bodies) + b"]"

    # -- room -------------------------------------------------------------------------------------------------------

    def _check_room(self, tenant: str, key: int) -> None:
        evicted = self.removals.evicted
        if not self._make_room(tenant, key):
            # The transaction takes it back.
            self.removals.evicted = evicted
            raise Overloaded(
                Reason.STORE_FULL,
                "there is no room to store this: it alone, or what is being computed, takes all that may be kept; ask"
                " with `store: false`, or delete what is not needed",
            )

    def _make_room(self, tenant: str, key: int) -> bool:
        """Removes what is used least until the limits are kept, but for the record `key` and what has not ended: of
        the tenant, then of whoever has most. Returns whether that was enough."""
        most = self._limits.tenant_max_bytes
        while most and self._num_bytes(tenant) > most:
            if not self._evict(tenant, key):
                return False
        while self._num_bytes() > self._limits.max_bytes:
            by_size = self._execute("SELECT name FROM tenants ORDER BY num_bytes DESC").fetchall()
            if not any(self._evict(row["name"], key) for row in by_size):
                return False
        return True

    def _evict(self, tenant: str, but: int) -> bool:
        least = "SELECT key FROM records WHERE tenant = ? AND owner IS NULL AND key != ? ORDER BY used_at, key LIMIT 1"
        removed = self._execute(f"DELETE FROM records WHERE key = ({least})", tenant, but).rowcount
        self.removals.evicted += removed
        return bool(removed)

    def _num_bytes(self, tenant: str | None = None) -> int:
        """Returns the bytes of one tenant, or of all."""
        condition, values = ("", ()) if tenant is None else (" WHERE name = ?", (tenant,))
        row = self._execute(f"SELECT coalesce(sum(num_bytes), 0) FROM tenants{condition}", *values)
        total: int = row.fetchone()[0]
        return total


def _missing(what: str, record_id: str, **metadata: Any) -> NotFound:
    return NotFound(
        Reason.NOT_STORED,
        f"no {what} {record_id[:128]!r} of yours is stored here; it was deleted, has expired, or never was stored",
        id=record_id[:128],
        **metadata,
    )


def _no_previous(record_id: str, why: str) -> InvalidRequest:
    message = f"response {record_id[:128]!r} {why}. Send what was said before instead"
    return InvalidRequest(Reason.PREVIOUS_RESPONSE_NOT_FOUND, message, field="previous_response_id")
