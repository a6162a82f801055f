"""Schedules, for people: ``app.schedules``. Every blocking method has an async sister with an `a` in front."""

from __future__ import annotations

import datetime as dt
import getpass
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from holdfast.declaring import valid_key
from holdfast.engine.core import Engine
from holdfast.errors import UsageError
from holdfast.invocation import Invocation
from holdfast.lifecycle.names import valid_name
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.schedules import Call, Pause, Rules, ScheduleRecord, begins_after
from holdfast.schedule_options import TIMING, ScheduleOptions, refuse_unknown, rules_of, timing_of
from holdfast.schedules.timing import instant
from holdfast.task import Submittable

if TYPE_CHECKING:
    from holdfast.app import App

Moment = dt.datetime | float
Records = list[ScheduleRecord]
Handles = list[Invocation[Any]]
Moments = list[dt.datetime]


class Schedules:
    """The schedules of an app."""

    def __init__(self, app: App) -> None:
        self._app = app

    def create(
        self,
        name: str,
        task: Submittable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        paused: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleRecord:
        """Call a task again and again: ``app.schedules.create("nightly", clean, [30], cron="0 3 * * *")``.

        It is due by `cron` (five fields, or six with seconds first; on the clock of `timezone`), `every` so long, or
        once `at` a moment; or by a `timing` that you have made. Creating it fires nothing: its first tick is later
        than now. Creating it again, with the same words, does nothing.

        `overlap`: what a tick does while the invocation of the one before has not ended. "allow": it is submitted all
        the same, and the task's own `running_concurrency` decides; "skip": nothing; "queue": it waits; "cancel": it
        takes the other's place.

        `catch_up`: which of the ticks that nobody was there for are fired afterwards: "none", the "last" one, or "all"
        (the last `catch_up_most` of them). What is less than a minute late was not missed.

        `jitter` spreads the start of each tick evenly over so long. No tick comes before `start` or after `end`. With
        `unique` a tick does nothing while the invocation of another still waits to be started.
        """
        engine = self._app._ready()
        record = self._new(engine, name, task, args, kwargs, paused, options)
        return self._app._run(engine.schedule_book.create(record))

    async def acreate(
        self,
        name: str,
        task: Submittable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        paused: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleRecord:
        engine = await self._app._aready()
        record = self._new(engine, name, task, args, kwargs, paused, options)
        return await self._app._arun(engine.schedule_book.create(record))

    # Arguments are encoded on the caller's thread: that may run user code.

    def _new(
        self,
        engine: Engine,
        name: str,
        task: Submittable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        paused: bool,
        options: ScheduleOptions,
    ) -> ScheduleRecord:
        refuse_unknown(options)
        pause = Pause(at=engine.store.now(), by=whoever(), why="it was created so") if paused else None
        timing, rules = timing_of(options), rules_of(options, Rules())
        call = self._call(engine, task, args, kwargs)
        return engine.schedule_book.new(valid_name("schedule", name), timing, call, rules, pause=pause)

    def _call(
        self, engine: Engine, task: Submittable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Call:
        if not isinstance(task, Submittable):
            raise UsageError(f"a schedule calls a task of this app, not {task!r}")
        if isinstance(args, str | bytes) or not isinstance(args, Sequence):
            raise UsageError(f"args={args!r}: expected a list of arguments, such as [{args!r}]")
        return call_of(task, engine, tuple(args), dict(kwargs or {}))

    def list(self) -> Records:
        """All of them, by name."""
        return self._app._run(self._list())

    async def alist(self) -> Records:
        return await self._app._arun(self._list())

    async def _list(self) -> Records:
        return await (await self._app._engine()).schedule_book.all()

    def get(self, name: str) -> ScheduleRecord:
        """Raises `UnknownSchedule`."""
        return self._app._run(self._get(name))

    async def aget(self, name: str) -> ScheduleRecord:
        return await self._app._arun(self._get(name))

    async def _get(self, name: str) -> ScheduleRecord:
        return await (await self._app._engine()).schedule_book.get(name)

    def update(
        self,
        name: str,
        *,
        task: Submittable[..., Any] | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleRecord:
        """Change what is given and leave the rest. Another timing, start or end takes effect from now on. New
        arguments, `args` and `kwargs` together, go with the `task` that takes them.
        """
        engine = self._app._ready()
        decide = self._change(engine, task, args, kwargs, options)
        return self._app._run(engine.schedule_book.change(name, decide))

    async def aupdate(
        self,
        name: str,
        *,
        task: Submittable[..., Any] | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleRecord:
        engine = await self._app._aready()
        decide = self._change(engine, task, args, kwargs, options)
        return await self._app._arun(engine.schedule_book.change(name, decide))

    def _change(
        self,
        engine: Engine,
        task: Submittable[..., Any] | None,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        options: ScheduleOptions,
    ) -> Callable[[ScheduleRecord, float], dict[str, Any]]:
        refuse_unknown(options)
        call = None
        if task is not None:
            call = self._call(engine, task, args or (), kwargs)
        elif args is not None or kwargs is not None:
            raise UsageError("give task= with the new arguments: they are checked against its signature")

        def decide(record: ScheduleRecord, now: float) -> dict[str, Any]:
            before, rules = record.rules, rules_of(options, record.rules)
            fields: dict[str, Any] = {"rules": rules}
            if (rules.starts_at, rules.ends_at) != (before.starts_at, before.ends_at):
                # What the old bounds kept out was not missed, and what is due by them still is.
                is_due = record.next_at is not None and record.next_at <= now
                fields["through"] = begins_after(before, record.through) if is_due else now
            if call is not None:
                fields["call"] = call
            if TIMING & options.keys() and (timing := timing_of(options, record.timing)) != record.timing:
                fields |= {"timing": timing, "through": now}
            return fields

        return decide

    def pause(self, name: str, *, reason: str = "", by: str | None = None) -> ScheduleRecord:
        """Let it rest until `resume`."""
        return self._app._run(self._pause(name, reason, by))

    async def apause(self, name: str, *, reason: str = "", by: str | None = None) -> ScheduleRecord:
        return await self._app._arun(self._pause(name, reason, by))

    async def _pause(self, name: str, reason: str, by: str | None) -> ScheduleRecord:
        by = whoever() if by is None else by
        if not isinstance(reason, str) or not isinstance(by, str):
            raise UsageError(f"reason={reason!r}, by={by!r}: expected texts")
        return await (await self._app._engine()).schedule_book.pause(name, by, reason)

    def resume(self, name: str) -> ScheduleRecord:
        """Go on, from now. The ticks of the pause do not fire; `backfill` makes up for them."""
        return self._app._run(self._resume(name))

    async def aresume(self, name: str) -> ScheduleRecord:
        return await self._app._arun(self._resume(name))

    async def _resume(self, name: str) -> ScheduleRecord:
        return await (await self._app._engine()).schedule_book.resume(name)

    def delete(self, name: str) -> None:
        """Forget it. Invocations that it has submitted stay. Raises `UnknownSchedule`."""
        self._app._run(self._delete(name))

    async def adelete(self, name: str) -> None:
        await self._app._arun(self._delete(name))

    async def _delete(self, name: str) -> None:
        await (await self._app._engine()).schedule_book.remove(name)

    def run_now(self, name: str, *, request: str | None = None) -> Invocation[Any]:
        """Submit its call now, beside its ticks. With a `request`, a text of your choice, it is done once for it."""
        return self._handle(self._app._run(self._run_now(name, request)))

    async def arun_now(self, name: str, *, request: str | None = None) -> Invocation[Any]:
        return self._handle(await self._app._arun(self._run_now(name, request)))

    async def _run_now(self, name: str, request: str | None) -> InvocationRecord:
        request = None if request is None else valid_key("request", request)
        return await (await self._app._engine()).schedule_book.run_now(name, request)

    def backfill(self, name: str, start: Moment, end: Moment, *, request: str | None = None) -> Handles:
        """Submit its call for each tick from `start` to `end`, both included, whether it has fired or not."""
        return [self._handle(each) for each in self._app._run(self._backfill(name, start, end, request))]

    async def abackfill(self, name: str, start: Moment, end: Moment, *, request: str | None = None) -> Handles:
        return [self._handle(each) for each in await self._app._arun(self._backfill(name, start, end, request))]

    async def _backfill(self, name: str, start: Moment, end: Moment, request: str | None) -> Sequence[InvocationRecord]:
        request = None if request is None else valid_key("request", request)
        first = begins_after(Rules(starts_at=instant(start, "start")), float("-inf"))
        return await (await self._app._engine()).schedule_book.backfill(name, first, instant(end, "end"), request)

    def next_times(self, name: str, count: int = 5) -> Moments:
        """When it is due next, as far as can be said now: nothing while it rests."""
        return _next_times(self.get(name), count)

    async def anext_times(self, name: str, count: int = 5) -> Moments:
        return _next_times(await self.aget(name), count)

    def _handle(self, record: InvocationRecord) -> Invocation[Any]:
        return Invocation(self._app, record.id)


def call_of(task: Submittable[..., Any], engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call of a task, to be stored with a schedule. Raises `UsageError` if it does not fit, or is too large."""
    given = task._options
    others = {
        "key": given.key,
        "delay": given.delay_seconds,
        "at": given.at,
        "session": given.session,
        "expires": given.expires_at,
        "debounce or throttle": given.pacing,
    }
    if refused := [f"{name}=" for name, value in others.items() if value]:
        raise UsageError(f"a schedule submits its call again and again, so it has no {', '.join(refused)}")
    record, payloads = task.prepared(engine, args, kwargs)
    if payloads:
        size = sum(len(payload.data) for payload in payloads)
        raise UsageError(
            f"the arguments have {size:,} bytes, and a schedule keeps at most {engine.limits.inline:,}: "
            "give it a name or a path of what it shall work on"
        )
    return Call(
        task=record.task,
        arguments=record.arguments,
        queue=record.queue,
        tags=record.tags,
        priority=record.priority,
        at_most_once=record.at_most_once,
        limit_key=record.limit_key,
        twin=record.twin if task._pacing is None else None,  # ticks are neither debounced nor throttled
        expires_seconds=task._time.expires,
        terms=msgspec.structs.replace(record.terms, start_by=None, key_until=None),
    )


def _next_times(record: ScheduleRecord, count: int) -> list[dt.datetime]:
    if type(count) is not int or not 0 <= count <= 10_000:
        raise UsageError(f"count={count!r}: expected a whole number from 0 to 10,000")
    if not record.is_active:
        return []
    until = float("inf") if record.rules.ends_at is None else record.rules.ends_at
    ticks = record.timing.ticks(begins_after(record.rules, record.through), until)
    return [dt.datetime.fromtimestamp(tick, dt.UTC) for tick in islice(ticks, count)]


def whoever() -> str:
    """The user of this process, for the record."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
