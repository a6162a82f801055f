"""Decide which runner has its turn to run a service.

A service is a duty that one runner performs at a time. Time is cut into cycles of `interval_seconds`, counted from the
epoch, so that all runners agree on them without talking. A cycle is cut into one slot for each runner that shares it,
the oldest runner first. A runner starts its execution in its slot, once, and keeps it until the slot's window ends.
Each window ends `spread_margin_seconds` before the next slot begins: clocks that differ by no more than this never see
two runners in their windows at once. A runner that is alone has the whole cycle.

Slots spread the work; they do not keep two runners apart. Clocks may differ by more than the margin, and while a runner
joins or leaves, two others may cut the same cycle differently. What keeps them apart is the store's gate: at most one
RUNNING execution of a service, atomically. So that nothing can block the gate for ever, the first runner that comes to
it reaps the executions that no runner will end (`reap`).

Only the `max_members` oldest runners share a cycle, so that slots stay useful with a thousand runners. A runner that
leaves its slot unused is left out for three cycles (`sitting_out`): a third of all time unserved is too much to lose to
a runner that still sends heartbeats and does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import StrEnum

import msgspec

from holdfast.model.decoding import Moment
from holdfast.settings import SlotSettings

# Reasons of an ABANDONED execution.
OWNER_GONE = "owner gone"
OVERRUN = "overrun"
NO_MARGIN = "no_margin"

_SIT_OUT_CYCLES = 3
# A runner looks once per check interval, at its own moment. Less than two looks in a slot prove nothing about it.
_FAIR_LOOKS = 2


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A living runner, as far as slots are concerned."""

    runner_id: str
    joined_at: float
    can_run_atomic_service: bool = True
    sits_out_until: float | None = None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The time in which a runner may run a service: from `starts_at` to just before `ends_at`."""

    starts_at: float
    ends_at: float
    cycle: int  # whole intervals since the epoch
    slot: int  # place in the cycle, from 0


class AtomicServiceSkip(StrEnum):
    """Why a runner does not start now."""

    NOT_ASSIGNED_SLOT = "not_assigned_slot"  # it is another runner's turn, or none's, or the runner shares no cycle
    SCHEDULED_RUNNER_IN_GRACE = "scheduled_runner_in_grace"  # the runner with this turn has joined too recently
    SLOT_WINDOW_INVALID = "slot_window_invalid"  # the margin takes the whole slot: no runner can run
    LATE_START = "late_start"  # its turn, but most of it has passed
    NO_STABLE_RUNNERS = "no_stable_runners"  # no living runner is eligible


class AtomicServiceClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one runner at one time: the window in which it runs, or the reason why it does not."""

    window: Window | None = None
    reason: AtomicServiceSkip | None = None


class ExecutionStatus(StrEnum):
    """How an execution stands. All but RUNNING are final."""

    RUNNING = "running"
    COMPLETED = "completed"
    ABANDONED = "abandoned"
    BLOCKED = "blocked"  # never started: another one was RUNNING


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a runner at a service, as recorded: the gate while it is RUNNING, then a line of the audit trail."""

    id: str
    service: str
    runner_id: str
    started_at: Moment
    window_ends_at: Moment
    status: ExecutionStatus = ExecutionStatus.RUNNING
    ended_at: Moment | None = None
    reason: str = ""


class SitsOut(msgspec.Struct, frozen=True):
    """A runner that is to be left out until then."""

    runner_id: str
    until: float


# --- Whose turn -------------------------------------------------------------------------------------------------------


def decide_atomic_service_claim(
    runner_id: str, active: Sequence[Member], now: float, settings: SlotSettings
) -> AtomicServiceClaim:
    """Return whether `runner_id` may start a service at `now`, given the living runners in any order."""
    members = sharing(active, now, settings)
    if not members:
        return AtomicServiceClaim(reason=AtomicServiceSkip.NO_STABLE_RUNNERS)
    own = _slot_of(runner_id, members)
    if own is None:
        return AtomicServiceClaim(reason=AtomicServiceSkip.NOT_ASSIGNED_SLOT)
    if window_seconds(len(members), settings) <= 0:
        return AtomicServiceClaim(reason=AtomicServiceSkip.SLOT_WINDOW_INVALID)
    cycle, current = _position(now, len(members), settings.interval_seconds)
    if now < _grace_ends_at(members[current], settings):
        return AtomicServiceClaim(reason=AtomicServiceSkip.SCHEDULED_RUNNER_IN_GRACE)
    window = _window(cycle, own, len(members), settings)
    if not window.starts_at <= now < window.ends_at:
        return AtomicServiceClaim(reason=AtomicServiceSkip.NOT_ASSIGNED_SLOT)
    # A runner that is alone is never late: it would come after itself.
    if len(members) > 1 and now > _latest_start(window, settings):
        return AtomicServiceClaim(reason=AtomicServiceSkip.LATE_START)
    return AtomicServiceClaim(window=window)


def enough_margin(claim: AtomicServiceClaim, now: float, settings: SlotSettings) -> bool:
    """Return whether the window is still open for long enough, now that the start is recorded: the
    write took its time.
    """
    if claim.window is None or not claim.window.starts_at <= now < claim.window.ends_at:
        return False
    return claim.window.ends_at - now >= settings.min_run_margin_seconds


def next_change_at(runner_id: str, active: Sequence[Member], now: float, settings: SlotSettings) -> float:
    """Return when to look again at the latest, if the roster stays as it is: later than `now`, at most a cycle away.

    That is the start of the runner's next window, or the end of its grace inside the window. If a runner sits out until
    an earlier time, it is that time, when the slots are divided again. A runner without a slot looks once per cycle.
    """
    members = sharing(active, now, settings)
    count, own = max(1, len(members)), _slot_of(runner_id, members) or 0
    cycle, _ = _position(now, count, settings.interval_seconds)
    moments = [
        _edge(cycle, own, count, settings.interval_seconds),
        _edge(cycle + 1, own, count, settings.interval_seconds),
    ]
    moments += [member.sits_out_until for member in active if member.sits_out_until is not None]
    moments += [_grace_ends_at(member, settings) for member in members if member.runner_id == runner_id]
    return min(moment for moment in moments if moment > now)


def windows(active: Sequence[Member], now: float, settings: SlotSettings) -> list[tuple[Member, Window]]:
    """Return the runners that share the cycle of `now`, each with its window. Empty if none can run."""
    members = sharing(active, now, settings)
    if not members or window_seconds(len(members), settings) <= 0:
        return []
    cycle, _ = _position(now, len(members), settings.interval_seconds)
    return [(member, _window(cycle, slot, len(members), settings)) for slot, member in enumerate(members)]


def sharing(active: Sequence[Member], now: float, settings: SlotSettings) -> list[Member]:
    """Return the runners that share the cycle, in the order of their slots: by creation, then by id.

    Sitting out is for when others can do the work. If every eligible runner sits out, none does: each may turn out to
    work again, and no service at all is worse than a slot unused.
    """
    eligible = sorted(
        (member for member in active if member.can_run_atomic_service),
        key=lambda member: (member.joined_at, member.runner_id),
    )
    present = [member for member in eligible if not _sits_out(member, now)]
    return (present or eligible)[: settings.max_members]


def _sits_out(member: Member, now: float) -> bool:
    return member.sits_out_until is not None and now < member.sits_out_until


def _slot_of(runner_id: str, members: Sequence[Member]) -> int | None:
    return next((slot for slot, member in enumerate(members) if member.runner_id == runner_id), None)


def _grace_ends_at(member: Member, settings: SlotSettings) -> float:
    """Return when the member's grace ends; -inf without one: a runner's clock may be behind, and see another join in
    the future.
    """
    grace = settings.membership_stabilization_seconds
    return member.joined_at + grace if grace > 0 else -math.inf


# --- The arithmetic of slots ------------------------------------------------------------------------------------------


def _edge(cycle: int, slot: int, count: int, interval: float) -> float:
    """Return where a slot begins. `slot` may run over the ends of the cycle; what begins there has
    one value, not two.
    """
    around, slot = divmod(slot, count)
    return (cycle + around) * interval + slot * interval / count


def _position(now: float, count: int, interval: float) -> tuple[int, int]:
    """Return the cycle and the slot that `now` is in. Divisions may be off by one rounding; the edges decide."""
    cycle = math.floor(now / interval)
    slot = math.floor((now - cycle * interval) * count / interval)
    while _edge(cycle, slot, count, interval) > now:
        slot -= 1
    while _edge(cycle, slot + 1, count, interval) <= now:
        slot += 1
    return cycle + slot // count, slot % count


def window_seconds(count: int, settings: SlotSettings) -> float:
    """Return how long a window is; not above zero if the margin leaves nothing."""
    return settings.interval_seconds / count - (settings.spread_margin_seconds if count > 1 else 0.0)


def _window(cycle: int, slot: int, count: int, settings: SlotSettings) -> Window:
    cycle, slot = cycle + slot // count, slot % count
    end = _edge(cycle, slot + 1, count, settings.interval_seconds)
    return Window(
        starts_at=_edge(cycle, slot, count, settings.interval_seconds),
        ends_at=end - settings.spread_margin_seconds if count > 1 else end,
        cycle=cycle,
        slot=slot,
    )


def _latest_start(window: Window, settings: SlotSettings) -> float:
    """Return the last moment at which it is not too late; a fraction of 0 or 1 means that it never is."""
    fraction = settings.max_start_slot_fraction
    return window.starts_at + (window.ends_at - window.starts_at) * (fraction if 0 < fraction < 1 else 1.0)


# --- Executions -------------------------------------------------------------------------------------------------------


def reap(executions: Sequence[Execution], active_ids: Collection[str], now: float) -> list[tuple[Execution, str]]:
    """Return the executions to write as ABANDONED, each with its reason: their owner will not end them, or not in time.

    `now` is the store's time, not the reaper's. Write each only if it is still RUNNING: its owner may end it first.
    """
    reaped = []
    for execution in executions:
        if execution.status is not ExecutionStatus.RUNNING:
            continue
        if execution.runner_id not in active_ids:
            reaped.append((execution, OWNER_GONE))
        elif now >= execution.window_ends_at:
            reaped.append((execution, OVERRUN))
    return reaped


def surplus(executions: Sequence[Execution], now: float, settings: SlotSettings) -> list[Execution]:
    """Return the records that are too old or too many, oldest first.

    A RUNNING execution is the gate and stays. So does each runner's last record for two cycles, whatever the settings:
    by it `sitting_out` sees that a slot was used.
    """
    removed = []
    seen: set[tuple[str, str]] = set()
    newest_first = sorted(executions, key=lambda execution: (execution.started_at, execution.id), reverse=True)
    for place, execution in enumerate(newest_first):
        is_last = (execution.service, execution.runner_id) not in seen
        seen.add((execution.service, execution.runner_id))
        age = now - _end_of(execution)
        if is_last and age <= 2 * settings.interval_seconds:
            continue
        outdated = age > settings.execution_retention_seconds or place >= settings.execution_max_records
        if outdated and execution.status is not ExecutionStatus.RUNNING:
            removed.append(execution)
    return removed[::-1]


def sitting_out(
    claim: AtomicServiceClaim,
    active: Sequence[Member],
    executions: Sequence[Execution],
    now: float,
    settings: SlotSettings,
    *,
    same_members_since: float,
    writable_since: float,
) -> SitsOut | None:
    """Return the living runner that left the slot before `claim`'s unused, if that is certain. The holder of `claim`
    asks.

    An execution of any status counts as use: a blocked runner did come. `same_members_since` is when the asker last saw
    a change of the members: before it, the slot may have been another's. `writable_since` is when a write of the asker
    last failed: the cause may have kept the other runner, too. The asker goes on sharing the cycle, so the last runner
    is never left out.
    """
    members = sharing(active, now, settings)
    if claim.window is None or len(members) < 2:
        return None
    window = _window(claim.window.cycle, claim.window.slot - 1, len(members), settings)
    member = members[window.slot]
    if max(same_members_since, writable_since, member.joined_at, _grace_ends_at(member, settings)) > window.starts_at:
        return None
    if _sits_out(member, now):  # all do, so sitting out is off
        return None
    others_ends = [window.starts_at]
    for execution in executions:
        if execution.started_at >= window.ends_at or _end_of(execution) < window.starts_at:
            continue
        if execution.runner_id == member.runner_id:
            return None
        others_ends.append(_end_of(execution))
    if _latest_start(window, settings) - max(others_ends) < _FAIR_LOOKS * settings.check_interval_seconds:
        return None
    until = _edge(window.cycle + 1 + _SIT_OUT_CYCLES, 0, len(members), settings.interval_seconds)
    return SitsOut(member.runner_id, until)


def _end_of(execution: Execution) -> float:
    if execution.status is ExecutionStatus.RUNNING:
        return math.inf
    return execution.started_at if execution.ended_at is None else execution.ended_at
