"""The public face of schedules: ``app.schedules``. Every blocking method has an async one with an `a` in front."""

from __future__ import annotations

import datetime as dt
import getpass
from collections.abc import Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, Unpack

from holdfast.codec import Payload
from holdfast.errors import UsageError
from holdfast.invocation import Invocation
from holdfast.model.names import valid_key, valid_name
from holdfast.runtime.app_runtime import AppRuntime, DeclaredTask, awaited, blocking
from holdfast.runtime.engine import Engine
from holdfast.schedules.options import TIMING, ScheduleOptions, refuse_unknown, rules_of, timing_of
from holdfast.schedules.records import Pause, PreparedCall, Rules, ScheduleRecord, call_like
from holdfast.schedules.rules import begins_after
from holdfast.schedules.service import ScheduleRegistry
from holdfast.schedules.timing import instant

Moment = dt.datetime | float
Records = list[ScheduleRecord]
Handles = list[Invocation[Any]]
Moments = list[dt.datetime]


class Schedules:
    """The schedules of an app."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    # Plain methods encode arguments on the caller's thread: that may run user code.

    @blocking
    def create(
        self,
        engine: Engine,
        name: str,
        task: DeclaredTask,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        paused: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> Coroutine[Any, Any, ScheduleRecord]:
        """Call a task again and again: ``app.schedules.create("nightly", clean, [30], cron="0 3 * * *")``.

        It is due by `cron` (five fields, or six with seconds first; on the clock of `timezone`), `every` interval, once
        `at` a moment, or by your own `timing`. Creating it fires nothing: its first tick is later than now. Creating it
        again, with the same words, does nothing.

        `overlap`: what a tick does while the invocation of the previous tick has not ended. "allow": it is submitted
        all the same, and the task's own `limit` decides; "skip": nothing; "queue": it waits; "cancel": it replaces the
        previous one.

        `catch_up`: which ticks of a time without a runner are fired afterwards: "none", the "last" one, or "all"
        (the last `catch_up_most` of them). A tick less than a minute late was not missed.

        `jitter` spreads the start of each tick evenly over so long. No tick comes before `start` or after `end`. With
        `unique` a tick does nothing while the invocation of another still waits to be started.
        """
        refuse_unknown(options)
        registry = engine.part(ScheduleRegistry)
        pause = Pause(at=engine.store.now(), by=current_user(), why="it was created so") if paused else None
        timing, rules = timing_of(options), rules_of(options, Rules())
        call, payloads = _call(engine, task, args, kwargs)
        record = registry.new(valid_name("schedule", name), timing, call, rules, pause=pause)
        return registry.create(record, payloads)

    acreate = awaited(create)

    @blocking
    def list(self, engine: Engine) -> Coroutine[Any, Any, Records]:
        """Return all of them, by name."""
        return engine.part(ScheduleRegistry).all()

    alist = awaited(list)

    @blocking
    def get(self, engine: Engine, name: str) -> Coroutine[Any, Any, ScheduleRecord]:
        """Return a stored schedule. Raises `UnknownSchedule`."""
        return engine.part(ScheduleRegistry).get(name)

    aget = awaited(get)

    @blocking
    def update(
        self,
        engine: Engine,
        name: str,
        *,
        task: DeclaredTask | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Coroutine[Any, Any, ScheduleRecord]:
        """Change the given options and leave the rest. Another timing, start or end takes effect from now on. New
        arguments, `args` and `kwargs` together, go with the `task` that takes them.
        """
        refuse_unknown(options)
        call, payloads = None, tuple[Payload, ...]()
        if task is not None:
            call, payloads = _call(engine, task, args or (), kwargs)
        elif args is not None or kwargs is not None:
            raise UsageError("give task= with the new arguments: they are checked against its signature")

        def decide(record: ScheduleRecord, now: float) -> dict[str, Any]:
            before, rules = record.rules, rules_of(options, record.rules)
            fields: dict[str, Any] = {"rules": rules}
            if (rules.starts_at, rules.ends_at) != (before.starts_at, before.ends_at):
                # Ticks outside of the old bounds were not missed, and due ticks stay due.
                is_due = record.next_at is not None and record.next_at <= now
                fields["through"] = begins_after(before, record.through) if is_due else now
            if call is not None:
                fields["call"] = call
            if TIMING & options.keys() and (timing := timing_of(options, record.timing)) != record.timing:
                fields |= {"timing": timing, "through": now}
            return fields

        return engine.part(ScheduleRegistry).change(name, decide, payloads)

    aupdate = awaited(update)

    @blocking
    async def pause(self, engine: Engine, name: str, *, reason: str = "", by: str | None = None) -> ScheduleRecord:
        """Pause it until `resume`. Pausing it again keeps the first pause."""
        by = current_user() if by is None else by
        if not isinstance(reason, str) or not isinstance(by, str):
            raise UsageError(f"reason={reason!r}, by={by!r}: expected texts")
        return await engine.part(ScheduleRegistry).change(
            name, lambda record, now: {"pause": record.pause or Pause(at=now, by=by, why=reason)}
        )

    apause = awaited(pause)

    @blocking
    async def resume(self, engine: Engine, name: str) -> ScheduleRecord:
        """Go on, from now. The ticks of the pause do not fire; `backfill` makes up for them."""
        return await engine.part(ScheduleRegistry).change(
            name, lambda record, now: {"pause": None, "through": now} if record.pause is not None else {}
        )

    aresume = awaited(resume)

    @blocking
    def delete(self, engine: Engine, name: str) -> Coroutine[Any, Any, None]:
        """Forget it, even if it cannot be read. Invocations that it has submitted stay. Raises `UnknownSchedule`."""
        return engine.part(ScheduleRegistry).remove(name)

    adelete = awaited(delete)

    @blocking
    async def run_now(self, engine: Engine, name: str, *, request: str | None = None) -> Invocation[Any]:
        """Submit its call now, beside its ticks. With a `request`, a text of your choice, it is done once for it."""
        request = None if request is None else valid_key("request", request)
        return Invocation(self._runtime, (await engine.part(ScheduleRegistry).run_now(name, request)).id)

    arun_now = awaited(run_now)

    @blocking
    async def backfill(
        self, engine: Engine, name: str, start: Moment, end: Moment, *, request: str | None = None
    ) -> Handles:
        """Submit its call for each tick from `start` to `end`, both included, whether it has fired or not."""
        request = None if request is None else valid_key("request", request)
        first = begins_after(Rules(starts_at=instant(start, "start")), float("-inf"))
        made = await engine.part(ScheduleRegistry).backfill(name, first, instant(end, "end"), request)
        return [Invocation(self._runtime, record.id) for record in made]

    abackfill = awaited(backfill)

    @blocking
    async def next_times(self, engine: Engine, name: str, count: int = 5) -> Moments:
        """Return when it is due next, as far as can be said now: nothing while it rests."""
        record = await engine.part(ScheduleRegistry).get(name)
        if type(count) is not int or not 0 <= count <= 10_000:
            raise UsageError(f"count={count!r}: expected a whole number from 0 to 10,000")
        if not record.is_active:
            return []
        until = float("inf") if record.rules.ends_at is None else record.rules.ends_at
        ticks = record.timing.ticks(begins_after(record.rules, record.through), until)
        return [dt.datetime.fromtimestamp(tick, dt.UTC) for tick in islice(ticks, count)]

    anext_times = awaited(next_times)


def _call(engine: Engine, task: DeclaredTask, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> PreparedCall:
    if not isinstance(task, DeclaredTask):
        raise UsageError(f"a schedule calls a task of this app, not {task!r}")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise UsageError(f"args={args!r}: expected a list of arguments, such as [{args!r}]")
    return call_of(task, engine, tuple(args), dict(kwargs or {}))


def call_of(task: DeclaredTask, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedCall:
    """Return a call of a task, to be stored with a schedule. Raises `UsageError` if it does not fit."""
    record, expires_seconds, payloads = task.template(engine, args, kwargs)
    return PreparedCall(call_like(record, expires_seconds), tuple(payloads))


def current_user() -> str:
    """Return the user of this process, for the record."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
