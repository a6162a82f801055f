"""Two runners never serve at once: searched for exhaustively, with the functions that decide.

First the slots alone. Runners that cut the cycle alike are never in their windows at once while their clocks differ by
no more than the margin. Runners that cut it differently may be, for as long as one of them has not yet seen a join or
a leave; that is pinned here too, so that nobody relies on slots for safety.

Then the gate. A small model of two and three runners and a store goes through every order of steps: clocks that differ
by anything, crashes, living runners declared dead, stale views, executions reaped under a runner that works on. With
the gate, one execution is RUNNING at most, nobody writes with one that is not, and nothing blocks it for ever. Each
part of that is shown to be necessary by leaving it out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from holdfast.fleet.slots import (
    AtomicServiceClaim,
    Execution,
    Member,
    SlotSettings,
    Window,
    decide_atomic_service_claim,
    enough_margin,
    reap,
    sharing,
)

MEMBERS = [Member(runner_id=f"r{number}", joined_at=float(number)) for number in range(5)]


def in_ticks(interval: int, margin: int, *, max_members: int = 4, min_run_margin: int = 0) -> SlotSettings:
    """Settings whose second is the search's tick. A start is never too late: that would only hide starts."""
    return SlotSettings(
        interval_seconds=float(interval),
        spread_margin_seconds=float(margin),
        check_interval_seconds=1.0,
        max_start_slot_fraction=1.0,
        membership_stabilization_seconds=0.0,
        min_run_margin_seconds=float(min_run_margin),
        execution_retention_seconds=1000.0,
        execution_max_records=1000,
        max_members=max_members,
    )


# --- Slots alone ------------------------------------------------------------------------------------------------------

CYCLE, MARGIN = 24, 2  # ticks: slots of 1 to 4 runners have whole lengths
View = tuple[int, ...]


@functools.cache
def windows(runner: int, view: View, max_members: int) -> frozenset[tuple[float, float]]:
    """Every window that `runner` is given if it asks at each tick of three cycles, each edge and both its sides too."""
    settings = in_ticks(CYCLE, MARGIN, max_members=max_members)
    active = [MEMBERS[number] for number in view]
    claims = (
        decide_atomic_service_claim(f"r{runner}", active, float(t), settings) for t in range(-CYCLE, 2 * CYCLE + 1)
    )
    return frozenset((claim.window.starts_at, claim.window.ends_at) for claim in claims if claim.window is not None)


def overlap(one: int, view: View, other: int, other_view: View, skew: int, max_members: int = 4) -> bool:
    """Whether both may serve at one time, if the other's clock is ahead by `skew`."""
    return any(
        start < other_end - skew and other_start - skew < end
        for start, end in windows(one, view, max_members)
        for other_start, other_end in windows(other, other_view, max_members)
    )


def views(size: int) -> Iterator[View]:
    for count in range(1, size + 1):
        yield from itertools.combinations(range(size), count)


def one_change(size: int) -> Iterator[tuple[View, View]]:
    """All pairs of views of up to `size` runners of which one has one runner more: it joined, or it left."""
    for larger in views(size):
        for gone in larger:
            yield larger, tuple(number for number in larger if number != gone)


def test_runners_with_the_same_view_never_overlap_while_clocks_differ_by_no_more_than_the_margin() -> None:
    for view in views(4):
        for one, other in itertools.permutations(view, 2):
            for skew in range(-MARGIN, MARGIN + 1):
                assert not overlap(one, view, other, view, skew), (view, one, other, skew)


def test_the_margin_is_as_wide_as_needed_and_no_wider() -> None:
    for view in views(4):
        for one, other in itertools.permutations(view, 2):
            follows = (view.index(other) - view.index(one)) % len(view) == 1
            assert overlap(one, view, other, view, MARGIN + 1) == follows


def test_a_join_or_leave_beyond_those_who_share_the_cycle_makes_no_overlap() -> None:
    """What happens in a fleet of more than `max_members` runners, except when one of the oldest leaves."""
    settings, seen = in_ticks(CYCLE, MARGIN, max_members=3), 0
    for larger, smaller in one_change(5):
        cuts = [sharing([MEMBERS[number] for number in view], 0.0, settings) for view in (larger, smaller)]
        if cuts[0] != cuts[1]:
            continue
        for (one, view), (other, other_view) in itertools.product(
            ((number, larger) for number in larger), ((number, smaller) for number in smaller)
        ):
            if one != other:
                seen += 1
                for skew in range(-MARGIN, MARGIN + 1):
                    assert not overlap(one, view, other, other_view, skew, max_members=3)
    assert seen > 50


def test_slots_alone_do_not_keep_runners_apart_that_see_different_members() -> None:
    """Whoever shares the cycle must have seen the same joins and leaves. Until then only the gate keeps them apart."""
    found = {
        (larger, smaller)
        for larger, smaller in one_change(4)
        for one, other in itertools.product(larger, smaller)
        if one != other and overlap(one, larger, other, smaller, 0)
    }
    assert ((0, 1), (0,)) in found  # r1 sees both; r0 still believes that it is alone
    assert ((0, 1, 2), (0, 1)) in found


# --- The gate ---------------------------------------------------------------------------------------------------------

# What a runner is about to do. It looks at the roster and at the executions; writes what it reaps, and decides; starts;
# asks for the margin; works, write by write, until its window ends. The store is in between any two of these.
IDLE, REAP, START, INSERT, CHECK, WORK, DEAD = "look", "reap", "start", "insert", "check", "work", "dead"


class Runner(NamedTuple):
    step: str = IDLE
    view: int = 0  # bits: the roster that it read
    doomed: int = 0  # bits: owners of the executions that it is about to reap, each only as long as it is RUNNING
    ends_at: int = 0  # of the window that it claimed
    running: bool = False  # its execution is RUNNING in the store: it may not know better


class State(NamedTuple):
    time: int  # the store's, within a cycle
    roster: int  # bits
    runners: tuple[Runner, ...]


class Model(NamedTuple):
    """The world, and what is broken in it."""

    skews: tuple[int, ...]  # by which each runner's clock is ahead of the store's
    cycle: int = 6
    margin: int = 1
    mortal: int = 3  # bits: runners that may crash, be declared dead while they live, and join again
    gate: str = "swap"  # start if no execution is RUNNING, atomically; or "none"; or "read, then write"
    reaps: bool = True
    conditional: bool = True  # a service's writes apply only while its execution is RUNNING

    @property
    def start(self) -> State:
        return State(0, (1 << len(self.skews)) - 1, tuple(Runner() for _ in self.skews))


@functools.cache
def window_end(runner: int, view: int, local: int, cycle: int, margin: int) -> int | None:
    active = [member for bit, member in enumerate(MEMBERS) if view >> bit & 1]
    claim = decide_atomic_service_claim(f"r{runner}", active, float(local), in_ticks(cycle, margin))
    return None if claim.window is None else int(claim.window.ends_at)


@functools.cache
def has_margin(ends_at: int, local: int) -> bool:
    window = Window(starts_at=-math.inf, ends_at=float(ends_at), cycle=0, slot=0)
    return enough_margin(AtomicServiceClaim(window=window), float(local), in_ticks(6, 1, min_run_margin=1))


@functools.cache
def doomed(running: tuple[tuple[int, int], ...], view: int, time: int) -> int:
    """The executions to reap, as bits of their owners; `running` are owners and ends of windows."""
    executions = [
        Execution(id=str(owner), service="core", runner_id=f"r{owner}", started_at=-1.0, window_ends_at=float(ends_at))
        for owner, ends_at in running
    ]
    living = {member.runner_id for bit, member in enumerate(MEMBERS) if view >> bit & 1}
    return sum(1 << int(execution.id) for execution, _ in reap(executions, living, float(time)))


def put(state: State, number: int, runner: Runner) -> State:
    runners = (*state.runners[:number], runner, *state.runners[number + 1 :])
    return State(state.time, state.roster, runners)


def ended(state: State, owners: int) -> State:
    """These executions are RUNNING no more, so who meant to reap them will find nothing to write."""
    runners = []
    for number, runner in enumerate(state.runners):
        if runner.doomed & owners:
            runner = runner._replace(doomed=runner.doomed & ~owners)
        if runner.running and owners >> number & 1:
            runner = Runner(DEAD) if runner.step == DEAD else runner._replace(running=False)
        runners.append(runner)
    return State(state.time, state.roster, tuple(runners))


def step(model: Model, state: State, number: int) -> State:
    """The runner's next step."""
    runner, local = state.runners[number], state.time + model.skews[number]
    anybody = any(each.running for each in state.runners)
    match runner.step:
        case "look":
            running = tuple((owner, each.ends_at) for owner, each in enumerate(state.runners) if each.running)
            mask = doomed(running, state.roster, state.time) if model.reaps else 0
            return put(state, number, Runner(REAP, view=state.roster, doomed=mask))
        case "reap":
            end = window_end(number, runner.view, local, model.cycle, model.margin)
            decided = Runner() if end is None else Runner(START, ends_at=end)
            return put(ended(state, runner.doomed) if runner.doomed else state, number, decided)
        case "start" if model.gate != "none" and anybody:
            return put(state, number, Runner())  # BLOCKED
        case "start" if model.gate == "read, then write":
            return put(state, number, runner._replace(step=INSERT))
        case "start" | "insert":
            return put(state, number, runner._replace(step=CHECK, running=True))
        case "check":
            if has_margin(runner.ends_at, local):
                return put(state, number, runner._replace(step=WORK))
        case "work":
            if local < runner.ends_at and (runner.running or not model.conditional):
                return state  # a write of the service, taken
    return put(ended(state, 1 << number), number, Runner())  # it ends, or finds that it was reaped


def moves(model: Model, state: State) -> Iterator[tuple[str, State]]:
    """Everything that may happen next."""
    yield "a tick", later(model, state)
    for number, runner in enumerate(state.runners):
        bit = 1 << number
        if runner.step != DEAD:
            yield f"r{number}: {runner.step}", step(model, state, number)
        if not model.mortal & bit:
            continue
        if runner.step != DEAD:
            left = Runner(DEAD, ends_at=runner.ends_at, running=True) if runner.running else Runner(DEAD)
            yield f"r{number} crashes", put(state, number, left)
        if state.roster & bit:
            yield f"r{number} is declared dead", state._replace(roster=state.roster & ~bit)
        elif runner.step != DEAD:
            yield f"r{number} joins again", state._replace(roster=state.roster | bit)


def later(model: Model, state: State) -> State:
    """One tick. Time is kept within a cycle, and ends within reach, so that the search comes to an end by itself."""
    wrap = model.cycle if state.time + 1 == model.cycle else 0
    runners = []
    for runner, skew in zip(state.runners, model.skews, strict=True):
        if runner.step in (START, INSERT, CHECK, WORK) or runner.running:
            runner = runner._replace(ends_at=max(runner.ends_at - wrap, min(0, skew)))
        runners.append(runner)
    return State(state.time + 1 - wrap, state.roster, tuple(runners))


def wrong(model: Model, state: State) -> str | None:
    if sum(runner.running for runner in state.runners) > 1:
        return "two executions are RUNNING"
    for number, runner in enumerate(state.runners):
        takes = not model.conditional and not runner.running
        if runner.step == WORK and takes and state.time + model.skews[number] < runner.ends_at:
            return "a runner writes although its execution was reaped"
    return None


class Found(NamedTuple):
    states: dict[State, tuple[State, str] | None]  # each with whence it was reached, and how
    wrong: str | None = None
    path: tuple[str, ...] = ()


def search(model: Model) -> Found:
    """Every state that can be reached, or the shortest way to a wrong one."""
    start = model.start
    states: dict[State, tuple[State, str] | None] = {start: None}
    edge = [start]
    while edge:
        reached = []
        for state in edge:
            for how, following in moves(model, state):
                if following in states:
                    continue
                states[following] = (state, how)
                problem = wrong(model, following)
                if problem is not None:
                    return Found(states, problem, path_to(following, states))
                reached.append(following)
        edge = reached
    return Found(states)


def path_to(state: State, states: dict[State, tuple[State, str] | None]) -> tuple[str, ...]:
    path = []
    while (whence := states[state]) is not None:
        state, how = whence
        path.append(how)
    return tuple(reversed(path))


def stuck(model: Model, found: Found) -> list[State]:
    """The states with a living runner from which no living runner ever comes to work, whatever happens."""
    before: dict[State, list[State]] = {state: [] for state in found.states}
    for state in found.states:
        for _, following in moves(model, state):
            before[following].append(state)
    good = [state for state in found.states if any(each.step == WORK and each.running for each in state.runners)]
    can = set(good)
    while good:
        for state in before[good.pop()]:
            if state not in can:
                can.add(state)
                good.append(state)
    return [s for s in found.states if s not in can and any(each.step != DEAD for each in s.runners)]


def far_behind(*places: int, cycle: int, **facts: Any) -> Model:
    """The clocks that allow most.

    To a runner, its clock only says where in the cycle it is. To the store, a clock that is two cycles behind makes
    whatever the runner claims overrun from the start, so that it may be reaped at any time; with any other clock that
    shows the same place in the cycle it may be reaped at some of these times.
    """
    return Model(tuple(place - 2 * cycle for place in places), cycle, **facts)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(6))
def test_with_any_clocks_the_gate_lets_one_of_two_runners_in(place: int) -> None:
    found = search(far_behind(0, place, cycle=6))
    assert found.wrong is None, found.path
    assert len(found.states) > 5_000


@pytest.mark.slow
@pytest.mark.parametrize("places", [(0, 0), (1, 2), (2, 1)])  # clocks agree; all have their slots at once; reversed
def test_with_any_clocks_the_gate_lets_one_of_three_runners_in(places: tuple[int, int]) -> None:
    """Three, because a third may reap what it saw of the first while the second is in."""
    found = search(far_behind(0, *places, cycle=3, margin=0, mortal=1))
    assert found.wrong is None, found.path
    assert len(found.states) > 5_000


def as_seen_by_runners(model: Model) -> set[object]:
    """What is reached, with times as the runners see them."""
    return {
        (
            (state.time + model.skews[0]) % model.cycle,
            state.roster,
            *(
                runner._replace(
                    ends_at=0 if runner.step in (IDLE, REAP, DEAD) else max(0, runner.ends_at - state.time - skew)
                )
                for runner, skew in zip(state.runners, model.skews, strict=True)
            ),
        )
        for state in search(model).states
    }


@pytest.mark.slow
def test_clocks_far_behind_do_allow_most() -> None:
    for skews in ((0, 0), (1, -3)):
        most = as_seen_by_runners(far_behind(0, (skews[1] - skews[0]) % 4, cycle=4))
        assert as_seen_by_runners(Model(skews, cycle=4)) <= most


@pytest.mark.slow
@pytest.mark.parametrize("skews", [(0, 0), (0, 2), (9, -6)])
def test_nothing_blocks_the_gate_for_ever(skews: tuple[int, int]) -> None:
    """From every state with a living runner one comes to work again, whoever crashed with whatever RUNNING."""
    model = Model(skews, cycle=4)
    assert stuck(model, search(model)) == []


def zombies(found: Found) -> list[tuple[int, int]]:
    """Runners that work on although their execution was reaped, while another's is RUNNING: store's time, own end."""
    return [
        (state.time, one.ends_at)
        for state in found.states
        for one, other in itertools.permutations(state.runners, 2)
        if one.step == WORK and not one.running and other.step == WORK and other.running
    ]


def test_the_search_meets_runners_that_were_reaped_while_they_worked() -> None:
    by_overrun = zombies(search(Model((0, 0), mortal=0)))
    assert len(by_overrun) > 0
    assert all(ends_at <= time for time, ends_at in by_overrun)
    declared_dead = [ends_at > time for time, ends_at in zombies(search(Model((0, 0))))]
    assert any(declared_dead)


@pytest.mark.parametrize(
    ("broken", "problem", "longest"),
    [
        ({"gate": "none"}, "two executions are RUNNING", 6),
        ({"gate": "read, then write"}, "two executions are RUNNING", 8),
        ({"conditional": False}, "a runner writes although its execution was reaped", 10),
    ],
)
def test_a_planted_bug_is_found(broken: dict[str, Any], problem: str, longest: int) -> None:
    found = search(Model((0, 3))._replace(**broken))  # each is in its slot by its own clock
    assert found.wrong == problem
    assert 0 < len(found.path) <= longest


def test_without_slots_that_overlap_the_missing_gate_is_still_found() -> None:
    """Clocks that agree: it takes a runner that has not seen the other, or one that works past its end."""
    found = search(Model((0, 0), gate="none"))
    assert found.wrong == "two executions are RUNNING"


def test_without_reaping_a_crash_blocks_the_gate_for_ever() -> None:
    model = Model((0, 3), reaps=False)
    blocked = stuck(model, search(model))
    assert any(each.step == DEAD and each.running for state in blocked for each in state.runners)
