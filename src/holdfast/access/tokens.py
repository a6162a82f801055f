"""Tokens and keys of sessions in the store, and what a process knows of them.

All tokens of an app are read together, and are taken to be valid for `FRESH_SECONDS`: a request costs no read, and a
token that was revoked is refused after that time at the latest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.access.rules import (
    ID_BYTES,
    ROLES,
    SECRET_BYTES,
    KeyRing,
    Session,
    TokenRecord,
    check_token,
    digest_of,
    id_in,
    is_new_key_due,
    is_secret_of,
    new_id,
    new_key,
    proof_of,
    token_text,
    with_key,
)
from holdfast.errors import CorruptRecord, StoreError, UsageError
from holdfast.model.decoding import ahead
from holdfast.model.records import Entry, entry_reader
from holdfast.runtime.engine import Engine

TOKEN, KEYS = "access.token", "access.keys"
ENDED = "access.ended"  # entries of sessions that their users have ended
CLOSED = "access.closed"  # an entry that is there once a token was made, and when its tokens are gone, too
FRESH_SECONDS = 5.0
_NEW_SECONDS = 1.0
MOST_TOKENS = 1_000
_MOST_SESSIONS = 1_000  # that a process remembers; others are looked up
_SPARE_SECONDS = 60.0  # how long an ended session is kept behind its end
_LISTED_AFTER_SECONDS = 30 * 86_400.0  # how long an expired token is listed
_USED_SECONDS = 3_600.0
_TRIES = 5

read_token = entry_reader(TokenRecord, TOKEN, named="token", check=check_token)
read_keys = entry_reader(KeyRing, KEYS, named="keys of sessions")


class KnownAccess(NamedTuple):
    """What was read of tokens and keys."""

    tokens: Mapping[str, TokenRecord]
    ring: KeyRing
    stale_at: float
    is_closed: bool = False  # a token was made: nothing is open to all programs of this machine
    sessions: Mapping[str, bool] = {}  # that are in use here: whether their users have ended them


class AccessTokens:
    """The tokens of one app; a part of its engine. `known` may be read from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app
        self._monotonic = engine.clock.monotonic
        self.known = KnownAccess({}, KeyRing(), float("-inf"))

    # --- for commands

    async def create(self, name: str, role: str, seconds: float, by: str) -> tuple[TokenRecord, str]:
        """Store a token. Return it with its text, which nothing shows again. Raises `UsageError`."""
        if not 0 < len(name) <= 80 or not name.isprintable() or name.strip() != name:
            raise UsageError(f"name={name!r:.100}: expected up to 80 characters that can be shown")
        if role not in ROLES:
            raise UsageError(f"role={role!r:.40}: expected {', '.join(ROLES)}")
        there = await self.list()
        if any(name in (each.name, each.id) for each in there):
            raise UsageError(f"there is a token '{name}'; revoke it, or choose another name")
        if len(there) >= MOST_TOKENS:
            raise UsageError(f"there are {len(there):,} tokens; revoke some: holdfast access token list")
        now, id = self._store.now(), new_id(os.urandom(ID_BYTES))
        text = token_text(id, os.urandom(SECRET_BYTES))
        record = TokenRecord(
            id=id,
            name=name,
            role=role,
            digest=digest_of(text),
            proof_digest=digest_of(proof_of(text)),
            created_at=now,
            created_by=by,
            expires_at=ahead(now, seconds),
        )
        await self._close()
        if not await self._store.put_entry(self._entry(record, 1)):
            raise StoreError(f"the token '{name}' could not be stored: its id is taken. Try again.")
        return record, text

    async def list(self) -> Sequence[TokenRecord]:
        """Return all tokens, expired ones of the last month too, newest first."""
        found = [record for _, record in await self._read()]
        return sorted(found, key=lambda record: record.created_at, reverse=True)

    async def revoke(self, name: str) -> tuple[TokenRecord, bool]:
        """Remove a token, by its name or id. Return it, and whether it was the last one: without tokens, the web app
        stays closed; see `open`. Raises `UsageError` if there is none, `StoreError` if one is left.
        """
        there = [record for _, record in await self._read()]
        meant = [record for record in there if name in (record.name, record.id)]
        left = [record.id for record in meant]  # two, if they were made at the same time
        for _ in range(_TRIES):
            if not left:
                break
            entries = await self._store.entries(self._app, TOKEN, left)
            left = [entry.name for entry in entries if not await self._store.remove_entry(entry)]  # its use was noted
        if left:
            raise StoreError(f"the token '{name[:80]}' could not be removed: it changed meanwhile. Try again.")
        for record in meant:
            return record, not self._good(each for each in there if each not in meant)
        raise UsageError(f"there is no token '{name[:80]}': see holdfast access token list")

    async def open(self) -> None:
        """Let programs of this machine in without a token, as before the first one was made. Raises `UsageError` if
        there are tokens that have not expired.
        """
        if there := self._good(await self.list()):
            names = ", ".join(each.name for each in there[:5])
            raise UsageError(f"there are tokens: {names}; revoke them first: holdfast access token revoke NAME")
        for entry in await self._store.entries(self._app, CLOSED):
            await self._store.remove_entry(entry)

    def _good(self, tokens: Iterable[TokenRecord]) -> Sequence[TokenRecord]:
        now = self._store.now()
        return [each for each in tokens if now < each.expires_at]

    async def _close(self) -> None:
        await self._store.put_entry(Entry(app=self._app, kind=CLOSED, name="closed", body=b"{}"))

    # --- for the web app

    @property
    def is_fresh(self) -> bool:
        return self._monotonic() < self.known.stale_at

    @property
    def may_be_new(self) -> bool:
        """Return whether a token that is not known may have been made since they were read: a second ago at least."""
        return self._monotonic() > self.known.stale_at - FRESH_SECONDS + _NEW_SECONDS

    async def refresh(self, *, again: bool = False) -> None:
        """Read tokens and keys, unless they were read lately. Raises `StoreError`."""
        if again or not self.is_fresh:
            found = await self._read()
            _, ring = await self._ring()
            is_closed = bool(await self._store.entries(self._app, CLOSED) or self._good(each for _, each in found))
            ended = await self._ended(list(self.known.sessions)) if self.known.sessions else ()
            tokens = {record.id: record for _, record in found}
            sessions = {id: is_ended or id in ended for id, is_ended in self.known.sessions.items()}
            self.known = KnownAccess(tokens, ring, self._monotonic() + FRESH_SECONDS, is_closed, sessions)

    def valid(self, token: str) -> TokenRecord | None:
        """Return the token that a request carries; None if it is unknown or has expired."""
        record = self.known.tokens.get(id_in(token) or "")
        if record is None or not is_secret_of(token, record.digest):
            return None
        return record if self._store.now() < record.expires_at else None

    def of_session(self, id: str, proof: str) -> TokenRecord | None:
        """Return the token of a session; None if it was revoked or has expired."""
        record = self.known.tokens.get(id)
        if record is None or not is_secret_of(proof, record.proof_digest):
            return None
        return record if self._store.now() < record.expires_at else None

    async def is_ended(self, id: str) -> bool:
        """Return whether the user of a session has ended it. It is read now, and from then on with the tokens."""
        if id not in self.known.sessions:
            self._note_session(id, id in await self._ended([id]))
        return self.known.sessions[id]

    async def end_session(self, session: Session) -> None:
        """End a session: here at once, in other processes when they read again. Raises `StoreError`."""
        until = ahead(session.ends_at, _SPARE_SECONDS)
        await self._store.put_entry(Entry(app=self._app, kind=ENDED, name=session.id, body=b"{}", keep_until=until))
        self._note_session(session.id, True)

    def _note_session(self, id: str, is_ended: bool) -> None:
        is_ended = is_ended or self.known.sessions.get(id, False)
        there = list(self.known.sessions.items())[-_MOST_SESSIONS + 1 :]
        self.known = self.known._replace(sessions={**dict(there), id: is_ended})

    async def _ended(self, ids: Sequence[str]) -> set[str]:
        return {entry.name for entry in await self._store.entries(self._app, ENDED, ids)}

    def is_use_due(self, record: TokenRecord) -> bool:
        """Return whether the use of a token is to be noted: once an hour."""
        return record.used_at is None or self._store.now() >= record.used_at + _USED_SECONDS

    async def note_use(self, record: TokenRecord) -> None:
        """Note that a token is used. A failure is not reported: it only concerns the list."""
        used = msgspec.structs.replace(record, used_at=self._store.now())
        self.known = self.known._replace(tokens={**self.known.tokens, record.id: used})
        try:
            for entry in await self._store.entries(self._app, TOKEN, [record.id]):
                await self._store.put_entry(self._entry(used, entry.version + 1), entry)
        except StoreError:
            pass

    async def ring(self) -> KeyRing:
        """Return the keys of sessions, the first one fit to sign. Raises `StoreError`."""
        for _ in range(_TRIES):
            entry, ring = await self._ring()
            now = self._store.now()
            if not is_new_key_due(ring, now):
                break
            key = new_key(os.urandom(ID_BYTES), os.urandom(SECRET_BYTES), now)
            wanted = with_key(ring, key, self._engine.settings.session_seconds)
            body, version = msgspec.json.encode(wanted), 1 if entry is None else entry.version + 1
            put = Entry(app=self._app, kind=KEYS, name="keys", body=body, version=version)
            if await self._store.put_entry(put, entry):
                ring = wanted
                break
        self.known = self.known._replace(ring=ring)
        return ring

    async def _ring(self) -> tuple[Entry | None, KeyRing]:
        for entry in await self._store.entries(self._app, KEYS, ["keys"]):
            try:
                return entry, read_keys(entry)
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        return None, KeyRing()

    async def _read(self) -> Sequence[tuple[Entry, TokenRecord]]:
        found = []
        for entry in await self._store.entries(self._app, TOKEN, limit=MOST_TOKENS):
            try:
                found.append((entry, msgspec.structs.replace(read_token(entry), id=entry.name)))
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        return found

    def _entry(self, record: TokenRecord, version: int) -> Entry:
        return Entry(
            app=self._app,
            kind=TOKEN,
            name=record.id,
            body=msgspec.json.encode(msgspec.structs.replace(record, id="")),
            version=version,
            keep_until=ahead(record.expires_at, _LISTED_AFTER_SECONDS),
        )
