"""Every fake in the tests of the engine, and where the same joint is tested with the real part.

A part that is tested against a fake of its neighbour is not tested where it breaks: ``overlap="cancel"`` never
cancelled anything, and the scheduler's own tests were content, since the canceller in them was a fake. Whoever adds a
fake adds a line to `FAKES`, and a test with the real part if there is none. Classes that stand in for a real part are
found by themselves (`stand_ins`); what is replaced in other ways is listed by hand.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from tests.support.engines import More
from tests.support.fleet import APP, Fleet, add, virtually
from tests.support.patience import eventually, patient

from holdfast import App
from holdfast.fleet.runner import path_duties
from holdfast.fleet.services import SERVICE, Duty, Executions
from holdfast.fleet.slots import ExecutionStatus
from holdfast.model.records import Piece, StoredPayload
from holdfast.model.status import Status
from holdfast.runtime.payloads import UNWANTED_SECONDS
from holdfast.schedules.service import Scheduler

mongo = pytest.mark.xdist_group("mongo")


class Fake(NamedTuple):
    """Classes of one file (or what else is replaced there), what they stand for, and tests with the real part."""

    names: str
    file: str
    stands_for: str
    real: str


NETWORK = "a store that is slow, loses replies or is changed meanwhile"
SERVERS = (
    "failover/test_outages, failover/test_single_messages, store/mongo/test_lost_replies, faults/test_crash_points"
)
PAYLOADS = "runtime/payloads/test_stores, scenarios/test_submit_to_result, faults/test_crash_points"
WORKERS = "cli/test_supervisor, cli/test_worker_lives"

FAKES = (
    # --- a store, or the way to it
    Fake("Line", "support/fleet", "the network between a runner and its store", f"cli/test_outages, {SERVERS}"),
    Fake("Flaky FlakyApply Picky", "runtime/test_worker", NETWORK, SERVERS),
    Fake("SlowAnswers", "runtime/test_worker_awaits", NETWORK, SERVERS),
    Fake("AwayWhenResumed Counted SlowPauses", "runtime/test_waits", NETWORK, SERVERS),
    Fake(
        "SlowClaims HangingEnds SlowResults SlowReleases SlowReads SlowStarts SlowPayloads",
        "runtime/test_meanwhile",
        NETWORK,
        SERVERS,
    ),
    Fake(
        "Unwilling", "runtime/test_meanwhile", "a store that refuses the start of a call", "failover/test_short_faults"
    ),
    Fake("OwnClocks", "runtime/test_meanwhile", "a store without a clock of its own: SQLite", "faults/test_clocks"),
    Fake("OwnClocks WrongLine", "fleet/test_clocks", "hosts whose clocks are wrong", "faults/test_clocks"),
    Fake("WithNewcomer _Yielding", "fleet/test_recovery", NETWORK, SERVERS),
    Fake("OneLateBeat BreaksForCoreTasks", "fleet/test_runner", NETWORK, SERVERS),
    Fake("LateBeats", "fleet/test_supervisor_awaits", NETWORK, f"{SERVERS}, {WORKERS}"),
    Fake("OldRoster", "fleet/test_services", "a roster that was read before others joined", "here: J4"),
    Fake("Shaky Counting", "schedules/test_service", NETWORK, "scenarios/test_schedules, faults/test_crash_points"),
    Fake("Meddled", "workflows/test_owners", NETWORK, "workflows/test_looking, store/test_conformance"),
    Fake("Counting Sleepy Slow", "runtime/payloads/test_payloads", NETWORK, PAYLOADS),
    Fake("Counting", "runtime/payloads/test_cache", NETWORK, PAYLOADS),
    Fake("Watched", "runtime/test_notes", NETWORK, SERVERS),
    Fake("Troubled Slow Lazy", "runtime/payloads/test_trouble", NETWORK, PAYLOADS),
    Fake("GatedMemory GatedCollection GatedCursor", "runtime/payloads/test_interleavings", NETWORK, PAYLOADS),
    Fake("Costly", "runtime/test_claiming_ahead", "a store whose claims are dear: MongoDB", "here: J2"),
    Fake("EarlyMemory", "runtime/test_worker_awaits", "a store whose claims are dear: MongoDB", "here: J2"),
    Fake("Removing", "archive/test_retention", "a store that removes by itself: MongoDB", "store/mongo/test_archive"),
    Fake("Interrupted", "store/mongo/test_limits", "a claim that dies between two writes", "faults/test_crash_points"),
    Fake("Divided", "store/mongo/test_roles", "a user who has two roles", "store/test_conformance"),
    Fake("EmptiedMongo", "store/test_oracle", "a new database for each example", "store/test_conformance"),
    Fake(
        "Counting",
        "store/mongo/test_contention",
        "the dice of claimers",
        "store/mongo/test_contention: test_claimers_settle_down",
    ),
    Fake(
        "StageStore StageTransaction",
        "testing",
        "a user's database",
        "scenarios/test_transactions, scenarios/test_emitting",
    ),
    # --- time, permits and hints
    Fake("VirtualClock StillClock FakeClock", "engine, testing", "time", "test_clock, faults/test_clocks"),
    Fake("StillClock", "fleet/test_supervisor", "time", "cli/test_unresponsive"),
    Fake("Unlimited", "runtime/test_worker, testing/harness", "`Permit`", "fleet/test_runner, faults/test_zombies"),
    Fake(
        "Suspended", "fleet/test_services", "the permit of a process that stood still", "here: J4; faults/test_zombies"
    ),
    Fake("look_soon() Hub.trust", "schedules/test_service", "`Hub.on`, a channel of hints", "here: J1"),
    Fake(
        "Hub()",
        "schedules/test_service, runtime/test_worker",
        "hints between processes",
        "store/mongo/test_wakeups, store/sqlite/test_processes, here: J1",
    ),
    # --- the neighbours of a part
    Fake("Asked", "schedules/test_service", "`Canceller`, by the scheduler", "scenarios/test_overlaps"),
    Fake(
        "Scheduler-without-emit",
        "schedules/test_service",
        "`Events.emit`, for ticks among other conditions",
        "scenarios/test_triggers: test_a_tick_can_be_one_of_what_has_to_happen",
    ),
    Fake(
        "InlineExecutor",
        "support/fleet, runtime/test_worker",
        "threads, loops and processes",
        "scenarios/test_submit_to_result, scenarios/test_time_limits, scenarios/test_processes_and_threads",
    ),
    Fake(
        "duties-made-of-a-counter",
        "fleet/test_services",
        "`path_duties` and the features' duties",
        "here: J3; runtime/test_expiry, archive/test_retention, runtime/test_limits, scenarios/test_triggers",
    ),
    Fake(
        "DEAF OVER",
        "fleet/test_supervisor",
        "``holdfast worker``",
        "cli/test_supervisor: test_who_keeps_the_interpreter_is_not_dead_and_a_runner_obeys_the_roster; "
        "cli/test_worker_lives",
    ),
    Fake("Process", "fleet/test_supervisor_awaits", "a worker process", WORKERS),
    Fake(
        "Rig._deliver",
        "executors/test_processes",
        "the worker that outcomes are delivered to",
        "scenarios/test_cancelling, scenarios/test_time_limits, scenarios/test_retries",  # with executor="process"
    ),
    Fake("Slow", "executors/test_processes", "a child process", "scenarios/test_processes_and_threads"),
    Fake("Owner", "workflows/lives", "`Run`, the owner of a body", "workflows/test_owners, workflows/test_looking"),
    Fake("SlowLog", "workflows/test_attempts", "a store whose pages are slow", "workflows/test_runs, faults/test_runs"),
    Fake("PlainOwner", "workflows/lives", "`Run`, of a plain body", "workflows/test_runs, workflows/test_evictions"),
    Fake("Named", "workflows/test_random_bodies", "a task of a body", "workflows/test_loop"),
    # --- the command line
    Fake(
        "Starting",
        "cli/test_run",
        "`EmbeddedRunner.request_stop`",
        "cli/test_run: test_the_first_signal_lets_work_end, "
        "test_the_second_signal_ends_it_and_the_work_goes_back; cli/test_supervisor",
    ),
    Fake("_until_stopped", "cli/test_run", "a runner's whole life", "cli/test_run"),
    Fake(
        "wait_for_result",
        "cli/test_submit",
        "a runner that ends the call",
        "cli/test_run: test_submitted_work_is_done_by_another_process, cli/test_queues",
    ),
    Fake("time_of", "cli/roster, cli/test_schedules", "the store's clock", "cli/test_supervisor"),
    Fake(
        "_Terminal sys.stdin",
        "cli/test_archive, cli/test_schedules",
        "a person at a terminal",
        "none: a pipe and a terminal differ in `isatty` alone, which is what the fake answers",
    ),
)

TESTS = Path(__file__).parents[1]
FOLDERS = ("runtime", "fleet", "executors", "schedules", "triggers", "workflows", "store")
# Of our own code, but no part of the engine: what tests are made of, and what is raised or stored.
NO_PARTS = re.compile(r"holdfast\.(errors|testing\.(conformance|stateful))")


# They have methods of a part by chance.
NO_FAKES = {("store/mongo/test_roles", "Shared"), ("workflows/test_webhooks", "Counted")}  # real, and counted


class Found(NamedTuple):
    """A class of a test file: its bases by name, where each name was imported from, and what it defines."""

    file: str
    name: str
    bases: tuple[str, ...]
    origin: dict[str, str]
    methods: frozenset[str]


@cache
def classes() -> list[Found]:
    found = []
    for folder in (*FOLDERS, "support"):
        for path in sorted((TESTS / folder).rglob("*.py")):
            tree, origin = ast.parse(path.read_text()), dict[str, str]()
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    origin |= {(each.asname or each.name): node.module or "" for each in node.names}
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    bases = tuple(name for base in node.bases for name in [ast.unparse(base)])
                    defined = [
                        each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                    ]
                    file = str(path.relative_to(TESTS).with_suffix(""))
                    found.append(Found(file, node.name, bases, origin, frozenset(defined)))
    return found


@cache
def parts() -> list[tuple[str, frozenset[str]]]:
    """Return the public methods of each class of the package."""
    found = []
    for path in sorted((TESTS.parent / "src" / "holdfast").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                found.append((node.name, frozenset(name for name in defined if not name.startswith("_"))))
    return found


def is_part(found: Found, base: str) -> bool:
    """Return whether a base of a test's class is a part of the package, or itself stands in for one."""
    first = base.partition(".")[0]
    module = found.origin.get(first, "")
    if module.startswith("holdfast"):
        return not NO_PARTS.match(f"{module}.{base}")
    home = module.removeprefix("tests.").replace(".", "/") if module.startswith("tests") else found.file
    return any(stands_in(each) for each in classes() if (each.file, each.name) == (home, first) and each != found)


def stands_in(found: Found) -> bool:
    """Return whether a class stands in for a real part: it derives from one, forwards to one, or has its methods."""
    if (found.file, found.name) == ("support/fleet", "Line") or "__getattr__" in found.methods:
        return True
    if found.bases:
        return any(is_part(found, base) for base in found.bases)
    public = frozenset(name for name in found.methods if not name.startswith("_"))
    return len(public) > 1 and any(public <= methods for _, methods in parts())


def stand_ins() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of each class in the tests of the engine that stands in for a real part."""
    for found in classes():
        is_suite = found.name.startswith("Test") or (found.file, found.name) in NO_FAKES
        if found.file.startswith(FOLDERS) and not is_suite and stands_in(found):
            yield found.file, found.name


def test_every_class_that_stands_in_for_a_part_is_in_the_table() -> None:
    listed = {(file, name) for fake in FAKES for name in fake.names.split() for file in fake.file.split(", ")}
    found = set(stand_ins())
    assert {("runtime/test_meanwhile", "SlowStarts"), ("fleet/test_services", "OldRoster")} <= found
    assert sorted(found - listed) == []


def test_the_classes_of_the_table_are_there() -> None:
    there = {(found.file, found.name) for found in classes()}
    folders = tuple(f"{folder}/" for folder in FOLDERS)
    listed = {
        (fake.file, name)
        for fake in FAKES
        for name in fake.names.split()
        if fake.file.startswith(folders) and name[1:].isalpha() and not name.isupper()
    }
    assert sorted(listed - there - BY_HAND) == []


# Parts that stand in for other ones as they are.
BY_HAND = {("runtime/test_worker, testing/harness", "Unlimited")}


def test_the_tests_of_the_table_are_there() -> None:
    named = "\n".join(fake.real for fake in FAKES)
    files = {TESTS / f"{name}.py" for name in re.findall(r"(?:\w+/)+test_\w+", named)}
    assert len(files) > 20
    assert [str(file) for file in sorted(files) if not file.exists()] == []
    there, roots = "".join(file.read_text() for file in TESTS.rglob("test_*.py")), set(TESTS.glob("test_*.py"))
    tests = re.findall(r"(?<!/)\btest_\w+", named)
    assert [name for name in tests if f"def {name}" not in there and TESTS / f"{name}.py" not in roots] == []
    here = Path(__file__).read_text()
    assert [joint for joint in re.findall(r"J\d", named) if f"# --- {joint}:" not in here] == []
    assert all(fake.real for fake in FAKES)


# --- J1: the scheduler and the hints of other processes


@pytest.mark.parametrize("where", ["sqlite", pytest.param("mongodb", marks=[mongo, pytest.mark.faults])])
def test_a_schedule_that_another_process_makes_is_seen_by_its_hint(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler looks every five minutes by itself, so only the hint can tell it so soon."""
    defaults: Any = Scheduler.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "look_seconds", 300.0)
    looks, fire_due = list[bool](), Scheduler.fire_due

    async def noted(self: Scheduler) -> bool:
        answer = await fire_due(self)
        if self._app == "shop":  # there is one more, for core tasks
            looks.append(answer)
        return answer

    monkeypatch.setattr(Scheduler, "fire_due", noted)
    url = f"sqlite:///{tmp_path}/shop.db" if where == "sqlite" else request.getfixturevalue("mongo_url")
    with App(url, name="shop") as working, App(url, name="shop") as other:
        tasks = [app.task(name="tick")(lambda: None) for app in (working, other)]
        other.invocations()
        with working.runner():
            eventually(lambda: looks, "the services have looked once")
            other.schedules.create("often", tasks[1], every="1s")
            eventually(lambda: other.schedules.get("often").progress.fired, "a tick", 10.0)


# --- J2: work that is claimed ahead, and the store that makes it worth while


@mongo
def test_on_mongodb_work_is_claimed_ahead_and_started_later(mongo_url: str) -> None:
    with App(mongo_url, name="shop") as app:

        @app.task(name="quick")
        async def quick(number: int) -> int:
            await asyncio.sleep(0.03)  # shorter ones are marked as running ahead
            return number

        with app.runner(concurrency=4):
            group = quick.map(range(100))
            assert group.results(patient(60)) == list(range(100))
        records = app.invocations(task="quick", limit=1000)
        ahead = [record for record in records if record.history[1].operation != record.history[2].operation]
        assert ahead, "none was reserved first"
        for record in ahead:
            assert [line.status for line in record.history] == [
                Status.REGISTERED,
                Status.PENDING,
                Status.RUNNING,
                Status.SUCCESS,
            ]
            assert record.attempt == record.epoch == 1


# --- J3: the duties that an engine puts together, performed by a runner


def test_a_runner_performs_every_duty_of_its_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A duty that fails is logged and left for the next time, so whether one works is seen by what it has done."""

    async def scenario(fleet: Fleet) -> None:
        payload, now = StoredPayload(digest="d", size=1, pieces=1, first=Piece(b"x")), fleet.clock.now()
        await fleet.store.put_payloads(APP, [payload])
        fleet.store._payloads[APP, "d"] = (now - UNWANTED_SECONDS - 1, payload)
        member, performed = fleet.member(add), set[str]()

        def watched(duty: Duty) -> Duty:
            async def perform() -> bool | None:
                answer = await duty.perform()
                performed.add(duty.name)
                return bool(answer)

            return replace(duty, perform=perform)

        runner = member.runner
        own = path_duties(runner._engine, runner._definitions)
        monkeypatch.setattr("holdfast.fleet.runner.path_duties", lambda *known: [watched(duty) for duty in own])
        core, *features = runner._features
        duties = [duty for feature in features for duty in feature.duties()]
        names = [duty.name for duty in (*duties, *own)]
        runner._features = (core, More(*[watched(duty) for duty in duties]))
        await member.start()
        await asyncio.sleep(130)  # two cycles of the services
        calling = ["schedules", "declared schedules", "triggers", "declared triggers"]
        assert names == [
            *calling,
            "waits",
            "hooks",
            "groups",
            "retention",
            "streams",
            "stats",
            "expiry",
            "limits",
            "payloads",
        ]
        assert performed == set(names)
        assert await fleet.store.get_payload(APP, "d") is None

    virtually(scenario)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


# --- J4: the permit and the roster of a runner that stood still at the services


def test_a_runner_that_stood_still_at_the_services_begins_and_reaps_nothing() -> None:
    """It had read the roster when it froze; when it goes on, others have declared it dead and are at it."""

    async def scenario(fleet: Fleet) -> None:
        old = await fleet.started(add)
        await asyncio.sleep(70.0)  # it has performed the services
        services = Executions(fleet.store, APP, SERVICE, 0)
        line, frozen_at = old.line, list[float]()

        def freeze() -> None:
            if fleet.clock.now() % 60.0 < 1.0:  # at the beginning of its next window, not in the middle of this one
                line.before.clear()
                line.freeze()
                frozen_at.append(fleet.clock.now())

        line.before["roster"] = freeze
        id = old.id
        await fleet.until(lambda: _are(frozen_at), 130.0)
        new = await fleet.started(add)
        await fleet.gone(id)

        async def performs() -> bool:
            trail = await services.trail(10)
            return any(each.runner_id == new.id and each.status is ExecutionStatus.RUNNING for each in trail)

        await fleet.until(performs)
        before = await services.trail(100)
        line.swallowed["heartbeat"] = 100  # which would say that it is dead
        line.thaw()
        await asyncio.sleep(1.0)
        after = await services.trail(100)
        assert [each for each in after if each.runner_id == id and each.started_at > frozen_at[0]] == []
        assert next(each.status for each in after if each.runner_id == new.id) is ExecutionStatus.RUNNING
        assert len(after) == len(before)

    virtually(scenario)


async def _are(found: list[float]) -> bool:
    return bool(found)
