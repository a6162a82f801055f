"""How the MongoDB store claims.

A lone candidate is taken by one findOneAndUpdate. Many are read, then taken by one update that holds while their
versions are the same; only if another claimer was faster is read back which of them were taken. Order is exact while
claimers do not collide; when they do, each takes from its own share: see `Contention`.

Invocations that need a slot get their own update, since an update of many would stop at the first slot that another
claimer took. The unique index decides, and a duplicate means: look again, take another. Candidates without a slot are
moved out of the queue in the same command. Then their keys are looked at once more: a slot may have been given back
before they waited.

Where tasks have rates, the starts are taken from the buckets before the calls are claimed. Calls of buckets that
another claimer was faster to write are looked at again in the next round.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace
from pymongo import ReturnDocument
from pymongo.errors import BulkWriteError, OperationFailure

from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord
from holdfast.ids import ALPHABET
from holdfast.model.changes import Change, apply_to
from holdfast.model.claims import Claim, Claimed, bounds_of, claimed, next_starts, turned_away
from holdfast.model.limits import Allotment, Held, Holder, Release, allot, limit_of
from holdfast.model.rates import RateBuckets, rate_for
from holdfast.model.records import InvocationRecord
from holdfast.model.status import AVAILABLE
from holdfast.store.mongo import buckets, queries, schema
from holdfast.store.mongo.documents import Document, key_of, pipeline, updates_of
from holdfast.store.mongo.invocations import Invocations, anything, held_slots
from holdfast.store.mongo.lane_scanner import LaneScanner, seen_in
from holdfast.store.mongo.marks import FRESH_SECONDS, Look, Seen
from holdfast.store.mongo.quarantine import Collections
from holdfast.store.mongo.retry import DUPLICATE, is_about_everything, is_about_the_document, is_transient

_AVAILABLE = sorted(status.value for status in AVAILABLE)
_MAX_ROUNDS = 3
_WIDER = 4  # how much more is looked at in the next round, where some cannot be taken
_WINDOW = 50  # how many candidates are looked at where some of them may be blocked
_MAX_WINDOWS = 8
_MAX_SHARES = 16
_TO_THE_HEAD = 1 / 16
_CALM_SECONDS = 1.0
_ENOUGH = 0.9  # of what was chosen: less is a collision
_ROW = 64


class Claims:
    def __init__(
        self, collection: Collections, invocations: Invocations, rng: random.Random, scanner: LaneScanner
    ) -> None:
        self._collection = collection
        self._invocations = invocations
        self._quarantine = invocations.quarantine
        self._scanner = scanner
        self._marks = scanner.marks
        self._there: dict[str, tuple[float, frozenset[str]]] = {}  # by app: lanes that had something, and when
        self.contention = Contention(rng)

    async def claim(self, claim: Claim, again: bool) -> Claimed:
        claim, began = await self._narrowed(claim), self._marks.now()
        got = Claimed(tuple(await self._claimed_before(claim) if again else ()))
        if claim.lanes and len(got.records) < claim.limit:
            got = await self._take(claim, got)
        if not _is_short(claim, got):
            self._scanner.look_soon(claim.app, claim.lanes, began)
            return got
        due = await self._next_due(claim)
        if due is not None and due <= claim.at:
            # It is due and was not taken. Most likely it is new, or of a rank that is unknown here; but if no
            # claimer can ever take it, set it aside.
            self._marks.forget(claim.app, claim.lanes)
            if (await self._candidates(claim, claim.limit))[0]:
                got = await self._take(claim, got)
            due = await self._next_due(claim) if _is_short(claim, got) else None
        self._scanner.look_soon(claim.app, claim.lanes, began)
        return replace(got, next_due_at=due)

    async def _narrowed(self, claim: Claim) -> Claim:
        """Return a claim of very many lanes that asks only for lanes with work. The lanes are asked for now and then,
        since the answer steps over all removed entries; lanes that get work meanwhile are added.
        """
        if len(claim.lanes) <= queries.MAX_RANGES:
            return claim
        app, news = claim.app, self._marks.news(claim.app)
        asked_at, there = self._there.get(app, (float("-inf"), frozenset()))
        if news is None or self._marks.now() - asked_at >= FRESH_SECONDS:
            asked_at = self._marks.now()
            self._marks.ask_for_lanes(app)
            there = frozenset(await queries.lanes(self._collection(schema.INVOCATIONS), app))
            self._there[app] = asked_at, there
        there |= self._marks.news(app) or set()
        return replace(claim, lanes=tuple(lane for lane in claim.lanes if lane in there))

    async def _claimed_before(self, claim: Claim) -> list[InvocationRecord]:
        """Return what an earlier try of this claim got.

        That try may still wait for the majority, and records that this read misses would stay owned and undone. So an
        empty write comes first, which returns when the majority has all earlier writes.
        """
        await schema.wait_for_majority(self._collection(schema.META))
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        return await self._quarantine.readable(await queries.claimed_before(invocations, claim))

    async def _next_due(self, claim: Claim) -> float | None:
        invocations = self._collection(schema.INVOCATIONS)
        found = await queries.next_due(invocations, claim, self._marks.lowest(claim.app, claim.lanes))
        if found is None:
            return None
        for one in seen_in([found]) or ():
            self._marks.lower(claim.app, *one)  # when it falls due, its rank is looked at
        return float(found["due_at"])

    async def _take(self, claim: Claim, got: Claimed) -> Claimed:
        wanted = claim.limit - len(got.records)
        bounds = claim.limits or claim.rates
        limited = any(claim.bounds(queries.task_in(lane)) for lane in claim.lanes) if bounds else False
        few = self._marks.ranges(claim.app, claim.lanes) <= queries.MAX_RANGES
        try:
            if wanted == 1 and few and not limited and not claim.ids and not self.contention.looks_first:
                return _with(got, Claimed(tuple(await self._take_one(claim))))
            return _with(got, await self._take_some(claim, wanted, limited))
        except OperationFailure as error:
            if is_transient(error):
                raise
            # A document that the server cannot change stops an update of many half-way: find what it took before, and
            # look at the others one by one.
            got = Claimed(tuple(await self._claimed_before(claim)))
            return await self._take_carefully(claim, got)

    async def _take_one(self, claim: Claim) -> list[InvocationRecord]:
        """Take the head of the queue, in one command."""
        found = await self._take_head(claim, self._marks.begin(claim.app, claim.lanes))
        if found is None and self._is_worth_a_whole_look(claim):
            found = await self._take_head(claim, self._marks.begin(claim.app, claim.lanes, whole=True))
        self.contention.took_head(found is not None)
        return [] if found is None else await self._quarantine.readable([found])

    async def _take_head(self, claim: Claim, look: Look) -> Document | None:
        """Take the first that a look meets. It goes through the index, where a sentinel stops it."""
        seen: list[Seen] | None = None
        try:
            found = await self._collection(schema.INVOCATIONS).find_one_and_update(
                queries.ready(claim.app, look.ranges, claim.at, {"status": {"$in": _AVAILABLE}}),
                pipeline(claimed(claim, anything(claim.app))),
                sort=queries.QUEUE_ORDER,
                hint="ready",
                return_document=ReturnDocument.AFTER,
            )
            seen = seen_in([] if found is None else [found])
            return found
        finally:
            self._marks.end(look, seen, 1, claim.at)

    async def _take_some(self, claim: Claim, wanted: int, limited: bool) -> Claimed:
        """Look at candidates until enough are taken or nothing is left. Blocked ones leave the queue, so that the next
        look shows the records behind them.
        """
        got = Claimed(())
        for _ in range(_MAX_WINDOWS if limited else _MAX_ROUNDS):
            candidates, more = await self._share(claim, max(wanted, _WINDOW) if limited else wanted)
            whole, rated = await self._allot(claim, candidates, wanted)
            allotment = await self._with_starts(whole, rated)
            waiting = [record for record, _ in allotment.blocked]
            try:
                records = await self._carry_out(claim, allotment)
            except OperationFailure as error:
                if not is_transient(error):  # a bad document; it does not need the slot for which others now wait
                    await self._look_once_more(claim, waiting)
                raise
            self.contention.learn(len(allotment.taken), len(records), claim.at)
            lanes = await self._look_once_more(claim, waiting)
            some = await self._go_on(claim, allotment, rated)
            some = replace(some, released=some.released + lanes)
            got = _with(got, replace(some, records=tuple(records)))
            wanted -= len(records)
            left = more or lanes or len(records) < len(whole.taken) or allotment.away < whole.away
            if wanted <= 0 or got.cut or not left:
                break
        return got

    async def _share(self, claim: Claim, limit: int) -> tuple[list[InvocationRecord], bool]:
        """Return the candidates of this claimer's share; if it has none, those of all, like a look at whole lanes."""
        share = None if claim.ids else self.contention.share(claim.at)
        if share is not None and not self._marks.is_stale(claim.app, claim.lanes):
            candidates, _ = await self._candidates(claim, limit, share)
            if candidates:
                return candidates, True
        return await self._candidates(claim, limit)

    async def _candidates(
        self, claim: Claim, limit: int, share: str | None = None
    ) -> tuple[list[InvocationRecord], bool]:
        """Return what a claim may take, and whether there may be more. Corrupt documents are quarantined."""
        found = await self._found(claim, limit, share)
        return await self._quarantine.readable(found), len(found) == limit

    async def _found(self, claim: Claim, limit: int, share: str | None) -> list[Document]:
        """Look from the marks on; at whole lanes, where that was not done for long."""
        if claim.ids:
            return await queries.candidates_by_id(self._collection(schema.INVOCATIONS), claim, limit)
        whole = self._marks.is_stale(claim.app, claim.lanes)
        found = await self._look(claim, limit, share, whole=whole)
        if len(found) < limit and share is None and not whole and self._is_worth_a_whole_look(claim):
            found = await self._look(claim, limit, share, whole=True)
        return found

    def _is_worth_a_whole_look(self, claim: Claim) -> bool:
        """Return whether a look from the marks on that found too little has to be followed by one at whole lanes."""
        wanted = (claim.app, claim.lanes)
        return self._marks.is_stale(*wanted) or self._marks.may_hide_ranks(*wanted)

    async def _look(self, claim: Claim, limit: int, share: str | None, *, whole: bool) -> list[Document]:
        look, seen = self._marks.begin(claim.app, claim.lanes, whole=whole), None
        try:
            invocations = self._collection(schema.INVOCATIONS)
            found = await queries.candidates(invocations, claim, look.ranges, limit, share)
            seen = seen_in(found) if share is None else None
            return found
        finally:
            self._marks.end(look, seen, limit, claim.at)

    async def _allot(
        self, claim: Claim, candidates: Sequence[InvocationRecord], wanted: int
    ) -> tuple[Allotment, RateBuckets]:
        """Decide about candidates, by the held slots and the buckets of all keys that the claim may reach."""
        keys, rate_keys, left = dict[str, None](), dict[str, None](), wanted
        for candidate in candidates:
            limited, rated = limit_of(candidate, claim.limits), rate_for(candidate, claim.rates)
            if limited is not None:
                keys[candidate.limit_key or ""] = None
            if rated is not None:
                rate_keys[candidate.terms.rate_key or ""] = None
            if limited is None and rated is None and (left := left - 1) == 0:
                break
        found: dict[str, dict[str, Holder]] = {}
        if keys and claim.limited:
            found = await held_slots(self._collection(schema.INVOCATIONS), claim.app, list(keys))
        held = Held(lambda key: found.get(key, {}))
        wanted_keys = list(rate_keys) if claim.limited else []
        rated_by = await buckets.read(self._collection, self._quarantine, claim.app, wanted_keys, claim.at)
        return allot(candidates, wanted, bounds_of(claim, held, rated_by)), rated_by

    async def _with_starts(self, allotment: Allotment, rated: RateBuckets) -> Allotment:
        """Take the starts of an allotment. Return it without the calls of buckets that another claimer has written."""
        used = {key for key in allotment.rate_keys() if rated.has(key)}
        if not used:
            return allotment
        await buckets.write(self._collection, rated)
        crashpoint("rate.taken")
        lost = {key for key in used if not rated.has(key)}
        return allotment.among(lambda record: record.terms.rate_key not in lost) if lost else allotment

    async def _go_on(self, claim: Claim, allotment: Allotment, rated: RateBuckets) -> Claimed:
        """Release waiters for the starts that come, each due at its start. Return the parts of the claim's answer."""
        refused = tuple(record.id for record, _ in allotment.refused)
        lanes = [record.lane for record, _, _ in allotment.deferred]
        if wishes := next_starts(rated):
            crashpoint("rate.claimed")
            gone = await self._invocations.release_waiters(claim.app, wishes, claim.operation, claim.at)
            self._marks.lower_for(gone)
            lanes += [record.lane for record in gone]
            counts = Counter(record.limit_key for record in gone)
            for wish in wishes:
                rated.released(wish.limit_key, wish.dues, counts[wish.limit_key])
            await buckets.write(self._collection, rated)
        return Claimed((), refused=refused, released=tuple(lanes), cut=allotment.cut, start_at=rated.next_at())

    async def _carry_out(self, claim: Claim, allotment: Allotment) -> list[InvocationRecord]:
        """Write an allotment in one command. If another claimer was faster, or a record was amended meanwhile, read
        back which records were taken.
        """
        invocations = self._collection(schema.INVOCATIONS)
        taken = [(record, claimed(claim, record, slot)) for record, slot in allotment.taken]
        changes = [_as_read(record, change) for record, change in (*taken, *turned_away(claim, allotment))]
        if not changes:
            return []
        try:
            result = await invocations.bulk_write(updates_of(changes, together=True), ordered=False)
            if result.matched_count == len(changes):
                return [apply_to(change, record) for record, change in taken]
        except BulkWriteError as error:
            errors = (error.details or {}).get("writeErrors", [])
            if is_transient(error) or any(item.get("code") != DUPLICATE for item in errors):
                raise
        keys = [key_of(record.app, record.id) for record, _ in taken]
        return await self._quarantine.readable(await queries.taken(invocations, claim, keys)) if taken else []

    async def _look_once_more(self, claim: Claim, waiting: Sequence[InvocationRecord]) -> tuple[str, ...]:
        """Return the lanes of waiters that go on: a slot was given back after it was seen held, before they waited."""
        if not waiting:
            return ()
        counts = Counter(record.limit_key or "" for record in waiting)
        limits = {record.limit_key: claim.limits[record.task].max_running for record in waiting}
        wishes = [Release(limit_key=key, count=count, max_running=limits[key]) for key, count in counts.items()]
        records = await self._invocations.release_waiters(claim.app, wishes, claim.operation, claim.at)
        self._marks.lower_for(records)
        return tuple(record.lane for record in records)

    # --- one by one

    async def _take_carefully(self, claim: Claim, got: Claimed) -> Claimed:
        """Take candidates one by one. A document that the server refuses for a reason of that document stays, and the
        documents behind it are taken. If there are no others, the error is raised.
        """
        refusal, seen, wanted = None, set[str](), claim.limit - len(got.records)
        if wanted <= 0:
            return got
        for window in (wanted * _WIDER**n for n in range(1, _MAX_ROUNDS + 1)):
            candidates, more = await self._candidates(claim, window)
            for record in [each for each in candidates if each.id not in seen]:
                seen.add(record.id)
                try:
                    got = _with(got, await self._take_this(claim, record))
                except OperationFailure as error:
                    if is_about_everything(error):
                        raise
                    self._quarantine.leave(key_of(record.app, record.id), error)
                    refusal = error
                if len(got.records) >= claim.limit or got.cut:
                    return got
            if refusal is None or not more:
                break
        if refusal is not None and not got.records:
            raise refusal
        return got

    async def _take_this(self, claim: Claim, record: InvocationRecord) -> Claimed:
        """Take one candidate. Quarantine it if it is to blame that the server cannot change it."""
        allotment, rated = await self._allot(claim, [record], 1)
        allotment = await self._with_starts(allotment, rated)
        try:
            records = await self._carry_out(claim, allotment)
        except OperationFailure as error:
            if not is_about_the_document(error):
                raise
            key = key_of(record.app, record.id)
            document = await self._collection(schema.INVOCATIONS).find_one({"_id": key})
            if document is not None:
                await self._quarantine.set_aside(document, CorruptRecord(f"{key} cannot be claimed: {error}"))
            return Claimed(())
        return replace(await self._go_on(claim, allotment, rated), records=tuple(records))


def _is_short(claim: Claim, got: Claimed) -> bool:
    """Return whether a claim has seen everything and got less than it wanted."""
    return len(got.records) < claim.limit and not claim.ids and bool(claim.lanes) and not got.cut


def _with(before: Claimed, more: Claimed) -> Claimed:
    return Claimed(
        before.records + more.records,
        refused=before.refused + more.refused,
        released=before.released + more.released,
        cut=more.cut,
        start_at=min([at for at in (before.start_at, more.start_at) if at is not None], default=None),
    )


def _as_read(record: InvocationRecord, change: Change) -> Change:
    """Let a change hold only while the record is as it was read: due, and for the same epoch."""
    return replace(change, version=record.version, epoch=record.epoch)


class Contention:
    """Keeps claimers apart that want the same invocations, without communication between them.

    A lone claimer takes the head of the queue, in exact order. Of several claimers that do so, all but one have looked
    and written in vain. So a claimer that finds others faster divides the queue by the last character of the ids, and
    takes the first of one share only: two shares, four, up to sixteen, and another share after each collision. Sixteen
    claimers thus settle within a few claims, each with its own share, and nothing is written for it. The server selects
    the share while it reads the index.

    A share without work is followed by a look at the head of all, and so is every sixteenth claim: invocations of a
    share without a claimer are the oldest there, or the most urgent. After each second without a collision the
    shares are doubled in size, until there is one again.

    Claims of one, in one command, notice no collision: the server repeats them silently. So after 64 claims in a
    row one looks first, to learn.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.shares = 1
        self._mine = 0
        self._learned_at = float("-inf")
        self._at_head = True  # whether the last look went there
        self._row = 0

    def share(self, at: float) -> str | None:
        """Return the ids to look for, as a regular expression; None: all."""
        if self.shares > 1 and not 0 <= at - self._learned_at < _CALM_SECONDS:
            self._divide(self.shares // 2, at)
        self._at_head = self.shares == 1 or self._rng.random() < _TO_THE_HEAD
        if self._at_head:
            return None
        size = len(ALPHABET) // self.shares
        return f"[{ALPHABET[self._mine * size : (self._mine + 1) * size]}]$"

    def learn(self, chosen: int, got: int, at: float) -> None:
        """Learn how many of the chosen records could be taken."""
        self._row = 0
        if got < chosen * _ENOUGH and (self.shares == 1 or not self._at_head):
            self._divide(min(self.shares * 2, _MAX_SHARES), at)

    def took_head(self, found: bool) -> None:
        """Learn whether a claim of one found a head to take."""
        self._row = self._row + 1 if found else 0

    @property
    def looks_first(self) -> bool:
        """Return whether a claim of one looks before it takes."""
        return self.shares > 1 or self._row >= _ROW

    def _divide(self, shares: int, at: float) -> None:
        self.shares, self._mine, self._learned_at = shares, self._rng.randrange(shares), at
