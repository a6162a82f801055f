"""Why an invocation stands where it stands, in a sentence.

Pure: it looks at the record, the roster and the time, and says what holds the invocation back and what would release
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.clock import format_duration
from holdfast.lifecycle.records import InvocationRecord, RunnerRecord, runner_of
from holdfast.lifecycle.status import AVAILABLE, OWNED, TABLE, Status


def living(roster: Sequence[RunnerRecord], now: float, dead_after_seconds: float) -> list[RunnerRecord]:
    """The runners whose last heartbeat is recent enough."""
    return [runner for runner in roster if now - runner.heartbeat_at <= dead_after_seconds]


def explain(
    record: InvocationRecord,
    roster: Sequence[RunnerRecord],
    now: float,
    dead_after_seconds: float,
    holders: Sequence[InvocationRecord] = (),
) -> str:
    """A sentence or two about what the invocation is waiting for, or how it ended. `holders` are those who hold the
    slots that it waits for.
    """
    status, since = record.status, format_duration(max(0.0, now - record.changed_at))
    if status in AVAILABLE:
        taking = [runner for runner in living(roster, now, dead_after_seconds) if not runner.draining]
        return _waiting(record, taking, now, since)
    if status in OWNED:
        return _owned(record, roster, now, dead_after_seconds, since)
    if status is Status.CONCURRENCY_CONTROLLED:
        return _without_slot(record, holders, living(roster, now, dead_after_seconds), now, since)
    if status is Status.PARKED:
        return (
            f"parked for {since}: {record.reason}. "
            "A runner with other code wakes it when it starts, or you do: holdfast wake " + record.id
        )
    if status is Status.CANCELLED and record.cancellation is not None:
        asked = record.cancellation
        how = record.reason.removeprefix(str(asked)).removeprefix("; ")
        return f"{asked}{f' ({how})' if how else ''}, {format_duration(max(0.0, now - asked.at))} ago."
    reason = f": {record.reason}" if record.reason else ""
    return f"{TABLE[status].meaning}{reason}."


def _waiting(record: InvocationRecord, alive: list[RunnerRecord], now: float, since: str) -> str:
    if record.due_at > now and record.status is Status.RETRY and record.errors:
        times = "1 time" if record.failures == 1 else f"{record.failures} times"
        last, wait = record.errors[-1].error, format_duration(record.due_at - now)
        return f"failed {times}, last with {last.type_name}: {last.message}; the next attempt is due in {wait}."
    if record.start_by is not None and record.start_by > now:
        left = format_duration(record.start_by - now)
        rest = _waiting(replace(record, start_by=None), alive, now, since)
        return f"{rest} It expires in {left} unless it is started."
    if record.due_at > now:
        return f"not due for another {format_duration(record.due_at - now)}."
    if not alive:
        return f"waiting for {since}: no runner is alive on this store. Start one with `holdfast run`."
    knowing = [runner for runner in alive if record.task in runner.tasks]
    if not knowing:
        return (
            f"waiting for {since}: no runner knows the task '{record.task}' "
            f"({len(alive)} alive: {', '.join(runner.id for runner in alive[:3])}). "
            "Start one with the code that declares it; if it was renamed, give the new task aliases=[…]."
        )
    serving = [runner for runner in knowing if runner.serves.accepts(record.lane)]
    if not serving:
        tags = f" with the tags {', '.join(record.tags)}" if record.tags else ""
        return f"waiting for {since}: no live runner serves the queue '{record.queue}'{tags}."
    served_by = "1 runner serves" if len(serving) == 1 else f"{len(serving)} runners serve"
    return f"waiting for {since} for a free place; {served_by} it."


def _owned(
    record: InvocationRecord, roster: Sequence[RunnerRecord], now: float, dead_after_seconds: float, since: str
) -> str:
    meaning = f"{TABLE[record.status].meaning} on {record.owner} for {since}"
    if record.status is Status.CANCELLING and record.cancellation is not None:
        left = record.cancellation.until - now
        grace = f"it has {format_duration(left)} left to clean up" if left > 0 else "its time to clean up is over"
        meaning = f"{record.cancellation}; asked to end on {record.owner} for {since}, {grace}"
    elif record.terms.timeout is not None:
        meaning += f" of the {format_duration(record.terms.timeout)} that it may take"
    runner_id = (record.owner or "").partition("/")[0]
    entry = next((runner for runner in roster if runner.id == runner_id), None)
    if entry is None:
        return f"{meaning}, but that runner is no longer on the roster: its work waits for recovery."
    if not living([entry], now, dead_after_seconds):
        silence = format_duration(now - entry.heartbeat_at)
        return (
            f"{meaning}, but that runner has been silent for {silence} and counts as dead: its work waits for recovery."
        )
    return f"{meaning}."


def _without_slot(
    record: InvocationRecord, holders: Sequence[InvocationRecord], alive: list[RunnerRecord], now: float, since: str
) -> str:
    waits = f"waits for a slot of {record.limit_key} for {since}"
    if not holders:
        return f"{waits}; one is free, so it goes back to the queue in a moment."
    runners = {runner.id for runner in alive}
    named = [_holder(holder, runners, now) for holder in holders[:_MOST_HOLDERS]]
    more = f" and {len(holders) - len(named)} others" if len(holders) > len(named) else ""
    return f"{waits}, held by {'; '.join(named)}{more}."


def _holder(holder: InvocationRecord, alive: set[str], now: float) -> str:
    claimed_at = next(
        (line.at for line in reversed(holder.history) if line.status is Status.PENDING), holder.changed_at
    )
    text = f"invocation {holder.id} on {holder.owner} for {format_duration(max(0.0, now - claimed_at))}"
    if runner_of(holder.owner) in alive:
        return text
    return f"{text}, whose runner is not alive: its work waits for recovery"


_MOST_HOLDERS = 3
