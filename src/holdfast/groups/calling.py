"""Calls that follow others: the next link of a chain, the callback of a group, a call on an error.

The end of an invocation names what follows in its outbox, in the same write. Its writer submits the call at once, and
the sweep of outboxes submits what was left. All ids follow from the chain or group, so twice is once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from holdfast.codec import ErrorRecord
from holdfast.crashpoints import crashpoint
from holdfast.errors import CallNotMade
from holdfast.groups import rules
from holdfast.ids import InvocationId
from holdfast.model.changes import apply_to, change_of
from holdfast.model.records import (
    ENDED,
    Cancellation,
    Follow,
    Hint,
    InvocationRecord,
    NextCall,
    Origin,
    Source,
    invocation_of,
)
from holdfast.model.status import Status
from holdfast.runtime.engine import Engine


class Caller:
    """Submits the calls that follow ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app

    async def follow(self, ended: Sequence[InvocationRecord]) -> Collection[str]:
        """Submit what follows these ends. Return the ids of those to try again: none."""
        calls: list[InvocationRecord] = []
        kept: list[str] = []
        for record in ended:
            follow = record.terms.follow
            if follow is None:
                continue
            if record.status is Status.SUCCESS:
                if follow.rest:
                    call = rules.following(follow.rest[0], record.result or b"")
                    kept += [reference.digest for reference in call.stored]
                    calls.append(self._next(record, follow, call.arguments))
            else:
                calls += self._failed(record, follow)
        if kept:
            await self._store.keep_payloads(self._app, kept)
        there = await self.submit(calls)
        await self.submit(
            [each for call, holder in zip(calls, there, strict=True) for each in self._of_closed(call, holder)]
        )
        crashpoint("follow.made")
        return ()

    async def submit(self, calls: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        """Store calls. Return the records that were stored already, in their places."""
        if not calls:
            return ()
        there = await self._engine.submitter.submit(calls)
        if over := [record.id for record in calls if record.status is not Status.REGISTERED]:
            self._engine.hub.send(Hint(ENDED, tuple(over), len(over)))
        if told := [record.id for record in calls if record.outbox]:
            self._engine.outbox.ended(told)
        return there

    def _next(self, record: InvocationRecord, follow: Follow, arguments: bytes) -> InvocationRecord:
        link, rest = follow.rest[0], follow.rest[1:]
        first, place = rules.first_of(record), follow.place + 1
        after = Follow(rest=rest, on_error=follow.on_error, chain=first, place=place)
        return self.record(
            link,
            rules.link_id(first, place),
            arguments,
            why=f"{record.task} {record.id} has ended",
            parent=record.parent_id,
            origin=from_end(record),
            follow=after if rest or after.on_error else None,
        )

    def _of_closed(self, call: InvocationRecord, there: InvocationRecord | None) -> list[InvocationRecord]:
        """Return the call on errors, if a link was to be called whose chain was cancelled between two links: its id is
        taken, and no running link reports the cancellation.
        """
        follow = call.terms.follow
        if follow is None or there is None or there.status is not Status.CANCELLED or there.terms.follow is not None:
            return []
        return self._failed(there, replace(follow, rest=()))

    def _failed(self, record: InvocationRecord, follow: Follow) -> list[InvocationRecord]:
        """Return what follows the failure of a link: the end of the chain, which says so, and the call on errors."""
        first, calls = follow.chain or record.id, []
        if follow.rest:
            last = follow.rest[-1]
            id = rules.link_id(first, follow.place + len(follow.rest))
            end = self.record(last, id, last.call.arguments, parent=record.parent_id, origin=from_end(record))
            said = f"{record.task} {record.id}, link {follow.place + 1} of its chain, ended as {record.status}"
            calls.append(self.ended(end, said, rules.error_of(record), record.cancellation))
        if (link := follow.on_error) is not None:
            told = rules.following(link, rules.DATA.encode(rules.failure_of(record, record.id)))
            why = f"{record.task} {record.id} ended as {record.status}"
            id, parent, origin = rules.error_id(first), record.parent_id, from_end(record)
            calls.append(self.record(link, id, told.arguments, why=why, parent=parent, origin=origin))
        return calls

    def record(
        self,
        link: NextCall,
        id: InvocationId,
        arguments: bytes,
        *,
        why: str = "",
        parent: InvocationId | None = None,
        origin: Origin | None = None,
        follow: Follow | None = None,
    ) -> InvocationRecord:
        """Return the invocation of a link."""
        engine, now = self._engine, self._store.now()
        call = link.call
        return invocation_of(
            call,
            operation=engine.ids.operation(),
            why=why,
            id=id,
            app=self._app,
            arguments=arguments,
            created_at=now,
            due_at=engine.submitter.due_after(link.delay_seconds, now),
            changed_at=now,
            parent_id=parent,
            origin=origin,
            terms=call.terms if follow is None else replace(call.terms, follow=follow),
        )

    def ended(
        self,
        record: InvocationRecord,
        why: str,
        error: ErrorRecord | None = None,
        cancellation: Cancellation | None = None,
    ) -> InvocationRecord:
        """Return the record as if it had never run: as CANCELLED, if what it was to follow was, else as FAILED."""
        target = Status.FAILED if cancellation is None or error is not None else Status.CANCELLED
        said = f"{record.task} was not called: {why}"
        operation, at = self._engine.ids.operation(), record.created_at
        sources = frozenset({Status.REGISTERED})
        change = change_of("refused", record, (target,), sources, operation=operation, at=at, why=said)
        if target is Status.FAILED:
            found = error or rules.DATA.encode_error(CallNotMade(said, invocation_id=record.id))
            change = replace(change, error=found)
        elif cancellation is not None:
            change = replace(change, cancellation=cancellation)
        told = (*(change.outbox or ()), *self._engine.outbox.of_end(record.task, target))
        return apply_to(replace(change, outbox=told) if told else change, record)


def from_end(record: InvocationRecord) -> Origin:
    """Return the origin of a call that follows the end of an invocation."""
    return following_on(record.origin, Source(kind="end", id=record.id, name=record.task))


def following_on(origin: Origin | None, source: Source) -> Origin:
    """Return the origin of a call that follows something of this origin: no trigger is between them."""
    before = origin or Origin()
    return Origin(sources=(source,), depth=before.depth, path=before.path)
