"""The sentence of health: one case for each thing that an operator may have to be told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.support.patience import eventually, patient

from holdfast import App
from holdfast.model.queues import QueuePause
from holdfast.model.records import RunnerRecord, WorkerRecord
from holdfast.runtime.queues import Queue
from holdfast.stats import Figures
from holdfast.testing.samples import invocation
from holdfast.web.reading.health import BAD, GOOD, NOTE, WARN, HealthFacts, LimitWait, judged, waits_of
from holdfast.web.reading.model import ReadModel
from holdfast.web.reading.queues import QueueReading
from holdfast.web.reading.runners import Roster

NOW = 1_800_000_000.0  # 08:00 UTC


def runner(id: str = "r", **facts: Any) -> RunnerRecord:
    given: dict[str, Any] = {"started_at": NOW - 30, "heartbeat_at": NOW - 1, "tasks": ("add",)} | facts
    return RunnerRecord(id=id, app="shop", host="h", pid=1, version="1", concurrency=4, **given)


def queue(name: str = "mail", **facts: Any) -> Queue:
    given: dict[str, Any] = dict.fromkeys(("waiting", "scheduled", "blocked", "running"), 0)
    return Queue(name=name, **given | {"oldest_seconds": None, "per_minute": 0.0, "runners": 1, "pause": None} | facts)


def pause(at: float, reason: str = "", by: str = "ann") -> QueuePause:
    return QueuePause(app="shop", name="mail", at=at, by=by, reason=reason, operation="o")


def facts(*runners: RunnerRecord, **more: Any) -> HealthFacts:
    return HealthFacts(NOW, Roster(runners, NOW, 15.0), **more)


SILENT = runner("s", heartbeat_at=NOW - 180)
HUNG = WorkerRecord(id="w", pid=1, started_at=NOW - 100, unresponsive_since=NOW - 20)
CASES: list[tuple[HealthFacts, str, str]] = [
    (facts(is_empty=True), NOTE, "Nothing is here yet: no runner, and no call."),
    (facts(runner(), is_empty=True), GOOD, "All well."),
    (facts(), WARN, "No runner is alive."),
    (facts(queues=[queue(waiting=12)]), BAD, "No runner is alive, and 12 calls wait."),
    (facts(queues=[queue(waiting=1)]), BAD, "No runner is alive, and 1 call waits."),
    (facts(SILENT), BAD, "No runner is alive, 1 runner silent for 3m."),
    (facts(runner(), SILENT, runner("t", heartbeat_at=NOW - 60)), BAD, "2 runners silent for 3m."),
    (facts(runner(), runner("d", draining=True)), GOOD, "All well: 1 runner draining."),
    (facts(runner(draining=True)), WARN, "All runners are draining."),
    (
        facts(runner(draining=True), queues=[queue(waiting=2)]),
        BAD,
        "All runners are draining, and 2 calls wait.",
    ),
    (
        facts(runner(draining=True), queues=[queue(blocked=2)]),
        BAD,
        "All runners are draining, and 2 calls wait.",
    ),
    (facts(runner(workers=(HUNG,))), BAD, "1 worker does not answer."),
    (facts(runner(workers=(HUNG, HUNG))), BAD, "2 workers do not answer."),
    (facts(runner(started_at=NOW - 181)), BAD, "No runner has performed the services for 3m1s."),
    (facts(runner(started_at=NOW - 999), services_at=NOW - 100), GOOD, "All well."),
    (facts(runner(started_at=NOW - 999), services_at=NOW - 300), BAD, "No runner has performed the services for 5m."),
    (facts(runner(), queues=[queue(pause=pause(NOW - 7200))]), WARN, "Queue mail is paused by ann since 06:00 UTC."),
    (
        facts(runner(), queues=[queue(pause=pause(NOW - 86_400, "bank is down"))]),
        WARN,
        "Queue mail is paused by ann since 14 Jan 08:00 UTC (bank is down).",
    ),
    (
        facts(runner(), queues=[queue(waiting=3, runners=0)]),
        BAD,
        "3 calls wait in mail, which no runner serves.",
    ),
    (facts(runner(), queues=[queue(waiting=3, oldest_seconds=119.0)]), GOOD, "All well."),
    (facts(runner(), queues=[queue("~world", waiting=2, runners=0, oldest_seconds=5.0)]), GOOD, "All well."),
    (
        facts(runner(), queues=[queue("~world", waiting=2, runners=0, oldest_seconds=840.0)]),
        BAD,
        "2 World runs wait to be delivered, for up to 14m.",
    ),
    (
        facts(runner(), queues=[queue(waiting=3, oldest_seconds=840.0)]),
        WARN,
        "The oldest of 3 calls in mail has waited for 14m.",
    ),
    (
        facts(runner(), queues=[queue(waiting=1001, oldest_seconds=840.0)]),
        WARN,
        "The oldest of over 1,000 calls in mail has waited for 14m.",
    ),
    (
        facts(runner(), blocked=[LimitWait("customer=c-17", "bill", 14)]),
        GOOD,
        "All well: 14 calls wait for limit customer=c-17.",
    ),
    (
        facts(runner(), blocked=[LimitWait(f"k{n}", "bill", 1) for n in range(5)]),
        GOOD,
        "All well: 1 call waits for limit k0, 1 call waits for limit k1, 1 call waits for limit k2, "
        "2 calls wait for other limits.",
    ),
    (facts(runner(), parked=1), WARN, "1 call is parked."),
    (facts(runner(), damaged=2), WARN, "2 damaged records were set aside."),
    (
        facts(runner(), hour=Figures(seconds=3600.0, succeeded=95, failed=5)),
        GOOD,
        "All well: 5 of 100 calls failed in the last hour.",
    ),
    (
        facts(runner(), hour=Figures(seconds=3600.0, succeeded=80, failed=20)),
        WARN,
        "20 of 100 calls failed in the last hour.",
    ),
    (
        facts(runner(), hour=Figures(seconds=3600.0, succeeded=1, failed=20)),
        BAD,
        "20 of 21 calls failed in the last hour.",
    ),
    (
        facts(
            runner(),
            SILENT,
            runner("t", heartbeat_at=NOW - 60),
            blocked=[LimitWait("customer=c-17", "bill", 14)],
            queues=[queue(pause=pause(NOW - 600, by="an operator"))],
        ),
        BAD,
        "2 runners silent for 3m, queue mail is paused by an operator since 07:50 UTC, "
        "14 calls wait for limit customer=c-17.",
    ),
]


@pytest.mark.parametrize(("given", "level", "sentence"), CASES, ids=[sentence for _, _, sentence in CASES])
def test_each_case_has_its_sentence(given: HealthFacts, level: str, sentence: str) -> None:
    found = judged(given)
    assert (found.level, found.sentence) == (level, sentence)
    assert all(sign.page.startswith("/") for sign in found.signs)


def test_the_worst_comes_first() -> None:
    found = judged(facts(runner(), SILENT, parked=1, damaged=1, blocked=[LimitWait("k", "bill", 1)]))
    assert [sign.level for sign in found.signs] == [BAD, WARN, WARN, NOTE]


def test_names_are_cut() -> None:
    found = judged(facts(runner(), queues=[queue("q" * 200, waiting=1, oldest_seconds=999.0)]))
    assert len(found.sentence) < 150


def test_waiting_calls_are_grouped_and_named_by_what_they_share() -> None:
    ours = [
        invocation(f"a{n}", limit_key="bill|0123456789", attributes=(("customer", "c-17"), ("n", f"{n}")))
        for n in range(3)
    ]
    plain = [invocation("b", limit_key="mail|0123456789"), invocation("c", limit_key="tidy")]
    assert [(each.label, each.calls) for each in waits_of([*plain, *ours])] == [
        ("customer=c-17", 3),
        ("mail|01234567", 1),
        ("tidy", 1),
    ]


def test_the_facts_of_a_store() -> None:
    with App("memory://", name="shop") as app:

        @app.task(name="add")
        def add(a: int) -> int:
            return a

        reading = ReadModel(app.runtime)
        assert app.runtime.run(reading.health.health()).level == NOTE
        add.submit(1)
        found = app.runtime.run(reading.health.health())
        assert (found.level, found.sentence) == (BAD, "No runner is alive, and 1 call waits.")
        app.queues.pause("default", by="ann")
        assert "default is paused by ann" in app.runtime.run(reading.health.health()).document()["sentence"]


def test_a_limit_is_named_by_the_arguments_that_it_goes_by() -> None:
    with App("memory://", name="shop", poll_interval_seconds=0.2) as app:
        may_end = threading.Event()

        @app.task(name="bill", limit=1, limit_by=("customer", "token"))
        def bill(token: str, customer: str) -> None:
            may_end.wait(patient(30))

        @app.task(name="mail", rate="1/h", rate_by="customer")
        def mail(customer: str) -> None:
            pass

        waiting = [bill.submit("t-1", "c-17") for _ in range(3)]
        sent = mail.submit("c-18")
        reading = ReadModel(app.runtime)

        def blocked() -> list[Any]:
            facts, _ = app.runtime.run(reading.health.facts())
            return [(each.label, each.calls) for each in facts.blocked]

        with app.runner(concurrency=4):
            try:
                sent.result(timeout=patient(30))
                eventually(lambda: blocked() == [("customer=c-17, token=***", 2)], lambda: str(blocked()))
                (key,) = asyncio.run(QueueReading(app.runtime).limit("bill")).keys
                assert key.document()["label"] == "customer=c-17, token=***"
                assert [each.label for each in app.limits.allowances("mail")] == ["customer=c-18"]
            finally:
                may_end.set()
            for each in waiting:
                each.result(timeout=patient(30))
