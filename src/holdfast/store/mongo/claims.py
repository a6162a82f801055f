"""How the MongoDB store claims.

A lone candidate is taken by one findOneAndUpdate; many are found, taken with a token by one updateMany, and read back.
Order is exact while claimers do not collide; when they do, each takes from a share of its own: see `Crowd`.

Where tasks have limits, candidates are looked at before they are taken. Each that needs a slot gets an update of its
own, since an updateMany would stop at the first slot that somebody else was faster with; the unique index decides, and
a duplicate means: look again, take another. Those for whom there is none are moved out of the queue in the same
command. Then comes one more look at their keys: whoever gave back a slot in between has not seen them wait.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import convert
from msgspec.structs import replace
from pymongo import ReturnDocument, UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import Change
from holdfast.lifecycle.claims import Claim, Claimed, blocked, claimed, refused
from holdfast.lifecycle.decoding import shown
from holdfast.lifecycle.limits import Allotment, Held, Holder, Release, allot, limit_of, why_blocked, why_refused
from holdfast.lifecycle.records import PLAIN, InvocationRecord, Terms
from holdfast.lifecycle.retention import retain_until
from holdfast.lifecycle.status import AVAILABLE, Status
from holdfast.store.mongo import queries, schema
from holdfast.store.mongo.behind import Behind, seen_in
from holdfast.store.mongo.crowd import Crowd
from holdfast.store.mongo.documents import Document, pipeline
from holdfast.store.mongo.limits import held_slots, release_waiters
from holdfast.store.mongo.marks import FRESH_SECONDS, Look, Seen
from holdfast.store.mongo.quarantine import Collections, Quarantine
from holdfast.store.mongo.retry import DUPLICATE, is_about_everything, is_about_the_document, is_transient

_AVAILABLE = frozenset(status.value for status in AVAILABLE)
_MOST_ROUNDS = 3
_WIDER = 4  # how much more is looked at in the next round, where some cannot be taken
_WINDOW = 50  # how many candidates are looked at where some of them may be blocked
_MOST_WINDOWS = 8


class Claims:
    def __init__(self, collection: Collections, quarantine: Quarantine, rng: random.Random, behind: Behind) -> None:
        self._collection = collection
        self._quarantine = quarantine
        self._behind = behind
        self._marks = behind.marks
        self._there: dict[str, tuple[float, frozenset[str]]] = {}  # by app: lanes that had something, and when
        self.crowd = Crowd(rng)

    async def claim(self, claim: Claim, again: bool) -> Claimed:
        claim, began = await self._narrowed(claim), self._marks.now()
        got = Claimed(tuple(await self._claimed_before(claim) if again else ()))
        if claim.lanes and len(got.records) < claim.limit:
            got = await self._take(claim, got)
        if not _is_short(claim, got):
            self._behind.look_soon(claim.app, claim.lanes, began)
            return got
        due = await self._next_due(claim)
        if due is not None and due <= claim.at:
            # It is due and was not taken. Most likely it is new, or of a rank that nobody here has met; but if nobody
            # can ever take it, set it aside.
            self._marks.forget(claim.app, claim.lanes)
            if (await self._candidates(claim, claim.limit))[0]:
                got = await self._take(claim, got)
            due = await self._next_due(claim) if _is_short(claim, got) else None
        self._behind.look_soon(claim.app, claim.lanes, began)
        return replace(got, next_due_at=due)

    async def _narrowed(self, claim: Claim) -> Claim:
        """Of very many lanes, ask only for those that have something. Which ones that are is asked for now and then,
        since the answer steps over all that was removed; lanes that something comes to meanwhile are added.
        """
        if len(claim.lanes) <= queries.MOST_RANGES:
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
        """What an earlier try of this claim got.

        That try may still be waiting for the majority, and what this read did not show would stay ours and undone.
        So a write comes first that changes nothing, and returns when the majority has all that was before it.
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
        try:
            if claim.limits and any(queries.task_in(lane) in claim.limits for lane in claim.lanes):
                return _with(got, await self._take_with_slots(claim, wanted))
            if wanted == 1 and not claim.ids and self._marks.ranges(claim.app, claim.lanes) <= queries.MOST_RANGES:
                return _with(got, Claimed(tuple(await self._take_one(claim))))
            return _with(got, Claimed(tuple(await self._take_many(claim, wanted))))
        except OperationFailure as error:
            if is_transient(error):
                raise
            # A document that the pipeline cannot digest stops an update of many half-way: find what it took before,
            # and look at the others one by one.
            got = Claimed(tuple(await self._claimed_before(claim)))
            return await self._take_carefully(claim, got)

    async def _take_one(self, claim: Claim) -> list[InvocationRecord]:
        """The head of the queue, in one command; in a crowd, the head of a share, in two."""
        if self.crowd.looks_first:
            for _ in range(_MOST_ROUNDS):
                candidates, _ = await self._share(claim, 1)
                if not candidates:
                    return []
                found = await self._take_this(claim, _candidate(candidates[0]), None)
                self.crowd.learn(1, int(found is not None), claim.at)
                if found is not None:
                    return await self._quarantine.readable([found])
        found = await self._take_head(claim, self._marks.begin(claim.app, claim.lanes))
        if found is None and self._is_worth_a_whole_look(claim):
            found = await self._take_head(claim, self._marks.begin(claim.app, claim.lanes, whole=True))
        self.crowd.took_head(found is not None)
        return [] if found is None else await self._quarantine.readable([found])

    async def _take_head(self, claim: Claim, look: Look) -> Document | None:
        """Take the first that a look meets. It goes through the index, where a sentinel stops it."""
        seen: list[Seen] | None = None
        try:
            found = await self._collection(schema.INVOCATIONS).find_one_and_update(
                queries.ready(claim.app, look.ranges, claim.at, {"status": _claimable(claim)["status"]}),
                _pipeline_of(claim),
                sort=queries.QUEUE_ORDER,
                hint="ready",
                return_document=ReturnDocument.AFTER,
            )
            seen = seen_in([] if found is None else [found])
            return found
        finally:
            self._marks.end(look, seen, 1, claim.at)

    async def _take_many(self, claim: Claim, wanted: int) -> list[InvocationRecord]:
        """Find candidates, take them with a token, read back what was taken. Repeated while others are faster."""
        invocations = self._collection(schema.INVOCATIONS)
        got: list[InvocationRecord] = []
        for _ in range(_MOST_ROUNDS):
            candidates, more = await self._share(claim, wanted)
            if chosen := [found["_id"] for found in candidates]:
                result = await invocations.update_many(
                    {"_id": {"$in": chosen}} | _claimable(claim), _pipeline_of(claim)
                )
                self.crowd.learn(len(chosen), result.modified_count, claim.at)
                if result.modified_count:
                    got += await self._quarantine.readable(await queries.taken(invocations, claim, chosen))
                wanted -= result.modified_count
            if wanted <= 0 or not more:
                break
        return got

    async def _share(self, claim: Claim, most: int) -> tuple[list[Document], bool]:
        """The candidates of this claimer's share; if it has none, those of all. A look at whole lanes is for all."""
        share = None if claim.ids else self.crowd.share(claim.at)
        if share is not None and not self._marks.is_stale(claim.app, claim.lanes):
            candidates, _ = await self._candidates(claim, most, share)
            if candidates:
                return candidates, True
        return await self._candidates(claim, most)

    async def _candidates(self, claim: Claim, most: int, share: str | None = None) -> tuple[list[Document], bool]:
        """What a claim may take, and whether there may be more. What is marked as ready and cannot be is set aside."""
        found = await self._found(claim, most, share)
        sound = [one for one in found if _is_sound(one)]
        if len(sound) < len(found):
            strange = [one["_id"] for one in found if one not in sound]
            for document in await queries.by_key(self._collection(schema.INVOCATIONS), strange):
                why = f"{document['_id']} is marked as ready with status {shown(document.get('status'))}"
                await self._quarantine.set_aside(document, CorruptRecord(f"{why}, rank {shown(document.get('rank'))}"))
        return sound, len(found) == most

    async def _found(self, claim: Claim, most: int, share: str | None) -> list[Document]:
        """Look from the marks on; at whole lanes, where that was not done for long."""
        invocations = self._collection(schema.INVOCATIONS)
        if claim.ids:
            return await queries.candidates_by_id(invocations, claim, most)
        whole = self._marks.is_stale(claim.app, claim.lanes)
        found = await self._look(claim, most, share, whole=whole)
        if len(found) < most and share is None and not whole and self._is_worth_a_whole_look(claim):
            found = await self._look(claim, most, share, whole=True)
        return found

    def _is_worth_a_whole_look(self, claim: Claim) -> bool:
        """Whether a look from the marks on that found too little has to be followed by one at the whole lanes."""
        wanted = (claim.app, claim.lanes)
        return self._marks.is_stale(*wanted) or self._marks.may_hide_ranks(*wanted)

    async def _look(self, claim: Claim, most: int, share: str | None, *, whole: bool) -> list[Document]:
        look, seen = self._marks.begin(claim.app, claim.lanes, whole=whole), None
        try:
            invocations = self._collection(schema.INVOCATIONS)
            found = await queries.candidates(invocations, claim, look.ranges, most, share)
            seen = seen_in(found) if share is None else None
            return found
        finally:
            self._marks.end(look, seen, most, claim.at)

    # --- under limits

    async def _take_with_slots(self, claim: Claim, wanted: int) -> Claimed:
        """Look at candidates window by window, until so many are taken or nothing is left. What is blocked leaves the
        queue, so the next window shows what was behind it.
        """
        got = Claimed(())
        for _ in range(_MOST_WINDOWS):
            found, more = await self._share(claim, max(wanted, _WINDOW))
            candidates = [_candidate(document) for document in found]
            held = await self._held(claim, candidates, wanted)
            allotment = allot(
                candidates, wanted, limits=claim.limits, limited=claim.limited, held=held, owner=claim.owner
            )
            try:
                records = await self._carry_out(claim, allotment, held)
            except OperationFailure as error:
                if not is_transient(error):  # a bad document; it does not need the slot for which others now wait
                    await self._look_once_more(claim, allotment.blocked)
                raise
            self.crowd.learn(len(allotment.taken), len(records), claim.at)
            no = tuple(candidate.id for candidate in allotment.refused)
            lanes = await self._look_once_more(claim, allotment.blocked)
            got = _with(got, Claimed(tuple(records), refused=no, released=lanes, cut=allotment.cut))
            wanted -= len(records)
            if wanted <= 0 or got.cut or not (more or lanes or len(records) < len(allotment.taken)):
                break
        return got

    async def _held(self, claim: Claim, candidates: Sequence[_Candidate], wanted: int) -> Held:
        """The held slots of all keys that may come into play before so many without a limit are found."""
        keys: dict[str, None] = {}
        for candidate in candidates:
            if limit_of(candidate, claim.limits) is None:
                wanted -= 1
                if wanted == 0:
                    break
            else:
                keys[candidate.limit_key or ""] = None
        found: dict[str, dict[str, Holder]] = {}
        if keys and claim.limited:
            found = await held_slots(self._collection(schema.INVOCATIONS), claim.app, list(keys))
        return Held(lambda key: found.get(key, {}))

    async def _carry_out(self, claim: Claim, allotment: Allotment[_Candidate], held: Held) -> list[InvocationRecord]:
        """All of it in one command, then read back what was taken; or for a lone one, one command."""
        invocations = self._collection(schema.INVOCATIONS)
        taken = [candidate.key for candidate, _ in allotment.taken]
        away = _turned_away(claim, allotment, held)
        if len(taken) == 1 and not away:
            record = await self._take_this(claim, *allotment.taken[0])
            return [] if record is None else await self._quarantine.readable([record])
        plain = [candidate.key for candidate, slot in allotment.taken if slot is None]
        updates: list[UpdateOne | UpdateMany] = [
            UpdateOne({"_id": candidate.key} | _claimable(claim), _pipeline_of(claim, slot))
            for candidate, slot in allotment.taken
            if slot is not None
        ]
        if plain:
            updates.append(UpdateMany({"_id": {"$in": plain}} | _claimable(claim), _pipeline_of(claim)))
        updates += [UpdateMany(guard, update) for guard, update in away]
        if not updates:
            return []
        try:
            await invocations.bulk_write(updates, ordered=False)
        except BulkWriteError as error:
            errors = (error.details or {}).get("writeErrors", [])
            if is_transient(error) or any(item.get("code") != DUPLICATE for item in errors):
                raise
        return await self._quarantine.readable(await queries.taken(invocations, claim, taken)) if taken else []

    async def _take_this(self, claim: Claim, candidate: _Candidate, slot: str | None) -> Document | None:
        invocations = self._collection(schema.INVOCATIONS)
        try:
            return await invocations.find_one_and_update(
                {"_id": candidate.key} | _claimable(claim),
                _pipeline_of(claim, slot),
                return_document=ReturnDocument.AFTER,
            )
        except DuplicateKeyError:
            return None

    async def _look_once_more(self, claim: Claim, waiting: Sequence[_Candidate]) -> tuple[str, ...]:
        """The lanes of those who can go on: a slot was given back after we had seen it held, and before we wait."""
        if not waiting:
            return ()
        counts = Counter(candidate.limit_key or "" for candidate in waiting)
        most = {candidate.limit_key: claim.limits[candidate.task].most for candidate in waiting}
        wishes = [Release(limit_key=key, count=count, most=most[key]) for key, count in counts.items()]
        records = await release_waiters(
            self._collection(schema.INVOCATIONS), self._quarantine, claim.app, wishes, claim.operation, claim.at
        )
        self._marks.lower_for(records)
        return tuple(record.lane for record in records)

    # --- one by one

    async def _take_carefully(self, claim: Claim, got: Claimed) -> Claimed:
        """What the server refuses for a reason of its own stays, and those behind it are taken. If there is nothing
        else, its reason is raised.
        """
        refusal, seen, wanted = None, set[str](), claim.limit - len(got.records)
        if wanted <= 0:
            return got
        for window in (wanted * _WIDER**n for n in range(1, _MOST_ROUNDS + 1)):
            candidates, more = await self._candidates(claim, window)
            for key in [found["_id"] for found in candidates if found["_id"] not in seen]:
                seen.add(key)
                try:
                    got = _with(got, await self._take_if_sound(claim, key))
                except OperationFailure as error:
                    if is_about_everything(error):
                        raise
                    self._quarantine.leave(key, error)
                    refusal = error
                if len(got.records) >= claim.limit or got.cut:
                    return got
            if refusal is None or not more:
                break
        if refusal is not None and not got.records:
            raise refusal
        return got

    async def _take_if_sound(self, claim: Claim, key: str) -> Claimed:
        document = await self._collection(schema.INVOCATIONS).find_one({"_id": key})
        if document is None or not await self._quarantine.readable([document]):
            return Claimed(())
        candidate = _candidate(document)
        held = await self._held(claim, [candidate], 1)
        allotment = allot([candidate], 1, limits=claim.limits, limited=claim.limited, held=held, owner=claim.owner)
        try:
            records = await self._carry_out(claim, allotment, held)
        except OperationFailure as error:
            if not is_about_the_document(error):
                raise
            await self._quarantine.set_aside(document, CorruptRecord(f"{key} cannot be claimed: {error}"))
            return Claimed(())
        no = tuple(candidate.id for candidate in allotment.refused)
        return Claimed(tuple(records), refused=no, cut=allotment.cut)


def _is_short(claim: Claim, got: Claimed) -> bool:
    """Whether a claim has seen everything and got less than it wanted."""
    return len(got.records) < claim.limit and not claim.ids and bool(claim.lanes) and not got.cut


class _Candidate(NamedTuple):
    """What is known of a document that may be taken. See `holdfast.lifecycle.limits.Candidate`."""

    key: str
    id: InvocationId
    task: str
    limit_key: str | None
    status: Status
    terms: Terms
    name: str | None  # its idempotency key

    def kept_until(self, at: float) -> float:
        """If it is refused now."""
        return retain_until(self.terms, self.name, Status.CONCURRENCY_CONTROLLED_FINAL, at)


def _candidate(document: Document) -> _Candidate:
    """A field may be missing or strange: whoever reads the whole document finds out."""
    id, task, key, name = (document.get(each) for each in ("id", "task", "limit_key", "key"))
    try:
        terms = convert(document.get("terms", {}), Terms)
    except Exception:
        terms = PLAIN
    status, limit_key = Status(document["status"]), key if isinstance(key, str) else None
    return _Candidate(document["_id"], InvocationId(str(id)), str(task), limit_key, status, terms, name)


def _is_sound(document: Document) -> bool:
    status, rank = document.get("status"), document.get("rank")
    return isinstance(status, str) and status in _AVAILABLE and isinstance(rank, int | float)


def _with(before: Claimed, more: Claimed) -> Claimed:
    return Claimed(
        before.records + more.records,
        refused=before.refused + more.refused,
        released=before.released + more.released,
        cut=more.cut,
    )


def _turned_away(claim: Claim, allotment: Allotment[_Candidate], held: Held) -> list[tuple[Document, list[Document]]]:
    """Guard and update for each key, of those for whom there is no slot."""
    updates: list[tuple[Document, list[Document]]] = []
    nobody, operation, at = _nobody(claim), claim.operation, claim.at
    for key, names in _by_key(allotment.blocked).items():
        change = blocked(nobody, operation=operation, at=at, why=why_blocked(key))
        updates.append(({"_id": {"$in": names}} | _claimable(claim), pipeline(change)))
    for until in dict.fromkeys(candidate.kept_until(at) for candidate in allotment.refused):
        same = [candidate for candidate in allotment.refused if candidate.kept_until(at) == until]
        for key, names in _by_key(same).items():
            change = refused(nobody, operation=operation, at=at, why=why_refused(key, held.of(key)))
            guard = {"_id": {"$in": names}} | _claimable(claim) | _from(change)
            updates.append((guard, pipeline(replace(change, retain_until=until))))
    return updates


def _by_key(candidates: Sequence[_Candidate]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for candidate in candidates:
        found.setdefault(candidate.limit_key or "", []).append(candidate.key)
    return found


def _claimable(claim: Claim) -> Document:
    """What has to hold still when it is taken. What was due when it was looked at may have been debounced since."""
    return {"ready": True, "status": {"$in": sorted(_AVAILABLE)}, "due_at": {"$lte": claim.at}}


def _from(change: Change) -> Document:
    return {"status": {"$in": sorted(status.value for status in change.sources)}}


def _nobody(claim: Claim) -> InvocationRecord:
    return InvocationRecord(id=InvocationId("*"), app=claim.app, task="*", arguments=b"", created_at=0, due_at=0)


def _pipeline_of(claim: Claim, slot: str | None = None) -> list[Document]:
    """What a claim does to any invocation: it depends on none of them, so one pipeline serves a whole batch."""
    return pipeline(claimed(claim, _nobody(claim), slot))
