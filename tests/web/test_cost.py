"""No page and no route pays for what is stored: each costs the same beside a few thousand records and beside more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.looks import looks_of
from tests.support.patience import eventually, patient
from tests.web.shop import TOKEN, WebShop

from holdfast import App
from holdfast.access.audit import Action, AuditLog
from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.decoding import RATE
from holdfast.model.limits import Limit
from holdfast.model.rates import rate_key
from holdfast.model.records import Entry, RunnerRecord, lane_of
from holdfast.rates import api
from holdfast.runtime.engine import Engine
from holdfast.store.sqlite import inspection
from holdfast.testing.samples import ERROR, START, TASK, invocation, runner, wish
from holdfast.triggers.events import KIND, EventRecord, to_entry
from holdfast.web import web_app
from holdfast.web.api import ROUTES
from holdfast.web.pages import overview
from holdfast.web.pages import queues as queue_pages
from holdfast.web.pages.table import PAGES
from holdfast.web.reading import health, load, queues, runners, searching
from holdfast.web.reading.topics import INVOCATION, TOPICS, TopicReading
from holdfast.web.routing import PREFIX
from holdfast.workflows.hooks_records import HookEntry, hook_entry

PAGE = {"accept": "text/html"}
COUNT, BOUND = 420, 60  # in the place of the bounds of the read model, so that few records are enough
QUERIES = {"/invocations/complete": "?q=task:&at=5", "/invocations/count": "?q=status:success"}
SLACK = 300
WITHOUT = ("/world/", "/groups/")  # this shop has no run of a World, and no group
COUNTS_ALL = {"/apps", "/doctor"}  # they count what is stored, as their commands do
UNBOUNDED = {"/invocations/{id}/streams/{name}", "/live"}  # they do not end; the second is counted by its topics


class Filled:
    """A shop whose runner has ended, beside so many records of every kind."""

    def __init__(self, shop: WebShop, children_of: str) -> None:
        self.app, self._parent, self._count = shop.app, children_of, 0

    def add(self, count: int) -> None:
        """Add so many of everything that grows as an app is used."""
        numbers = range(self._count, self._count + count)
        self._count += count

        async def job() -> None:
            engine = await self.app.runtime.engine()
            await _calls(engine, numbers, self._parent)
            await _entries(engine, numbers)

        self.app.runtime.run(job())


async def _calls(engine: Engine, numbers: Sequence[int], parent: str) -> None:
    store = engine.store
    runs = numbers if numbers[0] == 0 else range(0)  # as many as a fleet has places for: that does not grow
    made = [
        invocation(f"{kind}{n:024}", app="shop", queue=queue, parent_id=parent if kind == "0w" else None, **more)
        for kind, queue in (("0e", "ended"), ("0r", "running"), ("0w", "waiting"), ("0l", "later"), ("0b", "blocked"))
        for n in (runs if kind == "0r" else numbers)
        for more in [_more(kind, n)]
    ]
    await store.insert(made)
    now, lanes = store.now(), {name: (lane_of(name, TASK),) for name in ("ended", "running", "blocked")}
    for name in ("ended", "running"):
        taken = wish(f"{name} {numbers[0]}", lanes=lanes[name], limit=len(numbers), owner="silent-1/0", at=now)
        records = (await store.claim(taken)).records
        assert len(records) == len(runs if name == "running" else numbers)
        if name == "ended":
            await store.apply([_ended(record, number, now) for number, record in enumerate(records)])
    limits = {TASK: Limit(1 if runs else 0)}  # each two have a key; at first one of them gets a slot
    for turn in itertools.count():
        await store.claim(wish(f"b {numbers[0]} {turn}", lanes=lanes["blocked"], limit=500, limits=limits, at=now))
        if lanes["blocked"][0] not in await store.lanes(engine.app):
            break


def _more(kind: str, n: int) -> dict[str, Any]:
    attributes = {"customer": f"c-{n % 7}"}
    if kind == "0b":
        return {"limit_key": f"{TASK}|{n // 2:08}", "attributes": attributes}
    return {"due_at": START + 1e9} if kind == "0l" else {"attributes": attributes}


def _ended(record: Any, number: int, now: float) -> changes.Change:
    operation = f"end {record.id}"
    if number % 2:
        return changes.failed(record, error=ERROR, operation=operation, at=now)
    return changes.completed(record, result=b"\x01", operation=operation, at=now)


async def _entries(engine: Engine, numbers: Sequence[int]) -> None:
    store, app, log = engine.store, engine.app, engine.part(AuditLog)
    for n in numbers:
        event = EventRecord(app=app, id=f"1{n:025}", name="order", payload=b"\x80", at=START, keep_until=START + 1e9)
        await store.put_entry(to_entry(event))
        hook = HookEntry(run=InvocationId("run"), task="approve", call=f"hook#{n}", created_at=START, token=f"t{n}")
        await store.put_entry(hook_entry(app, f"{n:064x}", hook))
        await store.put_entry(Entry(app=app, kind=RATE, name=rate_key(TASK, f"{n:032x}"), body=b"{}"))
        await log.end(await log.begin(Action("ann", "cli", "host", "queue.pause", [f"q{n}"])), "done")
        await store.quarantine_entry(Entry(app=app, kind=KIND, name=f"2{n}", body=b"bad"), CorruptRecord("bad"))


@pytest.fixture(params=["sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "mongo":
        return str(request.getfixturevalue("mongo_url"))
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def shop(url: str) -> Iterator[WebShop]:
    """A shop with some of everything, whose runner has ended."""
    made = WebShop(url)

    @made.app.task(name=TASK, limit=1, rate="5/s")
    def send() -> None: ...

    with made as shop:
        shop.speak.submit(["a", "b"]).result(patient(30))
        shop.approve.submit("a")
        shop.app.schedules.create("nightly", shop.add, [1], every="1d")
        shop.app.emit("order", {"n": 1})
        silent = runner("silent-1", app="shop")
        shop.app.runtime.run(_enrolled(shop.app, silent))
        eventually(shop.app.hooks)
        shop.runner.end()
        yield shop


async def _enrolled(app: App, record: RunnerRecord) -> None:
    await (await app.runtime.engine()).store.enrol(record)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (api, health, load, overview, queue_pages, queues, runners, searching):
        for name in ("MOST_COUNTED", "MOST_BLOCKED", "MOST_KEYS", "MOST_LOOKED", "MOST_RUNNING", "_MAX_KEYS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, BOUND)
    monkeypatch.setattr(inspection, "QUICK_BYTES", 0)  # `store check` reads a file that is smaller whole


def addresses(shop: WebShop, get: Callable[[str], Any]) -> dict[str, str]:
    """Return an address for each page and each route that reads, by the path of the table."""
    speech = get("/invocations?task=speak")["invocations"][0]["id"]
    names = {
        "hooks": get("/hooks")["hooks"][0]["name"],
        "limits": TASK,
        "schedules": "nightly",
        "tasks": "add",
        "streams": "words",
    }
    ids = {"events": get("/events")["events"][0]["id"], "runners": "silent-1"}
    tables = [(page.path, page.path) for page in PAGES]
    tables += [
        (PREFIX + each.path, each.path)
        for each in ROUTES
        if each.method == "GET" and each.path not in UNBOUNDED | COUNTS_ALL
    ]
    found = {}
    for name, path in tables:
        if path.startswith(WITHOUT) and "{" in path:
            continue
        noun = path.split("/")[1] if path else ""
        noun = "hooks" if noun == "hook" else noun
        id = ids.get(noun, speech if "/streams" in path else shop.run.id)
        address = name.replace("{id}", id).replace("{step:path}", "charge%231")
        address = address.replace(
            "{name}", names["streams" if "/streams" in path else noun] if "{name}" in path else ""
        )
        found[name] = address + QUERIES.get(path, "")
    found["/invocations/{id} of a parent"] = f"/invocations/{shop.sum.id}"
    found["/invocations, ended"] = "/invocations?q=status:failed"
    found["/invocations, of a customer"] = "/invocations?q=customer:c-1"
    found["/archive, failed"] = "/archive?status=failed"
    return found


def test_no_page_and_no_route_pays_for_what_is_stored(shop: WebShop, bounds: None) -> None:
    filled, looks = Filled(shop, shop.sum.id), looks_of(shop.app)
    filled.add(COUNT)
    reading = TopicReading(shop.app.runtime)
    with TestClient(web_app(shop.app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:

        def get(path: str) -> Any:
            answer = client.get(PREFIX + path)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def show(address: str) -> None:
            answer = client.get(address, headers=PAGE, follow_redirects=False)
            assert answer.status_code == 200, (address, answer.text[-300:])

        works: dict[str, Callable[[], object]] = {
            name: lambda address=address: show(address) for name, address in addresses(shop, get).items()
        }
        for topic in (*TOPICS, f"{INVOCATION}{shop.run.id}"):
            works[f"the topic {topic}"] = lambda topic=topic: shop.app.runtime.run(reading.values([topic]))
        few = {name: looks.of(work) for name, work in works.items()}
        filled.add(2 * COUNT)
        many = {name: looks.of(work) for name, work in works.items()}
        for page in ("/", "/queues"):
            assert f"over {BOUND}" in client.get(page, headers=PAGE).text
    grown = [f"{name}: {few[name]}, then {each}" for name, each in many.items() if each > few[name] * 1.1 + SLACK]
    assert not grown, "\n".join(grown)
