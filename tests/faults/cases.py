"""Every crash point in every role in which a process can come to it, and what leads it there.

A story begins with what has to be there, lets one process die at its point, brings a healthy runner if nobody is left
who could heal, and ends with the verdict.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pymongo import MongoClient
from pymongo.errors import CollectionInvalid, OperationFailure
from tests.faults import tasks
from tests.faults.session import PATIENCE_SECONDS, Process, Session
from tests.faults.stores import STORES
from tests.faults.streams import Followers
from tests.faults.worlds import serving as serving_worlds
from tests.stats.files import TASK as COUNTED
from tests.stats.files import Files
from tests.support.windows import excess
from tests.support.witness import What

from holdfast.crashpoints import POINTS
from holdfast.model.status import Status
from holdfast.webhooks import WebhookRequest
from holdfast.workflows.hooks_records import ANSWER, HOOK, WEBHOOK, read_answer

Story = Callable[[Session, str], None]

SUBMITTER, RUNNER, WORKER, SERVICE, SERVER = "submitter", "runner", "worker", "service", "server"
_ROLES = {SUBMITTER: "client", RUNNER: "runner", WORKER: "worker", SERVICE: "runner"}  # as processes call themselves


_CRONS = ("HOLDFAST_RECOVER_RUNNING_INVOCATIONS_CRON", "HOLDFAST_RECOVER_PENDING_INVOCATIONS_CRON")  # of core tasks


class Case(NamedTuple):
    point: str
    role: str
    store: str

    def __str__(self) -> str:
        return f"{self.point}-{self.role}-{self.store}"

    def play(self, folder: Path, url: str) -> None:
        session = Session(folder, url)
        try:
            STORIES[self.point][self.role](session, self.point)
        finally:
            session.end()


def _armed(role: str, point: str) -> dict[str, str]:
    return {"HOLDFAST_CRASH_AT": point, "HOLDFAST_TEST_ROLE": _ROLES[role]}


def _dies(session: Session, process: Process) -> None:
    """Its time counts from its first line: on a busy machine, an interpreter takes long to start."""
    session.until(lambda: process.code is not None or process.has_begun, "the victim begins", 3 * PATIENCE_SECONDS)
    session.until(lambda: process.code is not None, "the victim dies")
    assert process.code == -signal.SIGKILL, f"it ended with {process.code}\n{session.told()}"


def _heal(session: Session) -> None:
    session.start_healthy()
    session.submit("after")
    session.verdict()


# --- submitters


def submitting(session: Session, point: str) -> None:
    """It dies with the first of two calls, and nobody knows whether that one was stored."""
    victim = session.start("tests.faults.shop", "first", "second", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    _heal(session)
    found = {event.token for event in session.events(What.EXEC_START)}
    assert found == {"after", "first"} if point == "submit.after" else {"after"}


def trying_here(session: Session, point: str) -> None:
    """It dies after a first attempt of its own: nothing is stored. The next one stores it, and a worker goes on."""
    victim = session.start("tests.faults.shop", tasks.FALTERING, "first", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    assert session.app.invocations(task=tasks.FALTERING) == []
    again = session.start("tests.faults.shop", tasks.FALTERING, "first")
    session.until(lambda: again.code is not None, "the second one ends")
    _heal(session)
    (record,) = session.app.invocations(task=tasks.FALTERING)
    assert (record.status, record.attempt) == (Status.SUCCESS, 2)


# --- workers: their runner lives, and heals


def working(session: Session, point: str) -> None:
    session.submit("one", "two", padding=tasks.PADDING if point == "result.kept" else "")
    runner = session.start_runner("--workers", "1", "--concurrency", "1", **_armed(WORKER, point))
    session.struck(point)
    session.verdict()
    assert runner.says("died: SIGKILL")


def waiting(session: Session, point: str) -> None:
    """It dies beside a write of a parent that waits: the parent runs again, and its child once."""
    session.submit("one", task="parent")
    session.submit("two", task="async_parent")
    session.start_runner("--workers", "1", "--concurrency", "1", **_armed(WORKER, point))
    session.struck(point)
    session.verdict()
    _families_agree(session)


def waiting_alone(session: Session, point: str) -> None:
    """As above, with its runner, and another one goes on."""
    session.submit("one", task="parent")
    session.submit("two", task="async_parent")
    _dies(session, session.start_runner("--workers", "0", "--concurrency", "1", **_armed(RUNNER, point)))
    session.struck(point)
    session.start_healthy()
    session.verdict()
    _families_agree(session)


def _families_agree(session: Session) -> None:
    ended = {record.task: record for record in session.app.invocations(limit=20)}
    assert ended["parent"].status == ended["async_parent"].status == "success"
    ran = Counter(event.token for event in session.events(What.EXEC_START))
    assert {"one child", "two child 0", "two child 1"} <= set(ran)


def noting(session: Session, point: str) -> None:
    """It dies beside a write of notes: the next attempt has what was written, and no other invocation has."""
    session.submit("one", "two", task="tell")
    session.start_runner("--workers", "1", "--concurrency", "1", **_armed(WORKER, point))
    session.struck(point)
    session.verdict()
    _notes_agree(session, point)


def noting_alone(session: Session, point: str) -> None:
    """As above, with its runner, and another one goes on."""
    session.submit("one", "two", task="tell")
    _dies(session, session.start_runner("--workers", "0", "--concurrency", "1", **_armed(RUNNER, point)))
    session.struck(point)
    session.start_healthy()
    session.verdict()
    _notes_agree(session, point)


def _notes_agree(session: Session, point: str) -> None:
    told = (session.ledgers_folder / "steps.txt").read_text().splitlines()
    records = session.app.invocations(task="tell")
    for record in records:
        token = str(record.attributes["token"])
        assert record.attributes["attempt"] == str(record.attempt)
        assert record.notes is not None
        assert str(record.notes.progress).startswith(f"{record.attempt} of 3")
        assert f"{token} 1 found None" in told
    (crashed,) = [record for record in records if record.attempt == 2]
    left = "1" if point == "note.after" else "None"
    assert f"{crashed.attributes['token']} 2 found {left}" in told


def handing_back(session: Session, point: str) -> None:
    """It dies while its runner ends: that takes back what there is, and somebody else does the work."""
    session.submit("thread", task="hold")
    session.submit("loop", task="await_release")
    runner = session.start_runner("--workers", "1", "--drain-timeout", "100ms", **_armed(WORKER, point))
    session.began("thread", "loop")
    with session.witness.fault("stop", pid=runner.pid):
        session.stop(runner)
    session.struck(point)
    _heal(session)


def limiting(session: Session, point: str) -> None:
    """It has ended a limited call, and dies before it tells those who wait for the slot: its runner's sweep does."""
    session.submit("one", "two", "three", task="limited", seconds=0.1)
    session.start_runner("--workers", "1", "--concurrency", "4", **_armed(WORKER, point))
    session.struck(point)
    session.verdict()


def pacing(session: Session, point: str) -> None:
    """It has taken starts of a rate, and dies: in the middle of its claim, or before the next waiters go on."""
    session.submit("one", "two", "three", "four", "five", task="paced")
    session.start_runner("--workers", "1", "--concurrency", "4", **_armed(WORKER, point))
    session.struck(point)
    session.verdict()
    moments = [event.at for event in session.events(What.EXEC_START)]
    # A start follows its claim, and on a busy machine by up to a quarter second. A start too many is a whole one.
    assert excess(moments, tasks.PACE, tasks.PACED_BURST) <= 0.5, f"{moments}"


# --- runners


def leaving_slots(session: Session, point: str) -> None:
    """As above, and nobody is left who could sweep."""
    session.submit("one", "two", "three", task="limited", seconds=0.1)
    victim = session.start_runner("--workers", "0", "--concurrency", "4", **_armed(RUNNER, point))
    session.struck(point)
    _dies(session, victim)
    _heal(session)


def coming(session: Session, point: str) -> None:
    session.submit("before")
    _dies(session, session.start_runner("--workers", "0", **_armed(RUNNER, point)))
    session.struck(point)
    _heal(session)


def leaving(session: Session, point: str) -> None:
    session.submit("before")
    victim = session.start_runner("--workers", "0", **_armed(RUNNER, point))
    session.began("before")
    victim.signal(signal.SIGTERM)
    session.struck(point)
    _dies(session, victim)
    _heal(session)


def supervising(session: Session, point: str) -> None:
    session.submit("one", seconds=0.3)
    session.submit("first", "second", task="limited", seconds=0.2)
    victim = session.start_runner("--workers", "1", **_armed(RUNNER, point))
    session.struck(point)
    _dies(session, victim)
    session.until(lambda: not victim.family, "its worker ends with it")
    _heal(session)


def taking_back(session: Session, point: str) -> None:
    """A worker dies, and then its runner, which was about to see to what that one held."""
    session.submit("one", task="hold")
    victim = session.start_runner("--workers", "1", **_armed(RUNNER, point))
    session.began("one")
    worker = session.events(What.EXEC_START)[0].pid
    with session.witness.fault("kill", pid=worker):
        os.kill(worker, signal.SIGKILL)
    session.struck(point)
    _dies(session, victim)
    _heal(session)


def burying(session: Session, point: str) -> None:
    """Two deaths: the second one is that of whoever sees to the first one."""
    session.leave_a_corpse("one", "two")
    _dies(session, session.start_runner("--workers", "0", **_armed(RUNNER, point)))
    session.struck(point)
    _heal(session)


# --- services: what the fleet needs, done by one of the runners


def serving(session: Session, point: str) -> None:
    session.submit("before")
    _dies(session, session.start_runner("--workers", "0", **_armed(SERVICE, point)))
    session.struck(point)
    _heal(session)


def folding(session: Session, point: str) -> None:
    """It has folded the counters of two workers, and dies before it removes theirs: they count once."""
    files = Files(session.app)
    files.put(3600.0, "one", ended=2)
    files.put(3600.0, "two", ended=3)
    _dies(session, session.start_runner("--workers", "0", **_armed(SERVICE, point)))
    session.struck(point)
    assert files.counts()[:2] == [2, 1]
    assert files.stats(2).tasks[COUNTED].succeeded == 5
    session.start_healthy()
    session.until(lambda: files.counts()[:2] == [0, 1], "the next one removes them")
    session.submit("after")
    session.verdict()
    assert files.stats(2).tasks[COUNTED].succeeded == 5


def running_core_tasks(session: Session, point: str) -> None:
    """Runners submit, claim, run and settle too: their core tasks."""
    session.leave_a_corpse("one", "two")
    _dies(session, session.start_runner("--workers", "1", **_armed(SERVICE, point)))
    session.struck(point)
    _heal(session)


def sweeping(session: Session, point: str) -> None:
    """Two deaths: one who gave back a slot without a word, and the one who noticed.

    Core tasks have limits too: the first one performs none, since it would die at the end of such a task, and the call
    would not have ended. The second one takes no work: it could be faster than its sweep.
    """
    session.submit("one", "two", "three", task="limited", seconds=0.1)
    armed = _armed(RUNNER, "slot.freed") | dict.fromkeys(_CRONS, "0 0 1 1 *")
    _dies(session, session.start_runner("--workers", "0", "--concurrency", "4", **armed))
    session.strike_another()
    armed = _armed(SERVICE, point)
    _dies(session, session.start_runner("--workers", "0", "--queues", "nothing", **armed))
    session.struck(point)
    _heal(session)


# --- triggers


def telling(session: Session, point: str) -> None:
    """It has written the end of a call that two triggers wait for, one of them for an event as well, and dies."""
    role, workers = (WORKER, "1") if point == "outbox.delivered" else (RUNNER, "0")
    session.variables[tasks.TRIGGERS] = "1"
    victim = session.start_runner("--workers", workers, "--concurrency", "2", **_armed(role, point))
    session.until(session.has_triggers, "the runner has told which triggers there are")
    session.emit("one")
    session.submit("one", task="order")
    session.struck(point)
    if role is RUNNER:
        _dies(session, victim)
    _heal(session)
    _called_once(session)


def emitting(session: Session, point: str) -> None:
    """It dies while it emits an event: nobody has acknowledged it, and since it is stored, it counts."""
    session.variables[tasks.TRIGGERS] = "1"
    session.start_healthy()
    session.submit("one", task="order")
    session.ended("one")
    victim = session.start("tests.faults.shop", tasks.PACKED, "one", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    session.verdict()
    _called_once(session)


def keeping(session: Session, point: str) -> None:
    """It dies while it emits an event: nothing of it is there, and it is emitted again."""
    session.variables[tasks.TRIGGERS] = "1"
    session.start_healthy()
    session.submit("one", task="order")
    session.ended("one")
    victim = session.start("tests.faults.shop", tasks.PACKED, "one", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    assert not any(record.origin and record.origin.sources[0].kind == "event" for record in session.records())
    _goes_well(session, session.start("tests.faults.shop", tasks.PACKED, "one"))
    session.verdict()
    _called_once(session)


def scheduling(session: Session, point: str) -> None:
    """It dies while it creates a schedule: none is there, and it is created again, with its large arguments."""
    victim = session.start("tests.faults.shop", "schedule", "one", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    _goes_well(session, session.start("tests.faults.shop", "schedule", "one"))
    _heal(session)


def _goes_well(session: Session, process: Process) -> None:
    session.until(lambda: process.code is not None, "it ends", 3 * PATIENCE_SECONDS)
    assert process.code == 0, session.told()


def _called_once(session: Session) -> None:
    called = Counter(record.task for record in session.records() if record.origin is not None)
    assert called == dict.fromkeys(tasks.CALLED, 1), called
    assert all(record.status is Status.SUCCESS for record in session.records())


# --- chains and groups


def following(session: Session, point: str) -> None:
    """Its worker dies where an end calls what follows it: the rest is called, and once."""
    tasks.submit_chains(session.app)
    tasks.submit_group(session.app)
    session.start_runner("--workers", "1", "--concurrency", "2", **_armed(WORKER, point))
    session.struck(point)
    session.until(lambda: _have_followed(session), "all that follows is called")
    session.verdict()
    assert Counter(record.task for record in session.records()) == {"work": 4, "after": 4, "fail": 1}


def following_alone(session: Session, point: str) -> None:
    """As above, with its runner, and another one goes on."""
    tasks.submit_chains(session.app)
    tasks.submit_group(session.app)
    _dies(session, session.start_runner("--workers", "0", "--concurrency", "2", **_armed(RUNNER, point)))
    session.struck(point)
    session.start_healthy()
    session.until(lambda: _have_followed(session), "all that follows is called")
    session.verdict()


def _have_followed(session: Session) -> bool:
    return _started(session) >= set(tasks.FOLLOWING)


def grouping(session: Session, point: str) -> None:
    """Who submits a group dies before its members are stored: nothing is called back. After that: the group goes on."""
    victim = session.start("tests.faults.shop", "group", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    wanted = {"three done", *(f"three {number}" for number in range(3))} if point == "group.members" else set()
    if wanted:
        session.start_healthy()
        session.until(lambda: _started(session) >= wanted, "the group goes on")
        session.verdict()
    else:
        _heal(session)
    assert _started(session) - {"after"} == wanted


def _started(session: Session) -> set[str]:
    return {event.token for event in session.events(What.EXEC_START)}


# --- workflows


def travelling(session: Session, point: str) -> None:
    """Its owner dies beside a write of a run that has steps, a sleep and a child."""
    session.submit("one", task="trip")
    session.start_runner("--workers", "1", "--concurrency", "4", **_armed(WORKER, point))
    session.struck(point)
    session.verdict()
    _each_step_ran(session, most=2)


def taking_over(session: Session, point: str) -> None:
    """Two deaths: that of the owner of a run, and that of its successor."""
    session.submit("one", task="trip")
    _dies(session, session.start_runner("--workers", "0", "--concurrency", "4", **_armed(RUNNER, "append.after")))
    session.strike_another()
    _dies(session, session.start_runner("--workers", "0", "--concurrency", "4", **_armed(RUNNER, point)))
    session.struck(point)
    _heal(session)
    _each_step_ran(session, most=1)


def keeping_vigil(session: Session, point: str) -> None:
    """Its owner dies beside a write of a run that makes hooks, disposes of one, answers a request, and ends."""
    session.variables["HOLDFAST_PUBLIC_URL"] = "https://shop.example"
    (run,) = session.submit("one", task="vigil")
    session.start_runner("--workers", "1", "--concurrency", "4", **_armed(WORKER, point))
    session.resume("one first", "yes")
    session.resume("one second", WebhookRequest(method="POST", headers={}))
    session.struck(point)
    session.verdict()
    _was_told_once(session, run)


def resuming(session: Session, point: str) -> None:
    """Who resumes a hook dies, and sends its payload again."""
    (run,) = session.submit("one", task="vigil")
    session.start_healthy()
    session.until(lambda: session.app.hooks(run=run), "the hook is there")
    victim = session.start("tests.faults.shop", "resume", "one first", "yes", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    session.resume("one first", "yes", name="yes", taken_by=run)
    session.resume("one second", WebhookRequest(method="POST", headers={}))
    session.verdict()
    _was_told_once(session, run)


def _was_told_once(session: Session, run: str) -> None:
    events = session.event_types(run)
    assert [events.count(f"hook_{kind}") for kind in ("created", "received", "disposed")] == [2, 2, 1]
    assert [session.ask(lambda store: store.entries(session.name, kind)) for kind in (HOOK, WEBHOOK)] == [[], []]  # noqa: B023
    (answer,) = session.ask(lambda store: store.entries(session.name, ANSWER))
    assert read_answer(answer).body == b"yes"


def _each_step_ran(session: Session, *, most: int) -> None:
    ran = Counter((session.ledgers_folder / "steps.txt").read_text().splitlines())
    assert set(ran) == {"one first", "one errand"}
    assert max(ran.values()) <= most, ran


def trading(session: Session, point: str) -> None:
    """Its owner dies beside the commit of a plain step."""
    _prepare_effects(session)
    session.submit("one", task="trade")
    session.start_runner("--workers", "1", "--concurrency", "4", **_armed(WORKER, point))
    session.struck(point)
    session.verdict()
    _happened_once(session, "one bought", again=point != "transaction.committed")


def trading_alone(session: Session, point: str) -> None:
    """Its owner dies beside the commit of a coroutine step, and another runner goes on."""
    _prepare_effects(session)
    session.submit("one", task="trade", is_async=True)
    _dies(session, session.start_runner("--workers", "0", "--concurrency", "4", **_armed(RUNNER, point)))
    session.struck(point)
    _heal(session)
    _happened_once(session, "one sold", again=point != "transaction.committed")


def _prepare_effects(session: Session) -> None:
    session.app.prepare()
    if session.url.startswith("sqlite"):
        connection = sqlite3.connect(session.url.removeprefix("sqlite:///"))
        connection.execute(f"CREATE TABLE {tasks.EFFECTS} (app TEXT, name TEXT)")
        connection.close()
    else:
        with MongoClient[dict[str, str]](session.url) as client:
            with suppress(CollectionInvalid, OperationFailure):  # another story has made it
                client.get_default_database().create_collection(tasks.EFFECTS)


def _effects(session: Session) -> list[str]:
    if session.url.startswith("sqlite"):
        connection = sqlite3.connect(session.url.removeprefix("sqlite:///"))
        found = [name for (name,) in connection.execute(f"SELECT name FROM {tasks.EFFECTS} ORDER BY name")]
        connection.close()
        return found
    with MongoClient[dict[str, str]](session.url) as client:
        effects = client.get_default_database()[tasks.EFFECTS]
        return sorted(effect["name"] for effect in effects.find({"app": session.name}))


def _happened_once(session: Session, struck: str, *, again: bool) -> None:
    """The effects happened once; the code of the step that was struck ran again only if it was not committed."""
    assert _effects(session) == ["one bought", "one sold"]
    ran = Counter((session.ledgers_folder / "steps.txt").read_text().splitlines())
    assert ran == {"one bought": 1, "one sold": 1} | {struck: 2 if again else 1}


# --- streams


def streaming(session: Session, point: str) -> None:
    """Its worker dies beside a write of a stream, while readers follow."""
    with Followers(session) as followers:
        followers.submit()
        session.start_runner("--workers", "1", "--concurrency", "1", **_armed(WORKER, point))
        session.struck(point)
        session.ended("chant", "novel")
    session.verdict()


def streaming_alone(session: Session, point: str) -> None:
    """Its runner dies beside a write of a stream, and another one goes on."""
    with Followers(session) as followers:
        followers.submit()
        _dies(session, session.start_runner("--workers", "0", "--concurrency", "4", **_armed(RUNNER, point)))
        session.struck(point)
        session.start_healthy()
        session.ended("chant", "novel")
    session.verdict()


def pausing(session: Session, point: str) -> None:
    """A person's command dies when its record is stored: the queue is not paused."""
    session.submit("before")  # which makes the store
    victim = session.start("tests.faults.shop", "pause", "default", **_armed(SUBMITTER, point))
    session.struck(point)
    _dies(session, victim)
    _heal(session)


STORIES: dict[str, dict[str, Story]] = {
    "submit.before": {SUBMITTER: submitting, SERVICE: running_core_tasks},
    "submit.kept": {SUBMITTER: submitting, SERVICE: running_core_tasks},
    "submit.after": {SUBMITTER: submitting, SERVICE: running_core_tasks},
    "here.failed": {SUBMITTER: trying_here},
    "claim.before": {WORKER: working, SERVICE: running_core_tasks},
    "claim.after": {SERVICE: running_core_tasks, WORKER: working},
    "user.before": {WORKER: working, SERVICE: running_core_tasks},
    "user.after": {WORKER: working, SERVICE: running_core_tasks},
    "result.kept": {WORKER: working},
    "settle.before": {WORKER: working, SERVICE: running_core_tasks},
    "settle.after": {SERVICE: running_core_tasks, WORKER: working},
    "slot.freed": {WORKER: limiting, RUNNER: leaving_slots},
    "sweep.found": {SERVICE: sweeping},
    "rate.taken": {WORKER: pacing},
    "rate.claimed": {WORKER: pacing},
    "handback.before": {WORKER: handing_back},
    "handback.after": {WORKER: handing_back},
    "takeback.before": {RUNNER: taking_back},
    "takeback.after": {RUNNER: taking_back},
    "recovery.found": {SERVICE: burying},
    "recovery.written": {SERVICE: burying, RUNNER: taking_back},
    "death.before": {RUNNER: burying},
    "death.declared": {RUNNER: burying},
    "death.buried": {RUNNER: burying},
    "death.fired": {RUNNER: burying},
    "core.before": {RUNNER: burying},
    "core.after": {RUNNER: burying},
    "schedule.decided": {SERVICE: serving},
    "schedule.inserted": {SERVICE: serving},
    "schedule.moved": {SERVICE: serving},
    "outbox.written": {RUNNER: telling},
    "outbox.delivered": {WORKER: telling},
    "event.kept": {SUBMITTER: keeping},
    "schedule.kept": {SUBMITTER: scheduling},
    "event.stored": {SUBMITTER: emitting},
    "event.told": {SUBMITTER: emitting},
    "trigger.fired": {SUBMITTER: emitting, RUNNER: telling},
    "trigger.joined": {RUNNER: telling, SUBMITTER: emitting},
    "follow.made": {WORKER: following, RUNNER: following_alone},
    "group.stored": {SUBMITTER: grouping},
    "group.members": {SUBMITTER: grouping},
    "group.ended": {RUNNER: following_alone, WORKER: following},
    "group.called": {WORKER: following, RUNNER: following_alone},
    "service.recorded": {SERVICE: serving},
    "service.performed": {SERVICE: serving},
    "service.ended": {SERVICE: serving},
    "roster.before": {RUNNER: coming},
    "roster.joined": {RUNNER: coming},
    "roster.leaving": {RUNNER: leaving},
    "roster.left": {RUNNER: leaving},
    "worker.spawned": {RUNNER: supervising},
    "worker.granted": {RUNNER: supervising},
    "worker.permitted": {WORKER: working},
    "takeover.before": {RUNNER: taking_over},
    "takeover.after": {RUNNER: taking_over},
    "append.before": {WORKER: travelling},
    "append.after": {WORKER: travelling},
    "transaction.ran": {WORKER: trading, RUNNER: trading_alone},
    "transaction.appended": {RUNNER: trading_alone, WORKER: trading},
    "transaction.committed": {WORKER: trading, RUNNER: trading_alone},
    "stream.marked": {WORKER: streaming, RUNNER: streaming_alone},
    "stream.listed": {RUNNER: streaming_alone, WORKER: streaming},
    "chunk.kept": {WORKER: streaming, RUNNER: streaming_alone},
    "chunk.before": {RUNNER: streaming_alone, WORKER: streaming},
    "chunk.after": {WORKER: streaming, RUNNER: streaming_alone},
    "pause.before": {WORKER: waiting, RUNNER: waiting_alone},
    "pause.after": {RUNNER: waiting_alone, WORKER: waiting},
    "resume.before": {WORKER: waiting, RUNNER: waiting_alone},
    "resume.after": {RUNNER: waiting_alone, WORKER: waiting},
    "suspend.before": {WORKER: travelling},
    "suspend.after": {WORKER: travelling},
    "push.before": {WORKER: travelling, SUBMITTER: resuming},
    "push.after": {SUBMITTER: resuming, WORKER: travelling},
    "child.inserted": {WORKER: travelling},
    "child.created": {WORKER: travelling},
    "child.told": {WORKER: travelling},
    "stats.folded": {SERVICE: folding},
    "audit.begun": {SUBMITTER: pausing},
    **{point: {WORKER: keeping_vigil} for point in POINTS if point.startswith("hook.")},
    **{point: {SERVER: serving_worlds} for point in POINTS if point.startswith("world.")},
    "note.before": {WORKER: noting, RUNNER: noting_alone},
    "note.after": {RUNNER: noting_alone, WORKER: noting},
}
assert STORIES.keys() == POINTS.keys()

MATRIX = [Case(point, role, store) for point, roles in STORIES.items() for role in roles for store in STORES]


def each_once() -> list[Case]:
    """Every second point once, in the first of its roles; each role meets the stores in turn."""
    met: dict[str, int] = {}
    chosen = []
    for point, roles in STORIES.items():
        role = next(iter(roles))
        met[role] = met.get(role, -1) + 1
        chosen.append(Case(point, role, STORES[met[role] % len(STORES)]))
    return chosen[::2]


ONCE = each_once()
