"""Tokens and keys in the store: what is kept of them, how long they are good, and what a process knows of them."""

from __future__ import annotations

import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from holdfast import App
from holdfast.access.rules import NEW_KEY_SECONDS, Session, proof_of
from holdfast.access.tokens import ENDED, KEYS, TOKEN, AccessTokens, TokenRecord
from holdfast.errors import StoreError, UsageError
from holdfast.model.records import Entry
from holdfast.runtime.engine import Engine

T = TypeVar("T")
HOUR, DAY = 3_600.0, 86_400.0


class Access:
    """The tokens of an app, for callers without a loop, at a time that the test moves."""

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = app
        self.engine: Engine = app.runtime.ready()
        self.tokens = self.engine.part(AccessTokens)
        self.now = self.engine.store.now()
        monkeypatch.setattr(self.engine.store, "now", lambda: self.now)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.app.runtime.run(work)

    def create(self, name: str = "ci", role: str = "viewer", seconds: float = DAY) -> tuple[TokenRecord, str]:
        return self.run(self.tokens.create(name, role, seconds, "ann@web"))

    def refresh(self) -> None:
        """Read again, as after `FRESH_SECONDS`."""
        self.tokens.known = self.tokens.known._replace(stale_at=float("-inf"))
        self.run(self.tokens.refresh())

    def stored(self, kind: str) -> list[Entry]:
        return list(self.run(self.engine.store.entries("shop", kind)))


@pytest.fixture
def access(app: App, monkeypatch: pytest.MonkeyPatch) -> Access:
    return Access(app, monkeypatch)


def test_a_token_is_stored_as_a_digest(access: Access) -> None:
    record, text = access.create(role="operator")
    assert re.fullmatch(r"hf_[a-z2-7]{8}_[A-Za-z0-9_-]{43}", text)
    access.refresh()
    assert access.tokens.valid(text) == record
    assert (record.name, record.role, record.expires_at) == ("ci", "operator", access.now + DAY)
    (entry,) = access.stored(TOKEN)
    secret = text.split("_", 2)[2]  # which may have more of these signs in it
    assert secret.encode() not in entry.body
    assert proof_of(text).encode() not in entry.body, "who reads the store cannot make a session"
    assert text not in repr(record)


def test_tokens_are_random(access: Access) -> None:
    texts = {access.create(f"token-{number}")[1] for number in range(50)}
    assert len({text.split("_", 2)[2] for text in texts}) == 50
    assert len({text.split("_")[1] for text in texts}) == 50


def test_a_token_expires_and_is_listed_for_a_month(access: Access) -> None:
    record, text = access.create(seconds=DAY)
    access.refresh()
    access.now += DAY - 1
    assert access.tokens.valid(text) is not None
    assert access.tokens.of_session(record.id, proof_of(text)) is not None
    access.now += 1
    assert access.tokens.valid(text) is None
    assert access.tokens.of_session(record.id, proof_of(text)) is None
    access.run(access.engine.store.remove_expired("shop", access.now + 29 * DAY, 10))
    assert [each.name for each in access.run(access.tokens.list())] == ["ci"]
    access.run(access.engine.store.remove_expired("shop", access.now + 31 * DAY, 10))
    assert access.run(access.tokens.list()) == []


def test_a_revoked_token_is_refused_once_tokens_are_read_again(access: Access) -> None:
    record, text = access.create()
    other, kept = access.create("other")
    access.refresh()
    assert access.run(access.tokens.revoke("ci")) == (record, False)
    assert access.tokens.is_fresh
    assert access.tokens.valid(text) is not None, "known for some seconds more"
    access.refresh()
    assert access.tokens.valid(text) is None
    assert access.tokens.of_session(record.id, proof_of(text)) is None
    assert access.tokens.valid(kept) == other
    access.run(access.tokens.revoke(other.id))
    with pytest.raises(UsageError, match="there is no token 'ci'"):
        access.run(access.tokens.revoke("ci"))


def test_tokens_made_at_the_same_time_are_revoked_together(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(AccessTokens, "list", lambda tokens: nothing())
        texts = [access.create()[1] for _ in range(2)]
    access.run(access.tokens.revoke("ci"))
    access.refresh()
    assert [access.tokens.valid(text) for text in texts] == [None, None]


async def nothing() -> list[TokenRecord]:
    """Say what a command reads that looks before the other one has stored its token."""
    return []


@pytest.mark.parametrize("uses", [2, 100])
def test_a_token_whose_use_is_noted_meanwhile_is_revoked_or_that_is_said(
    access: Access, monkeypatch: pytest.MonkeyPatch, uses: int
) -> None:
    record, text = access.create()
    access.refresh()
    remove, times = access.engine.store.remove_entry, iter(range(uses))

    async def used_before(entry: Entry) -> bool:
        if next(times, None) is not None:
            await access.tokens.note_use(record)
        return await remove(entry)

    monkeypatch.setattr(access.engine.store, "remove_entry", used_before)
    if uses == 100:
        with pytest.raises(StoreError, match="Try again"):
            access.run(access.tokens.revoke("ci"))
    else:
        access.run(access.tokens.revoke("ci"))
    access.refresh()
    assert (access.tokens.valid(text) is None) is (uses == 2)


def test_requests_cost_no_read(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = access.create()
    access.refresh()
    reads = []

    async def counted(*args: Any, **kwargs: Any) -> list[Entry]:
        reads.append(args)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(access.engine.store, "entries", counted)
        for _ in range(100):
            access.run(access.tokens.refresh())
            assert access.tokens.valid(text) is not None
    assert reads == []


def test_the_last_use_is_noted_once_an_hour(access: Access) -> None:
    record, text = access.create()
    access.refresh()
    versions = []
    for _ in range(5):
        found = access.tokens.valid(text)
        assert found is not None
        if access.tokens.is_use_due(found):
            access.run(access.tokens.note_use(found))
        versions.append(access.stored(TOKEN)[0].version)
        access.now += HOUR / 2
    assert versions == [2, 2, 3, 3, 4]
    assert access.run(access.tokens.list())[0].used_at == access.now - HOUR / 2
    access.run(access.tokens.revoke(record.id))
    access.now += HOUR
    access.run(access.tokens.note_use(record))
    assert access.stored(TOKEN) == [], "a use that is noted late does not bring a token back"


@pytest.mark.parametrize(("name", "role"), [("", "viewer"), ("x" * 81, "viewer"), ("a\nb", "viewer"), ("a", "root")])
def test_a_wrong_token_is_refused(access: Access, name: str, role: str) -> None:
    with pytest.raises(UsageError):
        access.create(name, role)
    assert access.stored(TOKEN) == []


def test_a_name_is_taken_once(access: Access) -> None:
    record, _ = access.create()
    for name in ("ci", record.id):
        with pytest.raises(UsageError, match="there is a token"):
            access.create(name)


def test_a_corrupt_token_is_quarantined_and_lets_nothing_in(access: Access) -> None:
    record, text = access.create()
    _, other = access.create("other")
    (entry,) = [each for each in access.stored(TOKEN) if each.name == record.id]
    access.run(access.engine.store.remove_entry(entry))
    body = entry.body.replace(b'"viewer"', b'"emperor"')
    access.run(access.engine.store.put_entry(Entry(app="shop", kind=TOKEN, name=record.id, body=body)))
    access.refresh()
    assert access.tokens.valid(text) is None
    assert access.tokens.valid(other) is not None
    assert len(access.run(access.engine.store.quarantined("shop"))) == 1


# --- keys of sessions


def test_a_new_key_is_made_every_month_and_old_ones_end_with_their_sessions(access: Access) -> None:
    first = access.run(access.tokens.ring())
    assert access.run(access.tokens.ring()) == first
    access.now += NEW_KEY_SECONDS
    second = access.run(access.tokens.ring())
    assert second.keys[1:] == first.keys
    access.now += NEW_KEY_SECONDS
    third = access.run(access.tokens.ring())
    assert third.keys[1:] == second.keys[:1], "its last session has ended"
    assert len({key.secret for key in third.keys + first.keys}) == 3
    assert len(access.stored(KEYS)) == 1


def test_two_processes_agree_on_a_key(access: Access) -> None:
    other = AccessTokens(access.engine)
    ring = access.run(access.tokens.ring())
    assert access.run(other.ring()) == ring


def test_damaged_keys_are_replaced(access: Access) -> None:
    access.run(access.engine.store.put_entry(Entry(app="shop", kind=KEYS, name="keys", body=b'{"keys": 7}')))
    assert len(access.run(access.tokens.ring()).keys) == 1
    assert len(access.run(access.engine.store.quarantined("shop"))) == 1


def test_a_session_that_was_ended_elsewhere_is_refused_once_tokens_are_read_again(
    access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.access.tokens._MOST_SESSIONS", 3)
    ours, theirs = access.tokens, AccessTokens(access.engine)
    first, second = (Session("aaaaaaaa", id * 8, access.now + DAY, "proof") for id in "bc")
    assert access.run(ours.is_ended(first.id)) is False
    access.run(theirs.end_session(first))
    assert access.run(theirs.is_ended(first.id)) is True
    assert access.run(ours.is_ended(first.id)) is False, "known for some seconds more"
    access.refresh()
    assert access.run(ours.is_ended(first.id)) is True
    assert access.run(ours.is_ended(second.id)) is False
    for number in range(5):
        assert access.run(ours.is_ended(f"other{number}")) is False
    assert len(ours.known.sessions) == 3
    assert access.run(ours.is_ended(first.id)) is True, "what was forgotten is read"
    access.run(access.engine.store.remove_expired("shop", access.now + 2 * DAY, 10))
    assert access.stored(ENDED) == []


def test_a_session_that_ends_during_a_read_stays_ended(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("aaaaaaaa", "bbbbbbbb", access.now + DAY, "proof")
    read = access.engine.store.entries

    async def ends_meanwhile(*args: Any, **named: Any) -> Any:
        found = await read(*args, **named)
        with monkeypatch.context() as context:
            context.setattr(access.engine.store, "entries", read)
            await access.tokens.end_session(session)
        return found

    monkeypatch.setattr(access.engine.store, "entries", ends_meanwhile)
    assert access.run(access.tokens.is_ended(session.id)) is True
