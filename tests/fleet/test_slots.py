"""Whose turn it is: slots for any number of runners, what each setting does, who is reaped and who sits out.

That no two runners serve at once is searched for in test_slots_search.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.fleet.slots import (
    OVERRUN,
    OWNER_GONE,
    AtomicServiceClaim,
    AtomicServiceSkip,
    Execution,
    ExecutionStatus,
    Member,
    SitsOut,
    SlotSettings,
    Window,
    decide_atomic_service_claim,
    enough_margin,
    next_change_at,
    reap,
    sharing,
    sitting_out,
    surplus,
)
from holdfast.schedules import cron
from holdfast.settings import SPECS, Settings

OURS = Settings().slots
ORIGINAL = msgspec.structs.replace(
    OURS,
    interval_seconds=300.0,
    spread_margin_seconds=60.0,
    check_interval_seconds=30.0,
    max_start_slot_fraction=0.5,
    max_members=1_000_000,
)
TODAY = 1_800_000_000.0  # the start of a cycle of one minute, and of one of five


def changed(settings: SlotSettings = OURS, **values: Any) -> SlotSettings:
    return msgspec.structs.replace(settings, **values)


def fleet(count: int, **facts: Any) -> list[Member]:
    return [Member(runner_id=f"r{number}", joined_at=float(number), **facts) for number in range(count)]


def ask(runner: int | str, members: Sequence[Member], at: float, settings: SlotSettings = OURS) -> Any:
    """The window as (start, end), relative to TODAY like `at`; or the reason."""
    name = runner if isinstance(runner, str) else f"r{runner}"
    claim = decide_atomic_service_claim(name, members, TODAY + at, settings)
    if claim.window is None:
        return claim.reason
    return claim.window.starts_at - TODAY, claim.window.ends_at - TODAY


# --- Slots for any number of runners ----------------------------------------------------------------------------------


def test_the_example_of_three_runners_and_five_minutes() -> None:
    windows = {0: (0, 40), 1: (100, 140), 2: (200, 240)}
    always = changed(ORIGINAL, max_start_slot_fraction=1.0)
    for at, runner in itertools.product(range(300), range(3)):
        start, end = windows[runner]
        expected = windows[runner] if start <= at < end else AtomicServiceSkip.NOT_ASSIGNED_SLOT
        assert ask(runner, fleet(3), at, always) == expected
        if expected == windows[runner] and at - start > 20:
            expected = AtomicServiceSkip.LATE_START
        assert ask(runner, fleet(3), at, ORIGINAL) == expected


THIRDS = [(0, 19), (20, 39), (40, 59)]


@pytest.mark.parametrize(
    ("count", "settings", "windows"),
    [
        (1, OURS, [(0, 60)]),
        (2, OURS, [(0, 29), (30, 59)]),
        (3, OURS, THIRDS),
        (5, OURS, THIRDS),
        (50, OURS, THIRDS),
        (1000, OURS, THIRDS),
        (5, changed(max_members=5), [(0, 11), (12, 23), (24, 35), (36, 47), (48, 59)]),
        (50, changed(max_members=50), [(1.2 * slot, 1.2 * slot + 0.2) for slot in range(50)]),
        (60, changed(max_members=60), AtomicServiceSkip.SLOT_WINDOW_INVALID),
        (1000, changed(max_members=1000), AtomicServiceSkip.SLOT_WINDOW_INVALID),
        (1000, changed(max_members=1000, spread_margin_seconds=0.0), [(0.06 * n, 0.06 * (n + 1)) for n in range(1000)]),
        (1, ORIGINAL, [(0, 300)]),
        (2, ORIGINAL, [(0, 90), (150, 240)]),
        (4, ORIGINAL, [(0, 15), (75, 90), (150, 165), (225, 240)]),
        (5, ORIGINAL, AtomicServiceSkip.SLOT_WINDOW_INVALID),
        (50, ORIGINAL, AtomicServiceSkip.SLOT_WINDOW_INVALID),
    ],
)
def test_every_runner_has_its_window_and_no_other(count: int, settings: SlotSettings, windows: Any) -> None:
    members = fleet(count)
    for runner in range(0, count, max(1, count // 60)):
        if isinstance(windows, AtomicServiceSkip):
            assert {ask(runner, members, at, settings) for at in range(0, 300, 31)} == {windows}
        elif runner >= len(windows):
            reasons = {ask(runner, members, at, settings) for at in range(0, 300, 31)}
            assert reasons == {AtomicServiceSkip.NOT_ASSIGNED_SLOT}
        else:
            start, end = windows[runner]
            assert ask(runner, members, start + 1e-6, settings) == pytest.approx((start, end), abs=1e-5)
            for outside in (start - 1e-3, end + 1e-3):
                # Alone, the windows of a runner touch.
                assert ask(runner, members, outside, settings) != (start, end)


def test_a_window_begins_with_its_start_and_ends_before_its_end() -> None:
    always = changed(max_start_slot_fraction=0.0)
    assert ask(1, fleet(3), math.nextafter(TODAY + 20, 0) - TODAY, always) is AtomicServiceSkip.NOT_ASSIGNED_SLOT
    assert ask(1, fleet(3), 20, always) == (20, 39)
    assert ask(1, fleet(3), math.nextafter(TODAY + 39, 0) - TODAY, always) == (20, 39)
    assert ask(1, fleet(3), 39, always) is AtomicServiceSkip.NOT_ASSIGNED_SLOT


def test_a_claim_names_its_cycle_and_slot() -> None:
    claim = decide_atomic_service_claim("r2", fleet(3), TODAY + 60 + 41, OURS)
    window = Window(starts_at=TODAY + 100, ends_at=TODAY + 119, cycle=int(TODAY) // 60 + 1, slot=2)
    assert claim == AtomicServiceClaim(window=window)


@given(
    now=st.floats(0, 4e9),
    count=st.integers(1, 9),
    interval=st.floats(0.06, 86_400),
    nudge=st.sampled_from([None, *range(10)]),
)
def test_without_a_margin_every_moment_is_exactly_one_runners(
    now: float, count: int, interval: float, nudge: int | None
) -> None:
    """Also at the very edges of slots, where one rounding would make two holders, or none."""
    settings = changed(interval_seconds=interval, spread_margin_seconds=0.0, max_start_slot_fraction=0.0, max_members=9)
    if nudge is not None:
        now = (now // interval) * interval + nudge * interval / count
    for moment in (now, math.nextafter(now, math.inf), math.nextafter(now, 0.0)):
        claims = [decide_atomic_service_claim(f"r{n}", fleet(count), moment, settings) for n in range(count)]
        windows = [claim.window for claim in claims if claim.window is not None]
        assert len(windows) == 1
        assert windows[0].starts_at <= moment < windows[0].ends_at


# --- Reasons not to run -----------------------------------------------------------------------------------------------


def test_nobody_is_eligible() -> None:
    assert ask(0, [], 0) is AtomicServiceSkip.NO_STABLE_RUNNERS
    assert ask(0, fleet(3, can_run_atomic_service=False), 0) is AtomicServiceSkip.NO_STABLE_RUNNERS


def test_a_runner_that_is_not_on_the_roster_has_no_slot() -> None:
    assert ask("stranger", fleet(2), 0) is AtomicServiceSkip.NOT_ASSIGNED_SLOT


def test_late_is_later_than_the_fraction() -> None:
    assert ask(0, fleet(3), 19 * 0.9 - 1e-6) == (0, 19)
    assert ask(0, fleet(3), 19 * 0.9 + 1e-6) is AtomicServiceSkip.LATE_START


def test_a_lone_runner_is_never_late_and_has_no_margin() -> None:
    assert ask(0, fleet(1), 59.999) == (0, 60)
    assert ask(0, fleet(1), 59.999, changed(spread_margin_seconds=90.0)) == (0, 60)
    assert ask(0, fleet(1), 299.9, changed(ORIGINAL, max_start_slot_fraction=0.01)) == (0, 300)


def test_alone_means_alone_in_the_cycle_not_on_the_roster() -> None:
    assert ask(0, [*fleet(1), Member(runner_id="x", joined_at=-1.0, can_run_atomic_service=False)], 59.9) == (0, 60)


def test_while_the_scheduled_runner_is_in_grace_its_slot_is_nobodys() -> None:
    settings = changed(membership_stabilization_seconds=100.0)
    members = [*fleet(2), Member(runner_id="new", joined_at=TODAY)]
    assert ask(0, members, 0, settings) == (0, 19)
    for runner in ("r0", "r1", "new"):
        assert ask(runner, members, 45, settings) is AtomicServiceSkip.SCHEDULED_RUNNER_IN_GRACE
    assert ask("new", members, 99.9, settings) is AtomicServiceSkip.NOT_ASSIGNED_SLOT  # again r1's turn
    assert ask("new", members, 100, settings) == (100, 119)


@given(now=st.floats(1e9, 4e9), count=st.integers(1, 9), interval=st.floats(0.06, 86_400))
@example(now=1800000053.3333333, count=9, interval=60.0)  # divided, it falls into the slot before
@example(now=1800000000.6, count=3, interval=0.9)
def test_a_runner_in_grace_never_runs_and_others_have_their_turns(now: float, count: int, interval: float) -> None:
    members = [*fleet(count - 1), Member(runner_id="new", joined_at=now)]
    settings = changed(
        interval_seconds=interval,
        spread_margin_seconds=0.0,
        max_start_slot_fraction=0.0,
        max_members=9,
        membership_stabilization_seconds=1.0,
    )
    claims = {m.runner_id: decide_atomic_service_claim(m.runner_id, members, now, settings) for m in members}
    running = [runner for runner, claim in claims.items() if claim.window is not None]
    if running:
        assert len(running) == 1
        assert running != ["new"]
    else:
        assert {claim.reason for claim in claims.values()} == {AtomicServiceSkip.SCHEDULED_RUNNER_IN_GRACE}


def test_a_runner_that_seems_to_join_in_the_future_is_not_in_grace_if_there_is_none() -> None:
    assert ask("new", [Member(runner_id="new", joined_at=TODAY + 5)], 0) == (0, 60)


# --- Joins, leaves, order ---------------------------------------------------------------------------------------------


def test_the_order_of_the_roster_does_not_matter() -> None:
    members = [*fleet(3), Member(runner_id="ra", joined_at=1.0), Member(runner_id="q", joined_at=1.0)]
    settings = changed(max_members=5)
    for order in itertools.permutations(members):
        assert [member.runner_id for member in sharing(order, TODAY, settings)] == ["r0", "q", "r1", "ra", "r2"]


def test_a_second_runner_halves_the_cycle_and_a_third_cuts_it_in_three() -> None:
    assert [ask(0, fleet(count), 1) for count in (1, 2, 3)] == [(0, 60), (0, 29), (0, 19)]


@pytest.mark.parametrize("count", [3, 4, 50])
def test_a_join_beyond_the_members_changes_nothing(count: int) -> None:
    for at, runner in itertools.product(range(60), range(3)):
        assert ask(runner, fleet(count), at) == ask(runner, fleet(count + 1), at)


def test_when_one_leaves_the_next_oldest_takes_a_slot() -> None:
    left = [member for member in fleet(5) if member.runner_id != "r0"]
    assert ask(0, left, 1) is AtomicServiceSkip.NOT_ASSIGNED_SLOT
    assert (ask(1, left, 1), ask(2, left, 21), ask(3, left, 41)) == ((0, 19), (20, 39), (40, 59))


def test_who_is_not_eligible_has_no_slot() -> None:
    members = [*fleet(2), Member(runner_id="stuck", joined_at=-1.0, can_run_atomic_service=False)]
    assert ask("stuck", members, 1) is AtomicServiceSkip.NOT_ASSIGNED_SLOT
    assert ask(0, members, 1) == (0, 29)


def test_who_sits_out_has_no_slot_until_then() -> None:
    members = [Member(runner_id="idle", joined_at=-1.0, sits_out_until=TODAY + 180), *fleet(1)]
    assert ask("idle", members, 179.9) is AtomicServiceSkip.NOT_ASSIGNED_SLOT
    assert ask(0, members, 179.9) == (120, 180)
    assert ask("idle", members, 180) == (180, 209)
    assert ask(0, members, 210) == (210, 239)


def test_if_all_sit_out_none_does() -> None:
    members = fleet(2, sits_out_until=TODAY + 500)
    assert (ask(0, members, 1), ask(1, members, 31)) == ((0, 29), (30, 59))
    assert ask(0, members[:1], 1) == (0, 60)
    stuck = Member(runner_id="stuck", joined_at=0.0, can_run_atomic_service=False)
    assert ask(0, [stuck, *members[:1]], 1) == (0, 60)


@pytest.mark.parametrize("skew", [-1.0, -0.5, 0.5, 1.0])
def test_a_clock_that_is_off_by_no_more_than_the_margin_meets_nobody(skew: float) -> None:
    for at in (number / 4 for number in range(4 * 60)):
        right, off = ask(0, fleet(2), at), ask(1, fleet(2), at + skew)
        assert not (isinstance(right, tuple) and isinstance(off, tuple))


# --- After the start, and until the next look -------------------------------------------------------------------------


def test_enough_margin_is_asked_again_after_the_start_was_recorded() -> None:
    claim = decide_atomic_service_claim("r0", fleet(3), TODAY, OURS)
    assert enough_margin(claim, TODAY, OURS)
    assert enough_margin(claim, TODAY + 18.94, OURS)
    assert not enough_margin(claim, TODAY + 18.96, OURS)
    assert enough_margin(claim, TODAY + 18.96, changed(min_run_margin_seconds=0.0))
    assert not enough_margin(claim, TODAY + 19, changed(min_run_margin_seconds=0.0))
    assert not enough_margin(claim, TODAY - 0.1, OURS)  # the clock was set back: not this runner's turn any more
    assert not enough_margin(AtomicServiceClaim(reason=AtomicServiceSkip.LATE_START), TODAY, OURS)


@pytest.mark.parametrize(
    ("runner", "members", "at", "expected"),
    [
        ("r0", fleet(3), -0.5, 0),
        ("r0", fleet(3), 0, 60),
        ("r1", fleet(3), 0, 20),
        ("r1", fleet(3), 20, 80),
        ("r2", fleet(3), 59.5, 100),
        ("r0", fleet(1), 12, 60),
        ("r7", fleet(9), 12, 60),
        ("r0", [], 12, 60),
        ("r1", [*fleet(2), Member(runner_id="x", joined_at=9.0, sits_out_until=TODAY + 15)], 12, 15),
        ("r1", [*fleet(2), Member(runner_id="x", joined_at=9.0, sits_out_until=TODAY + 12)], 12, 20),
    ],
)
def test_next_change_is_the_start_of_the_next_window(
    runner: str, members: list[Member], at: float, expected: float
) -> None:
    assert next_change_at(runner, members, TODAY + at, OURS) - TODAY == expected


def test_next_change_is_the_end_of_a_grace_inside_the_window() -> None:
    settings = changed(membership_stabilization_seconds=70.0)
    assert next_change_at("new", [Member(runner_id="new", joined_at=TODAY)], TODAY + 65, settings) == TODAY + 70


MEMBERS = st.builds(
    Member,
    runner_id=st.just(""),
    joined_at=st.integers(-100, 100).map(lambda at: TODAY + at),
    can_run_atomic_service=st.sampled_from([True, True, True, False]),
    sits_out_until=st.none() | st.integers(-100, 200).map(lambda at: TODAY + at),
)
ROSTERS = st.lists(MEMBERS, max_size=6).map(
    lambda found: [msgspec.structs.replace(member, runner_id=f"r{n}") for n, member in enumerate(found)]
)


@given(roster=ROSTERS, at=st.integers(0, 240), grace=st.sampled_from([0.0, 45.0]))
def test_nothing_becomes_possible_before_the_next_change(roster: list[Member], at: int, grace: float) -> None:
    """Who sleeps until then misses no start."""
    settings = changed(membership_stabilization_seconds=grace)
    look = next_change_at("r0", roster, TODAY + at / 4, settings)
    assert TODAY + at / 4 < look <= TODAY + at / 4 + settings.interval_seconds
    could = isinstance(ask(0, roster, at / 4, settings), tuple)
    for moment in range(at, 1000):
        if TODAY + moment / 4 >= look:
            break
        can = isinstance(ask(0, roster, moment / 4, settings), tuple)
        assert could or not can
        could = can


# --- Every setting, by its name ---------------------------------------------------------------------------------------


def asked(runner: int, at: float, members: Sequence[Member] = tuple(fleet(3))) -> Callable[[SlotSettings], Any]:
    return lambda settings: ask(runner, members, at, settings)


def kept(ages: Sequence[float]) -> Callable[[SlotSettings], Any]:
    records = [execution(f"e{age}", "r0", -age - 1, -age, ended=-age) for age in ages]
    return lambda settings: [
        age for age, record in zip(ages, records, strict=True) if record not in surplus(records, TODAY, settings)
    ]


def judged(settings: SlotSettings) -> Any:
    return judge(1, fleet(3), [], settings=settings) is not None


def margin_left(settings: SlotSettings) -> Any:
    return enough_margin(decide_atomic_service_claim("r0", fleet(3), TODAY, settings), TODAY + 15, settings)


def execution(name: str, runner: str, started: float, window_ends: float, **facts: Any) -> Execution:
    ended = facts.pop("ended", None)
    status = facts.pop("status", ExecutionStatus.RUNNING if ended is None else ExecutionStatus.COMPLETED)
    return Execution(
        id=name,
        service=facts.pop("service", "core"),
        runner_id=runner,
        started_at=TODAY + started,
        window_ends_at=TODAY + window_ends,
        status=status,
        ended_at=None if ended is None else TODAY + ended,
        **facts,
    )


def judge(
    runner: int,
    members: Sequence[Member],
    executions: Sequence[Execution],
    *,
    settings: SlotSettings = OURS,
    cycle: int = 1,
    same_members_since: float = -1e6,
    writable_since: float = -1e6,
) -> SitsOut | None:
    """What the runner finds right after it claimed, at the start of its slot in the cycle."""
    slots = len(sharing(members, TODAY + cycle * 60, settings))
    now = TODAY + (cycle + runner / slots) * settings.interval_seconds
    claim = decide_atomic_service_claim(f"r{runner}", members, now, settings)
    assert claim.window is not None
    return sitting_out(
        claim,
        members,
        executions,
        now,
        settings,
        same_members_since=TODAY + same_members_since,
        writable_since=TODAY + writable_since,
    )


NAMED = {
    "interval_minutes": (5, asked(1, 30), (20, 39), AtomicServiceSkip.NOT_ASSIGNED_SLOT),
    "spread_margin_minutes": ("10s", asked(0, 15), (0, 19), AtomicServiceSkip.NOT_ASSIGNED_SLOT),
    "check_interval_minutes": ("10s", judged, True, False),
    "max_start_slot_fraction": (0.5, asked(0, 15), (0, 19), AtomicServiceSkip.LATE_START),
    "membership_stabilization_minutes": (
        "2m",
        asked(0, 1, [Member(runner_id="r0", joined_at=TODAY - 60)]),
        (0, 60),
        AtomicServiceSkip.SCHEDULED_RUNNER_IN_GRACE,
    ),
    "min_run_margin_seconds": (5, margin_left, True, False),
    "execution_retention_minutes": (10, kept([0, 300, 601, 3599, 3601]), [0, 300, 601, 3599], [0, 300]),
    "execution_max_records": (2, kept([0, 1, 2, 3]), [0, 1, 2, 3], [0, 1]),
    "max_members": (2, asked(2, 45), (40, 59), AtomicServiceSkip.NOT_ASSIGNED_SLOT),
}


@pytest.mark.parametrize("name", NAMED)
def test_every_setting_does_what_its_name_says(name: str) -> None:
    value, outcome, by_default, then = NAMED[name]
    assert outcome(Settings().slots) == by_default
    overrides: dict[str, Any] = {f"atomic_service_{name}": value}
    assert outcome(Settings(**overrides).slots) == then


def test_no_setting_is_left_out() -> None:
    prefix = "atomic_service_"
    assert {name.removeprefix(prefix) for name in SPECS if name.startswith(prefix)} == set(NAMED)


# --- A schedule is served in time -------------------------------------------------------------------------------------


def serving(
    runner: str,
    members: Sequence[Member],
    settings: SlotSettings,
    phase: float,
    start: float,
    end: float,
    *,
    sleeps: bool,
) -> Iterator[float]:
    """The moments at which a runner works on the services.

    It looks once per check interval, first at `phase`. `sleeps`: and also when it is told that its window begins. Once
    it has claimed, it works at every look until its window ends.
    """
    window, now = None, start + phase
    while now < end:
        if window is None or now >= window.ends_at:
            window = decide_atomic_service_claim(runner, members, now, settings).window
        if window is not None:
            yield now
        following = now + settings.check_interval_seconds
        now = min(following, next_change_at(runner, members, now, settings)) if sleeps else following


def longest_wait(members: Sequence[Member], settings: SlotSettings, phases: Sequence[float], *, sleeps: bool) -> float:
    """The longest time from a tick of an hourly cron to the first moment at which anybody works."""
    longest = 0.0
    for minute in (0, 3, 17, 59):
        for tick in list(cron(f"{minute} * * * *").ticks(TODAY, TODAY + 86_400))[::8]:
            start, end = tick - settings.interval_seconds, tick + 2 * settings.interval_seconds
            moments = [
                moment
                for member, phase in zip(members, phases, strict=False)
                for moment in serving(member.runner_id, members, settings, phase, start, end, sleeps=sleeps)
            ]
            longest = max(longest, min((moment for moment in moments if moment >= tick), default=math.inf) - tick)
    return longest


@pytest.mark.parametrize(
    ("count", "sleeps", "bound"), [(1, False, 1), (2, False, 3), (3, False, 3), (3, True, 2), (20, True, 2)]
)
def test_an_hourly_cron_is_never_missed(count: int, sleeps: bool, bound: float) -> None:
    """Whatever the moments at which runners look."""
    for phases in ([0.0, 0.0, 0.0], [0.1, 0.5, 0.9], [0.999, 0.999, 0.999], [0.999, 0.0, 0.5]):
        assert longest_wait(fleet(count), OURS, phases, sleeps=sleeps) <= bound


def test_with_the_original_settings_an_hourly_cron_may_be_missed_for_ever() -> None:
    """All four look ten seconds after the start of their slot of fifteen, each time: too late, each time."""
    assert longest_wait(fleet(4), ORIGINAL, [10.0, 85.0, 160.0, 235.0], sleeps=False) == math.inf
    assert longest_wait(fleet(5), ORIGINAL, [0.0] * 5, sleeps=False) == math.inf
    assert longest_wait(fleet(4), changed(ORIGINAL, max_start_slot_fraction=0.9), [10.0] * 4, sleeps=False) <= 300


# --- Executions -------------------------------------------------------------------------------------------------------


def test_executions_that_nobody_will_end_are_reaped() -> None:
    gone = execution("a", "dead", 0, 19)
    gone_and_over = execution("b", "dead", -60, -41)
    over = execution("c", "r0", -20, -1)
    at_its_end = execution("d", "r0", 0, 5)
    alive = execution("e", "r0", 0, 5.001)
    ended = execution("f", "dead", -60, -41, ended=-41)
    blocked = execution("g", "dead", -60, -41, ended=-60, status=ExecutionStatus.BLOCKED)
    everything = [gone, gone_and_over, over, at_its_end, alive, ended, blocked]
    assert reap(everything, {"r0"}, TODAY + 5) == [
        (gone, OWNER_GONE),
        (gone_and_over, OWNER_GONE),
        (over, OVERRUN),
        (at_its_end, OVERRUN),
    ]
    assert reap([alive], ["r0"], TODAY + 5) == []


def test_records_go_by_age_and_by_count_oldest_first_but_never_a_running_one() -> None:
    running = execution("running", "r0", -9000, -8900)
    records = [execution(f"e{age:04}", "r1", -age, -age, ended=-age) for age in range(1000, 5000, 500)]
    assert surplus([running, *records], TODAY, OURS) == records[:5:-1]  # older than an hour: 4500 and 4000
    assert surplus([running, *records], TODAY, changed(execution_max_records=2)) == records[:1:-1]
    nothing = changed(execution_max_records=1, execution_retention_seconds=0.0)
    assert surplus([running, execution("later", "r0", -5, 0, ended=-5)], TODAY, nothing) == []


def test_a_runners_last_record_stays_for_two_cycles_whatever_the_settings() -> None:
    """Else a runner would sit out for a slot that it did use."""
    records = [execution(f"{runner}{age}", runner, -age, -age, ended=-age) for age in (30, 90, 150) for runner in "xy"]
    nothing = changed(execution_max_records=1, execution_retention_seconds=0.0)
    assert {record.id for record in surplus(records, TODAY, nothing)} == {"x90", "y90", "x150", "y150"}
    assert len(surplus(records, TODAY + 91, nothing)) == 6


# --- Sitting out ------------------------------------------------------------------------------------------------------


def test_who_left_its_slot_unused_sits_out_for_three_cycles() -> None:
    members, until = fleet(3), {}
    for asker, idle in ((1, 0), (2, 1), (0, 2)):
        found = judge(asker, members, [])
        assert found is not None
        assert found.runner_id == f"r{idle}"
        until[idle] = found.until - TODAY
    # r0 and r1 had their slot in cycle 1, r2 in cycle 0: each loses its next three.
    assert until == {0: 300, 1: 300, 2: 240}


@pytest.mark.parametrize("status", ExecutionStatus)
def test_an_execution_of_any_status_in_the_slot_is_use(status: ExecutionStatus) -> None:
    ended = None if status is ExecutionStatus.RUNNING else 66
    assert judge(1, fleet(3), [execution("a", "r0", 65, 79, ended=ended, status=status)]) is None


def test_an_execution_in_another_slot_is_no_use() -> None:
    earlier = execution("a", "r0", 0, 19, ended=19)
    assert judge(1, fleet(3), [earlier]) == SitsOut("r0", TODAY + 300)


def test_what_the_asker_itself_has_just_started_excuses_nobody() -> None:
    assert judge(1, fleet(3), [execution("a", "r1", 80, 99)]) == SitsOut("r0", TODAY + 300)


def test_a_lone_runner_never_sits_out() -> None:
    assert judge(0, fleet(1), []) is None


def test_the_last_eligible_runner_never_sits_out() -> None:
    others = [Member(runner_id="s", joined_at=9.0, can_run_atomic_service=False)]
    others += [Member(runner_id="t", joined_at=9.0, sits_out_until=TODAY + 1000)]
    assert judge(0, [*fleet(1), *others], []) is None
    assert judge(1, [*fleet(2), *others], []) == SitsOut("r0", TODAY + 300)


def test_a_runner_that_sits_out_already_is_not_made_to_sit_out_longer() -> None:
    """All sit out, so all have slots; were their times put off again and again, they would never end."""
    assert judge(1, fleet(2, sits_out_until=TODAY + 600), []) is None


@pytest.mark.parametrize("reason", ["same_members_since", "writable_since"])
def test_nobody_sits_out_for_a_slot_that_the_asker_did_not_wholly_see(reason: str) -> None:
    since_slot: dict[str, Any] = {reason: 60.0}
    assert judge(1, fleet(3), [], **since_slot) is not None
    inside: dict[str, Any] = {reason: 60.001}
    assert judge(1, fleet(3), [], **inside) is None


def test_nobody_sits_out_for_a_slot_before_it_had_joined_or_in_its_grace() -> None:
    joined = [fleet(1)[0], Member(runner_id="r1", joined_at=TODAY + 31)]
    assert judge(0, joined, []) is None
    assert judge(0, joined, [], cycle=2) == SitsOut("r1", TODAY + 300)
    grace = changed(membership_stabilization_seconds=60.0)
    assert judge(0, joined, [], cycle=2, settings=grace) is None
    assert judge(0, joined, [], cycle=3, settings=grace) == SitsOut("r1", TODAY + 360)


def test_nobody_sits_out_for_a_slot_that_another_blocked() -> None:
    assert judge(1, fleet(3), [execution("a", "r2", 40, 59, ended=75.5)]) is None
    assert judge(1, fleet(3), [execution("a", "r2", 40, 59)]) is None
    assert judge(1, fleet(3), [execution("a", "r2", 40, 59, ended=61)]) == SitsOut("r0", TODAY + 300)


def test_nobody_sits_out_if_the_slot_is_too_short_to_be_sure_of_a_look() -> None:
    """With 40 s windows, starts in the first half and a look each 30 s, a healthy runner often has none."""
    assert judge(1, fleet(3), [], settings=ORIGINAL) is None
    assert judge(1, fleet(3), [], settings=changed(ORIGINAL, check_interval_seconds=10.0)) is not None


def test_a_claim_that_does_not_run_judges_nobody() -> None:
    skipped = AtomicServiceClaim(reason=AtomicServiceSkip.LATE_START)
    found = sitting_out(skipped, fleet(3), [], TODAY, OURS, same_members_since=0.0, writable_since=0.0)
    assert found is None


def test_slots_are_cut_anew_without_the_one_that_sits_out() -> None:
    idle = judge(1, fleet(4), [])
    assert idle is not None
    members = [
        msgspec.structs.replace(member, sits_out_until=idle.until) if member.runner_id == idle.runner_id else member
        for member in fleet(4)
    ]
    assert [member.runner_id for member in sharing(members, TODAY + 80, OURS)] == ["r1", "r2", "r3"]
    assert [member.runner_id for member in sharing(members, TODAY + 300, OURS)] == ["r0", "r1", "r2"]
