"""Limits and rates in Python: ``app.limits`` lists and changes them.

A change is an entry of the store under the name of a task, or the name that tasks share for a rate. It holds instead
of what the code declares, over deploys, until it is cleared. Runners read changes every 2 s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, MutableSequence, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.errors import CorruptRecord, UsageError
from holdfast.ids import InvocationId
from holdfast.model.changes import MoveUp
from holdfast.model.decoding import RATE
from holdfast.model.limits import task_of
from holdfast.model.names import valid_name
from holdfast.model.rates import (
    CHANGE,
    MAX_LIMIT,
    Bucket,
    LimitChange,
    Rate,
    bucket_of,
    change_in,
    is_rate_key,
    name_of_rate,
    rate_key,
    rate_of,
)
from holdfast.model.records import Entry, InvocationRecord, kept_text, work_hint
from holdfast.model.status import Status
from holdfast.rates.labels import label_of
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.limits import FRESH_SECONDS, changes_of
from holdfast.runtime.queues import user_and_host
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import ALL_KEYS, EntryOrder, Filter

_MAX_KEYS = 1000
_AT_ONCE = 1000
_MAX_PAGES = 10


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """The starts of one key of a rate at a moment: how many are `left`, when the next one is there, whether calls wait
    for one, and the last calls that took one, with the time. `label` is what calls of the key have in common.
    """

    key: str
    label: str = ""
    rate: str
    left: int
    next_at: float
    waiting: bool
    taken: int
    last: tuple[tuple[str, float], ...]


class LimitInForce(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, a rate or both of a task; or the rate of a name that several `tasks` share.

    `limit`, `rate` and `burst` are in force; `declared_limit` and `declared_rate` are what the code says, as far as it
    is known here. `held` slots are those of keys for which calls wait, `waiting_keys` are their number.
    """

    name: str
    tasks: tuple[str, ...]
    limit: int | None
    rate: str | None
    burst: int | None
    declared_limit: int | None
    declared_rate: str | None
    waiting_keys: int
    held: int
    change: LimitChange | None


class LimitAccess:
    """The limits and rates of an app. Every blocking method has an async one with an `a` in front."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    @blocking
    async def list(self, engine: Engine, *, most: int | None = None) -> Sequence[LimitInForce]:
        """Return the limits and rates of this app, declared or changed at run time. Order: by name. With `most`, at
        most this many keys are counted of each kind, and the cost does not grow with the waiting calls.
        """
        changes = await changes_of(engine.store, engine.app)
        tasks = self._by_name()
        names = sorted({*tasks, *changes})
        within = ALL_KEYS if most is None else [each for name in names for each in ranges_of(name)]
        waiting = await engine.store.waiting_keys(engine.app, within, most)
        return [_in_force(name, tasks.get(name, []), changes.get(name), waiting) for name in names]

    alist = awaited(list)

    @blocking
    async def allowances(self, engine: Engine, name: str, *, limit: int = _MAX_KEYS) -> Sequence[Allowance]:
        """Return what is left of a rate, for each of its keys: those with waiting calls first, soonest start first. It
        looks at 1,000 keys.

        A key that was not used for an hour is not among them: all of its starts are left.
        """
        name = self.whole_name(name)
        now, tasks = engine.store.now(), self._by_name().get(name, [])
        change = await _entry(engine, name)
        _, rate = _rates(name, tasks, None if change is None else change_in(change))
        found: MutableSequence[Allowance] = []
        (_, behind), entries, app = _range_below(rate_key(name)), engine.store.entries, engine.app
        of_keys = await entries(app, RATE, order=EntryOrder.LATEST, limit=_MAX_KEYS, before=behind)
        own = await entries(app, RATE, [rate_key(name)])
        for entry in {each.name: each for each in [*own, *of_keys]}.values():
            if name_of_rate(entry.name) != name:
                continue
            try:
                bucket = bucket_of(entry)
            except CorruptRecord:  # the next claim writes it again
                continue
            found.append(_allowance(entry, bucket if rate is None else bucket.under(rate), now))
        shown = sorted(found, key=lambda each: (not each.waiting, each.next_at, each.key))[:limit]
        ids = [InvocationId(id) for each in shown for id, _ in each.last[:1]]
        calls = {str(each.id): each for each in await get_readable(engine.store, engine.app, ids) if each is not None}
        return [self._labelled(each, calls) for each in shown]

    aallowances = awaited(allowances)

    def _labelled(self, each: Allowance, calls: Mapping[str, InvocationRecord]) -> Allowance:
        call = next((calls[id] for id, _ in each.last[:1] if id in calls), None)
        label = "" if call is None else label_of(self._runtime, call, call.terms.rate_key or "")
        return replace(each, label=label)

    @blocking
    async def set(
        self,
        engine: Engine,
        name: str,
        *,
        limit: int | None = None,
        rate: str | None = None,
        burst: int | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> LimitChange:
        """Change the limit or the rate of a task, or the rate of a shared name, until `clear`. What is not given stays
        as an earlier change has it, or as it is declared. Where no burst is declared, it follows the rate.

        Runners follow within 2 s. Running calls go on, and count.
        """
        name = self.whole_name(name)
        self.check(name, limit, rate, burst)
        store = engine.store
        while True:
            before = await _entry(engine, name)
            known = None if before is None else change_in(before)
            wanted = LimitChange(
                at=store.now(),
                by=user_and_host() if by is None else kept_text("by", by),
                reason=kept_text("reason", reason),
                limit=limit if limit is not None or known is None else known.limit,
                rate=rate if rate is not None or known is None else known.rate,
                burst=burst if burst is not None or known is None else known.burst,
            )
            version = 1 if before is None else before.version + 1
            entry = Entry(app=engine.app, kind=CHANGE, name=name, body=msgspec.json.encode(wanted), version=version)
            if await store.put_entry(entry, before):
                break
        await self._move_up(engine, name)
        return wanted

    aset = awaited(set)

    @blocking
    async def clear(self, engine: Engine, name: str) -> bool:
        """End the change of a limit or rate: what is declared holds again. Return False if it was not changed."""
        name = self.whole_name(valid_name("task", name))
        while (before := await _entry(engine, name)) is not None:
            if await engine.store.remove_entry(before):
                await self._move_up(engine, name)
                return True
        return False

    aclear = awaited(clear)

    def whole_name(self, name: str) -> str:
        """Return the name that a limit or rate has in the store, for a short name that only one task has, too."""
        known = self._by_name()
        ends = [each for each in known if each.endswith(f":{name}")]
        return ends[0] if name not in known and len(ends) == 1 else name

    def _by_name(self) -> dict[str, MutableSequence[TaskDefinition]]:
        """Return the tasks that have a limit or a rate, under the names by which these are changed."""
        found: dict[str, MutableSequence[TaskDefinition]] = {}
        for task in {task.definition.name: task.definition for task in self._runtime.tasks.values()}.values():
            if task.is_hidden:
                continue
            if task.limit is not None or (task.rate is not None and task.rate_name is None):
                found.setdefault(task.name, []).append(task)
            if task.rate is not None and task.rate_name is not None:
                found.setdefault(task.rate_name, []).append(task)
        return found

    def check(self, name: str, limit: int | None, rate: str | None, burst: int | None) -> None:
        """Raise `UsageError` for a change that has no meaning, as far as the code is known."""
        name = self.whole_name(valid_name("task", name))
        if limit is None and rate is None and burst is None:
            raise UsageError("nothing to change: give limit=, rate= or burst=")
        if limit is not None and (type(limit) is not int or not 1 <= limit <= MAX_LIMIT):
            raise UsageError(f"limit={limit!r}: expected a whole number from 1 to {MAX_LIMIT:,}")
        if rate is not None or burst is not None:
            rate_of(rate or "1/s", burst)
        if not self._runtime.tasks:
            return
        self.refuse_unknown(name)
        tasks = self._by_name()
        if limit is not None and not any(task.limit is not None and task.name == name for task in tasks[name]):
            raise UsageError(f"'{name}' declares no limit, so its calls take no slots: declare limit= first")
        if (rate is not None or burst is not None) and not any(_has_rate(task, name) for task in tasks[name]):
            raise UsageError(f"'{name}' declares no rate, so its calls have no key for one: declare rate= first")

    def refuse_unknown(self, name: str) -> None:
        """Raise `UsageError` for a name that declares neither a limit nor a rate, as far as the code is known."""
        if not self._runtime.tasks or name in (tasks := self._by_name()):
            return
        near = difflib.get_close_matches(name, tasks, n=1) or [each for each in tasks if each.endswith(f":{name}")]
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(sorted(tasks)) or 'none'}"
        raise UsageError(f"no task or shared rate '{name}' declares a limit or a rate; {hint}")

    async def _move_up(self, engine: Engine, name: str) -> None:
        """Let calls that are due at a later start of the old rate be looked at when all runners know the new one."""
        soon = engine.store.now() + FRESH_SECONDS
        tasks = {task.name for task in self._by_name().get(name, [])}
        where = Filter(statuses=frozenset({Status.REROUTED}), tasks=frozenset(tasks))  # of all, if no code is known
        late, found = [], await engine.store.find(engine.app, where, _AT_ONCE)
        for _ in range(_MAX_PAGES):
            late += [r for r in found if r.due_at > soon and name_of_rate(r.terms.rate_key or "") == name]
            if len(found) < _AT_ONCE:
                break
            found = await engine.store.find(engine.app, replace(where, before_id=found[-1].id), _AT_ONCE)
        if late:
            await engine.store.apply([MoveUp(app=engine.app, id=record.id, due_at=soon) for record in late])
            engine.hub.send(work_hint([(record.lane, soon, record.priority) for record in late]))


def ranges_of(name: str) -> Sequence[tuple[str, str]]:
    """Return the ranges of the keys of a limit or rate: that of all its calls, and those of calls with a digest."""
    return [each for key in (name, rate_key(name)) for each in ((key, f"{key}!"), _range_below(key))]


def _range_below(key: str) -> tuple[str, str]:
    """Return the range of what begins with a key and a bar; '}' is the character after that, and no name has either."""
    return f"{key}|", f"{key}" + "}"


def _has_rate(task: TaskDefinition, name: str) -> bool:
    return task.rate is not None and (task.rate_name or task.name) == name


async def _entry(engine: Engine, name: str) -> Entry | None:
    for entry in await engine.store.entries(engine.app, CHANGE, [name]):
        try:
            change_in(entry)
            return entry
        except CorruptRecord as error:  # it makes room, unless this user may not move it
            if not await engine.store.quarantine_entry(entry, error):
                raise
    return None


def _in_force(
    name: str, tasks: Iterable[TaskDefinition], change: LimitChange | None, waiting: Mapping[str, int]
) -> LimitInForce:
    tasks = tuple(tasks)
    limits = [task.limit.max_running for task in tasks if task.limit is not None and task.name == name]
    declared, rate = _rates(name, tasks, change)
    keys = [key for key in waiting if (name_of_rate(key) if is_rate_key(key) else task_of(key)) == name]
    limit = limits[0] if limits else None
    return LimitInForce(
        name=name,
        tasks=tuple(sorted(task.name for task in tasks)),
        limit=limit if change is None or change.limit is None else change.limit,
        rate=None if rate is None else str(rate),
        burst=None if rate is None else rate.burst,
        declared_limit=limit,
        declared_rate=None if declared is None else str(declared),
        waiting_keys=len(keys),
        held=sum(waiting[key] for key in keys),
        change=change,
    )


def _rates(name: str, tasks: Iterable[TaskDefinition], change: LimitChange | None) -> tuple[Rate | None, Rate | None]:
    """Return the rate that the code declares, and the one in force, as far as they are known here."""
    declared = next((task.rate for task in tasks if task.rate is not None and _has_rate(task, name)), None)
    if declared is not None:
        return declared, declared if change is None else change.rate_after(declared)
    return None, None if change is None or change.rate is None else rate_of(change.rate, change.burst)


def _allowance(entry: Entry, bucket: Bucket, now: float) -> Allowance:
    return Allowance(
        key=entry.name[1:],
        rate=bucket.text,
        left=bucket.left(now),
        next_at=bucket.next_at(),
        waiting=bucket.waiting or (bucket.ahead is not None and bucket.ahead > now),
        taken=bucket.taken,
        last=bucket.last,
    )
