"""Rerun: what has ended is stored once more, as a new invocation with the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.codec import Payload, Reference, damage_of, references
from holdfast.codec.sealing import is_broken, is_sealed, why_sealed
from holdfast.errors import EncryptionKeyMissing, PayloadLost, UsageError
from holdfast.ids import InvocationId, derived_id, is_id
from holdfast.model.parking import DAMAGED
from holdfast.model.records import KEY_SECONDS, InvocationRecord, RunState, registered
from holdfast.model.status import FINAL
from holdfast.runtime.app_runtime import DeclaredTask
from holdfast.runtime.engine import Engine
from holdfast.tracing import linked

_TIME_CHARACTERS = 10  # of an id: the millisecond


class Rerun(NamedTuple):
    """An ended invocation, and the invocation that repeats it; or why there is none."""

    original: InvocationRecord
    id: str | None
    why: str = ""


class Edited(NamedTuple):
    """Other arguments for a rerun, encoded, with the keys of the limit and of the rate that they mean."""

    arguments: bytes
    limit_key: str | None
    rate_key: str | None
    payloads: Sequence[Payload]


def edited(
    engine: Engine, task: DeclaredTask | None, record: InvocationRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Edited:
    """Return other arguments for a rerun of `record`; `task` is None where its code is not known. Not on the engine's
    loop: that may run user code. Raises `ArgumentsDoNotBind`, `NotEncodable`, and `EncryptionKeyMissing` if the old
    arguments are encrypted with a key that this process lacks: it would store the new ones in the clear.
    """
    if is_sealed(record.arguments) and not is_broken(record.arguments):
        raise EncryptionKeyMissing(
            f"the arguments of {record.id} are {why_sealed(record.arguments)}, which this process lacks: see "
            "encryption_keys. It would store other ones in the clear. A process with that key can do it."
        )
    if task is None:
        packed = engine.codec.pack_call(args, kwargs, (), engine.limits)
        return Edited(packed.data, record.limit_key, record.terms.rate_key, packed.payloads)
    fresh, payloads = task.prepared(engine, args, kwargs)
    return Edited(fresh.arguments, fresh.limit_key, fresh.terms.rate_key, payloads)


class Rerunner:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app

    def is_of(self, request: str, record: InvocationRecord) -> bool:
        """Return whether this request has made that invocation: it is not to be repeated by the same request."""
        return record.rerun_of is not None and record.id == self._id(record.rerun_of, request)

    def _id(self, original: str, request: str) -> InvocationId:
        """Return the id of a rerun. It sorts by the time of the request, if its id has one."""
        derived = derived_id("rerun", self._app, original, request)
        return InvocationId(request[:_TIME_CHARACTERS] + derived[_TIME_CHARACTERS:]) if is_id(request) else derived

    async def rerun(
        self,
        originals: Sequence[InvocationRecord],
        *,
        request: str,
        due_at: float,
        new_key: bool = False,
        edited: Edited | None = None,
    ) -> list[Rerun]:
        """Store a new invocation for each of these, or say why not; with the arguments of the first, or with `edited`
        ones. Idempotent, by the request.

        Its effects have the idempotency keys of the first run, unless `new_key`.
        """
        damage: dict[str, str] = {}  # by digest, as several may share one
        refusals = {record.id: why for record in originals if (why := await self._why_not(record, damage, edited))}
        foreign, elsewhere = self._engine.foreign, dict[str, str]()
        for record in originals:
            if foreign is not None and foreign.has(record) and record.id not in refusals:
                if edited is not None:
                    refusals[record.id] = "a World run is run again with the arguments that it had"
                    continue
                try:
                    elsewhere[record.id] = await foreign.rerun(record, request)
                except (UsageError, PayloadLost) as error:
                    refusals[record.id] = str(error)
        ours = [record for record in originals if record.id not in refusals and record.id not in elsewhere]
        fresh = [self._repeated(record, request, due_at, new_key, edited) for record in ours]
        payloads = () if edited is None else edited.payloads
        for new, there in zip(fresh, await self._engine.submitter.submit(fresh, payloads), strict=True):
            if there is not None and there.rerun_of != new.rerun_of:
                refusals[new.rerun_of or new.id] = f"its new id {new.id} is taken by something else"
        return [
            Rerun(record, None, refusals[record.id])
            if record.id in refusals
            else Rerun(record, elsewhere.get(record.id) or self._id(record.id, request))
            for record in originals
        ]

    async def _why_not(self, record: InvocationRecord, damage: dict[str, str], edited: Edited | None) -> str:
        """Return why it cannot be run again; empty if it can. Payloads of its arguments are kept for a day from now."""
        if record.status not in FINAL:
            return f"it is {record.status}; only what has ended can be run again"
        if edited is not None:
            return ""
        if damage_found := damage_of(record.arguments, of_call=True):
            return f"{DAMAGED}: {damage_found}"
        for reference in references(record.arguments):
            if reference.digest not in damage:
                damage[reference.digest] = await self._damage(reference)
            if why := damage[reference.digest]:
                return f"its arguments cannot be read: {why}"
        return ""

    async def _damage(self, reference: Reference) -> str:
        await self._store.keep_payloads(self._app, [reference.digest])
        try:
            await self._engine.payloads.fetch([reference], fresh=True)
        except PayloadLost as error:
            return str(error)
        return ""

    def _repeated(
        self, record: InvocationRecord, request: str, due_at: float, new_key: bool, edited: Edited | None
    ) -> InvocationRecord:
        now, follow = self._store.now(), record.terms.follow
        if follow is not None:  # its own chain
            follow = msgspec.structs.replace(follow, chain=None, place=0)
        effects_key = None if new_key else record.key_of_effects
        terms = msgspec.structs.replace(
            record.terms,
            key_seconds=KEY_SECONDS,
            key_until=None,
            start_by=None,
            follow=follow,
            group=None,
            trace=linked(record.terms.trace),
            rate_key=record.terms.rate_key if edited is None else edited.rate_key,
        )
        fresh = InvocationRecord(
            id=self._id(record.id, request),
            app=record.app,
            task=record.task,
            arguments=record.arguments if edited is None else edited.arguments,
            queue=record.queue,
            tags=record.tags,
            priority=record.priority,
            at_most_once=record.at_most_once,
            limit_key=record.limit_key if edited is None else edited.limit_key,
            terms=msgspec.structs.replace(terms, effects_key=effects_key if record.run is None else None),
            attributes=record.terms.attributes or {},
            rerun_of=record.id,
            run=None if record.run is None else RunState(effects_key=effects_key),
            created_at=now,
            due_at=due_at,
        )
        operation = derived_id("rerun operation", self._app, record.id, request)
        return registered(fresh, operation=operation, at=now, why=f"rerun of {record.id}")
