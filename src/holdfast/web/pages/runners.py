"""The runners: which are there, what each runs, and which one has the services."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from holdfast.fleet.slots import ExecutionStatus
from holdfast.model.records import RunnerRecord
from holdfast.web.pages.charts import Drawn, Slot, cycle
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.reading.runners import ALIVE, DEAD, DRAINING, MOST_RUNNING, Roster, running_of
from holdfast.web.reading.services import ServiceView
from holdfast.web.routes.runners import found_runner
from holdfast.web.routing import Asked

_SHOWN = 100
_NAMED = 5  # calls of each runner in the list
TONES: dict[str, str] = {ALIVE: "good", DRAINING: "warn", DEAD: "bad", "run": "busy", "silent": "bad"} | {
    str(ExecutionStatus.RUNNING): "busy",
    str(ExecutionStatus.COMPLETED): "good",
    str(ExecutionStatus.ABANDONED): "warn",
}


async def list_page(asked: Asked) -> Callable[[], Context]:
    reading = asked.reading.runners
    roster = await asked.runtime.arun(reading.roster())
    owned = await asked.runtime.arun(reading.owned())
    services = await asked.runtime.arun(reading.services(8))
    gone = sorted(id for id in owned if id not in {each.id for each in roster.runners})
    return lambda: {
        "roster": roster,
        "runners": worst_first(roster)[:_SHOWN],
        "more": max(0, len(roster.runners) - _SHOWN),
        "states": Counter(roster.state_of(each) for each in roster.runners),
        "versions": Counter(each.version for each in roster.runners).most_common(),
        "running": sum(map(running_of, roster.runners)),
        "capacity": sum(each.capacity for each in roster.runners),
        "running_of": running_of,
        "owned": {id: calls[:_NAMED] for id, calls in owned.items()},
        "gone": [(id, owned[id]) for id in gone],
        "services": services,
        "slots": {member.runner_id: window.slot for member, window in services.windows},
        "drawn": draw_cycle(services),
        "tones": TONES,
    }


async def runner_page(asked: Asked) -> Callable[[], Context]:
    found = await found_runner(asked)
    view = await asked.runtime.arun(asked.reading.runners.services(1))
    return lambda: {
        "found": found,
        "runner": found.runner,
        "state": found.roster.state_of(found.runner),
        "most": MOST_RUNNING,
        "running_of": running_of,
        "decision": view.decision(found.runner.id) if found.runner.id in view.claims else "",
        "why": view.why(found.runner.id) if found.runner.id in view.claims else "",
        "tones": TONES,
    }


def worst_first(roster: Roster) -> Sequence[RunnerRecord]:
    """Return the runners in the order in which they need attention."""

    def place(runner: RunnerRecord) -> int:
        if any(worker.unresponsive_since is not None for worker in runner.workers):
            return 1
        return {DEAD: 0, DRAINING: 2}.get(roster.state_of(runner), 3)

    return sorted(roster.runners, key=place)


def draw_cycle(view: ServiceView) -> Drawn:
    start, end = view.cycle
    slots = [
        Slot(
            begins=(window.starts_at - start) / (end - start),
            ends=(window.ends_at - start) / (end - start),
            text=f"{window.slot}",
            title=f"slot {window.slot}: {member.runner_id}",
            kind="f-busy" if window.starts_at <= view.now < window.ends_at else "f-idle",
        )
        for member, window in view.windows
    ]
    return cycle(f"{len(slots)} slots of the services on their cycle", slots, (view.now - start) / (end - start))


PAGES = (
    WebPage("/runners", "Runners", "runners.html", list_page, nav="runners", topics=("runners",)),
    WebPage("/runners/{id}", "Runner", "runner.html", runner_page, nav="runners", topics=("runners", "invocations")),
)
