"""Calls that are not submitted yet, and how they belong together: `group`, `chain`, `then` and `on_error`.

A chain is stored with its first call: one write. A group is stored in this order: the group, if its end causes
something; its members; then that it is whole. What dies in between leaves nothing, or an open group that the services
close.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, Never, NoReturn, Protocol, Self, TypeVar, cast

from msgspec.structs import replace

from holdfast.codec import Payload, Seen
from holdfast.crashpoints import crashpoint
from holdfast.errors import KeyTaken, StoreError, StoreReadOnly, UsageError
from holdfast.executors.context import origin_in, parent_in
from holdfast.groups import rules
from holdfast.groups.handles import ChainInvocation, InvocationGroup, handle_of
from holdfast.groups.records import GroupRecord
from holdfast.groups.service import ABANDONED_SECONDS, Groups
from holdfast.groups.words import Composed
from holdfast.ids import InvocationId
from holdfast.invocation import Invocation
from holdfast.model.records import Follow, InvocationRecord, NextCall, Terms
from holdfast.runtime.app_runtime import AppRuntime, completed, running_body
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_all
from holdfast.telemetry.tasks import here

R = TypeVar("R", covariant=True)
STORED_AT_ONCE = 1000
_TRIES = 5


class AnySubmittable(Protocol):
    """A task, as calls see it."""

    @property
    def name(self) -> str: ...
    @property
    def runtime(self) -> AppRuntime: ...
    @property
    def definition(self) -> TaskDefinition: ...
    @property
    def has_session(self) -> bool: ...
    def s(self, *args: Any, **kwargs: Any) -> TaskCall[Any]: ...
    def link(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes: bool) -> NextCall: ...
    def prepared(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: Seen | None = None,
        shared: Mapping[str, bytes] | None = None,
    ) -> tuple[InvocationRecord, list[Payload]]: ...
    async def store_chain(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        follow: Callable[[Engine], Follow] | None,
        *,
        is_blocking: bool,
    ) -> Invocation[Any]: ...


class TaskCall(Composed, Generic[R]):
    """A call of a task, with its arguments: ``add.s(1, 2)``."""

    def __init__(
        self, task: AnySubmittable, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes: bool = True
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.takes = takes

    def __repr__(self) -> str:
        given = [f"{value!r:.80}" for value in self.args] + [
            f"{key}={value!r:.80}" for key, value in self.kwargs.items()
        ]
        return f"{self.task.name}.{'s' if self.takes else 'si'}({', '.join(given)})"

    def then(self, call: Any) -> Chain[Any]:
        """Return a chain of this call and another call, which takes its result."""
        return Chain((self,)).then(call)

    def on_error(self, call: Any) -> Chain[R]:
        """Return this call with another call for its failure, which takes a dict about the failure."""
        return Chain[R]((self,)).on_error(call)

    def submit(self) -> Invocation[R]:
        """Store the call, as `Task.submit` does."""
        return Chain[R]((self,)).submit()

    async def asubmit(self) -> Invocation[R]:
        return await Chain[R]((self,)).asubmit()

    def linked(self, engine: Engine) -> NextCall:
        return self.task.link(engine, self.args, self.kwargs, takes=self.takes)


class Chain(Composed, Generic[R]):
    """Calls one after another, each with the result of the one before."""

    def __init__(self, calls: tuple[TaskCall[Any], ...], error: TaskCall[Any] | None = None) -> None:
        self.calls = calls
        self.error_call = error

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.calls))})"

    def then(self, call: Any) -> Chain[Any]:
        """Return the chain with another call at its end, or all those of another chain."""
        chain = as_chain(call)
        if self.error_call is not None and chain.error_call is not None:
            raise UsageError("a chain has one on_error(): it is called for the first link that fails")
        calls = (*self.calls, *chain.calls)
        if len(calls) > rules.MOST_LINKS:
            raise UsageError(
                f"a chain has at most {rules.MOST_LINKS} links, and these are {len(calls)}: a workflow has any number"
            )
        return Chain(calls, self.error_call or chain.error_call)

    def on_error(self, call: Any) -> Self:
        """Return the chain with a call for the case that a link does not succeed. It takes a dict: `invocation`,
        `task`, `status`, `type` and `message`.
        """
        if self.error_call is not None:
            raise UsageError(f"on_error() is given already: {self.error_call}; have that task submit the other one")
        found = as_chain(call)
        if len(found.calls) != 1 or found.error_call is not None:
            raise UsageError("on_error() takes one call: have that task submit what is to follow it")
        return cast(Self, Chain(self.calls, found.calls[0]))

    def submit(self) -> Invocation[R]:
        """Store the chain: once this returns, no process has to stay alive for its links to be called in turn."""
        return completed(self._store(is_blocking=True))

    async def asubmit(self) -> Invocation[R]:
        return await self._store(is_blocking=False)

    def follow(self, engine: Engine) -> Follow | None:
        """Return what follows the first call; None if nothing does."""
        rest = tuple(call.linked(engine) for call in self.calls[1:])
        on_error = None if self.error_call is None else self.error_call.linked(engine)
        return Follow(rest=rest, on_error=on_error) if rest or on_error else None

    def linked(self, engine: Engine) -> NextCall:
        """Return the chain as it is stored to follow other calls."""
        link, follow = self.calls[0].linked(engine), self.follow(engine)
        if follow is None:
            return link
        return replace(link, call=replace(link.call, terms=replace(link.call.terms, follow=follow)))

    async def _store(self, *, is_blocking: bool) -> Invocation[R]:
        _refuse_in_body("a chain")
        first = self.calls[0]
        runtime = _one_runtime([*self.calls, *([self.error_call] if self.error_call else [])])

        is_followed = len(self.calls) > 1 or self.error_call is not None
        follow = (lambda engine: self.follow(engine) or Follow()) if is_followed else None
        stored = await first.task.store_chain(first.args, first.kwargs, follow, is_blocking=is_blocking)
        if is_followed and not stored.is_fresh:  # it has the key of another call, or is in a transaction
            await runtime.either(self._agree(await _opened(runtime, is_blocking), stored.id), is_blocking)
        size = len(self.calls)
        return cast(Invocation[R], ChainInvocation(runtime, stored.id, size) if size > 1 else stored)

    async def _agree(self, engine: Engine, id: InvocationId) -> None:
        """Raise `KeyTaken` if the stored call is followed by others."""
        (found,) = await get_all(engine.store, engine.app, [id])
        ours, theirs = self.follow(engine) or Follow(), found.terms.follow or Follow()
        if _tasks_of(ours) != _tasks_of(theirs):
            raise KeyTaken(f"the key of {found.task} belongs to {id}, which other calls follow: use another key")


def _tasks_of(follow: Follow) -> list[str]:
    return [link.call.task for link in (*follow.rest, *([follow.on_error] if follow.on_error else ()))]


class Group(Composed, Generic[R]):
    """Calls that belong together: `group` makes it."""

    def __init__(
        self,
        calls: Sequence[TaskCall[R]],
        *,
        common: Mapping[str, object],
        cancels: bool = False,
        done: Chain[Any] | None = None,
        error: Chain[Any] | None = None,
    ) -> None:
        self.calls = calls
        self._common = common
        self._cancels = cancels
        self._done = done
        self._error = error

    def __repr__(self) -> str:
        return f"<Group of {len(self.calls)}>"

    def __len__(self) -> int:
        return len(self.calls)

    def then(self, call: Any) -> Group[R]:
        """Return the group with a call, or chain, for when all members have succeeded. It takes the list of their
        results, in order. After another `then`, it takes the result of that.
        """
        done = as_chain(call) if self._done is None else self._done.then(call)
        return self._with(done=done)

    def on_error(self, call: Any) -> Group[R]:
        """Return the group with a call, or chain, for when all members have ended and not all have succeeded. It takes
        a list of dicts about those. Without it, the call of `then` fails then, and is not run.
        """
        if self._error is not None:
            raise UsageError(f"on_error() is given already: {self._error}; give it a chain")
        return self._with(error=as_chain(call))

    def _with(self, **changed: Any) -> Group[R]:
        fields = {"common": self._common, "cancels": self._cancels, "done": self._done, "error": self._error}
        return Group(self.calls, **cast(Any, fields | changed))

    def submit(self) -> InvocationGroup[R]:
        """Store all calls. Once this returns, no process has to stay alive for what follows them."""
        return completed(self._store(is_blocking=True))

    async def asubmit(self) -> InvocationGroup[R]:
        return await self._store(is_blocking=False)

    async def _store(self, *, is_blocking: bool) -> InvocationGroup[R]:
        _refuse_in_body("a group")
        after = [call for chain in (self._done, self._error) if chain is not None for call in chain.calls]
        runtime = _one_runtime([*self.calls, *after])
        engine = await _opened(runtime, is_blocking)
        # Encoded here, on the caller's thread: that may run user code, and take a while.
        record = self._record(engine)
        members, payloads = self._members(engine, record)
        work = GroupSubmit(engine, record, members, payloads)
        record = await runtime.either(work.store(), is_blocking)
        handles = [Invocation[R](runtime, id, fresh=True) for id in rules.member_ids(record.id, 0, record.size)]
        return InvocationGroup(runtime, handles, record.id, callback_of(runtime, record))

    def _record(self, engine: Engine) -> GroupRecord:
        now, running = engine.store.now(), here.get() is not None
        return GroupRecord(
            app=engine.app,
            id=rules.group_id(engine.ids.new(), now),
            size=len(self.calls),
            created_at=now,
            parent_id=parent_in(engine.app) if running else None,
            origin=origin_in(engine.app) if running else None,
            then=None if self._done is None else self._done.linked(engine),
            on_error=None if self._error is None else self._error.linked(engine),
            cancels=self._cancels,
        )

    def _members(self, engine: Engine, record: GroupRecord) -> tuple[list[InvocationRecord], list[Payload]]:
        seen: Seen = {}
        shared = engine.codec.shared(self._common)
        payloads: dict[str, Payload] = {}
        terms: dict[int, tuple[Terms, Terms]] = {}  # by identity: many calls share them
        members = []
        ids = rules.member_ids(record.id, 0, record.size)
        for id, call in zip(ids, self.calls, strict=True):
            if call.task.has_session:
                raise UsageError(
                    f"{call!r:.200} has session=, and a group is not stored in your transaction: submit it after the "
                    "commit, or use map() in the transaction"
                )
            member, new = call.task.prepared(engine, call.args, merged(self._common, call.kwargs), seen, shared)
            _refuse_shared_names(member)
            payloads.update((payload.digest, payload) for payload in new)
            if record.is_watched:
                _, own = terms.setdefault(id_of(member.terms), (member.terms, replace(member.terms, group=record.id)))
                member = replace(member, id=id, terms=own)
            else:
                member = replace(member, id=id)
            members.append(member)
        return members, list(payloads.values())


class GroupSubmit:
    """Stores a group."""

    def __init__(
        self, engine: Engine, record: GroupRecord, members: Sequence[InvocationRecord], payloads: Sequence[Payload]
    ) -> None:
        self._engine = engine
        self._groups = engine.part(Groups)
        self._record = record
        self._members = members
        self._payloads = payloads

    async def store(self) -> GroupRecord:
        """Store the group and its members. Return the group as it is then. Safe to repeat."""
        record = self._record
        await self._engine.quota.admit(len(self._members))
        if record.is_watched and not await self._groups.put(record):
            there = await self._groups.get(record.id)
            if there is None or there.created_at != record.created_at:
                raise StoreError(f"the new id {record.id} of a group was taken already; submit it again")
        crashpoint("group.stored")
        await self._insert()
        crashpoint("group.members")
        if not record.is_watched:
            await self._groups.put(replace(record, is_whole=True))
            return record
        try:
            after = await self._groups.change(record.id, is_whole=True)
        except StoreReadOnly:  # the role of a submitter: the first end of a member finds that all are there
            return record
        if after is not None and after.abandoned:
            await self._give_up(after)
        if after is not None and after.failed is not None:  # while the others were being stored
            await self._groups.cancel(after, reason=f"{after.failed} of its group has failed")
        await self._groups.check(record.id)
        return record

    async def _give_up(self, closed: GroupRecord) -> NoReturn:
        """Cancel the members that came after their group was closed: nothing would follow them."""
        why = "its group was closed before all calls were stored"
        with contextlib.suppress(StoreReadOnly):
            await self._groups.cancel(closed, reason=why)
        raise StoreError(
            f"the group {closed.id} was closed, since storing its {closed.size:,} calls took over "
            f"{ABANDONED_SECONDS / 60:.0f} min: its calls are cancelled, and nothing follows. Submit it again"
        )

    async def _insert(self) -> None:
        if self._payloads:
            await self._engine.payloads.keep(self._payloads)
        for start in range(0, len(self._members), STORED_AT_ONCE):
            batch = self._members[start : start + STORED_AT_ONCE]
            there = await self._engine.submitter.submit(batch)
            if taken := [holder for holder in there if holder is not None]:
                raise StoreError(f"the id {taken[0].id} of a member of a group was taken already; submit it again")


def group(
    calls: Iterable[TaskCall[R]],
    *more: Never,
    common_args: Mapping[str, object] | None = None,
    on_failure: Literal["continue", "cancel"] = "continue",
) -> Group[R]:
    """Return calls that belong together: ``group([add.s(1, 2), mail.s("a")])``.

    `common_args` are keyword arguments of all of them, which are stored once. When a member fails, the others go on, or
    are cancelled (``on_failure="cancel"``). `then` and `on_error` say what follows when all have ended.
    """
    if more or not isinstance(calls, Iterable):
        raise UsageError("group() takes a list: write group([a.s(1), b.s(2)])")
    found = list(calls)
    for call in found:
        if not isinstance(call, TaskCall):
            raise UsageError(
                f"group(): {call!r:.80} is no call; write task.s(…) for each. A chain cannot be a member, nor a group: "
                "let a task submit it, and return its result"
            )
    if on_failure not in ("continue", "cancel"):
        raise UsageError(f"on_failure={on_failure!r:.80}: expected 'continue' or 'cancel'")
    if len(found) > rules.MOST_MEMBERS:
        raise UsageError(f"a group has at most {rules.MOST_MEMBERS:,} members")
    return Group(found, common=common_given(common_args), cancels=on_failure == "cancel")


def chain(*calls: Any) -> Chain[Any]:
    """Return calls one after another: ``chain(a.s(1), b.s(), c.s(extra=2))``. Each takes the result of the one before
    as its first argument, but for those made by ``task.si(…)``.
    """
    if not calls:
        raise UsageError("chain() needs a call: chain(a.s(1), b.s())")
    if isinstance(calls[0], Group):
        raise UsageError("a chain cannot begin with a group: write group([…]).then(chain(…))")
    first, *others = calls
    found = as_chain(first)
    for call in others:
        found = found.then(call)
    return found


def as_chain(call: Any) -> Chain[Any]:
    """Return a chain of what is given: a chain, a call, or a task."""
    if isinstance(call, Chain):
        return call
    if isinstance(call, TaskCall):
        return Chain((call,))
    if isinstance(call, Group):
        raise UsageError("a group cannot follow another call: let a task submit it, and return its results")
    if hasattr(call, "link") and hasattr(call, "s"):
        return Chain((call.s(),))
    raise UsageError(f"{call!r:.80} is no call: give a task, task.s(…), or a chain")


def callback_of(runtime: AppRuntime, record: GroupRecord) -> Any:
    """Return the handle of what follows a group; None if nothing does."""
    link = record.then or record.on_error
    if link is None:
        return None
    follow = link.call.terms.follow
    return handle_of(runtime, rules.done_id(record.id), 1 + (0 if follow is None else len(follow.rest)), record.id)


def common_given(given: Mapping[str, object] | None) -> Mapping[str, object]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"common_args={given!r:.80}: expected a dict of keyword arguments")
    return given


def merged(common: Mapping[str, object] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call, completed by the common ones."""
    if not common:
        return dict(kwargs)
    if both := common.keys() & kwargs.keys():
        raise UsageError(f"the argument {min(both)!r} is in common_args and in a call; give it once")
    return {**common, **kwargs}


def _refuse_shared_names(record: InvocationRecord) -> None:
    """Refuse a member that another invocation could stand for: its end would not be that of the group's member."""
    if record.key is not None or record.dedup_key is not None:
        what = "a key" if record.key is not None else "unique=, debounce= or throttle="
        raise UsageError(
            f"{record.task} has {what}, so another invocation may stand for this call; a member of a group has none. "
            "Use map() for these"
        )


def _one_runtime(calls: Sequence[TaskCall[Any]]) -> AppRuntime:
    if not calls:
        raise UsageError("a group without calls belongs to no app: give it a call, or a then()")
    found = {id_of(call.task.runtime): call.task.runtime for call in calls}
    if len(found) > 1:
        names = ", ".join(sorted({f"{call.task.name} of '{call.task.runtime.name}'" for call in calls})[:5])
        raise UsageError(f"these calls are of several apps, and belong to one: {names}")
    return next(iter(found.values()))


def _refuse_in_body(what: str) -> None:
    if running_body.life is not None:
        raise UsageError(
            f"{what} cannot be submitted in the body of a workflow: await calls there one after another, or use "
            "asyncio.gather; or submit it in a step"
        )


async def _opened(runtime: AppRuntime, is_blocking: bool) -> Engine:
    return runtime.ready() if is_blocking else await runtime.aready()


id_of = id  # `id` is an invocation's here
