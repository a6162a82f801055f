"""``make bench-monitor``: what the pages cost beside a thousand and beside a million invocations, and what a monitor
costs that watches.

Each page is asked for on a small and on a large store in turns: the time of the answer, its bytes, and how much the
store had to look at (see `work`), which no other job on the machine can change. A browser says when it has first
painted something. Then a monitor watches a drain, with a browser that shows the overview and follows the live feed, in
turns with none. Last, 200 clients follow the feed.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks import workload
from benchmarks.stock import APP, TASKS, stock
from benchmarks.table import table
from benchmarks.targets import TARGETS, end_orderly
from benchmarks.work import counter, listen
from benchmarks.worker import ROOT, Worker
from holdfast import App
from holdfast.clock import SystemClock
from holdfast.store import open_store
from holdfast.store.contract import Filter
from holdfast.web.asgi import WebApp
from holdfast.web.pages.table import FILES, PAGES
from holdfast.web.serving import serve

SMALL, LARGE = (400, 0, 0), (400, 900_000, 100_000)  # few, archived, backlog
FIRST_PAINT_MS, SHARE = 300, 0.02
_WATCHED = "invocations runners queues stats store"
_PLACE = "/usr/bin/chromium"
_TICKS = 100.0
_LONGEST_SECONDS = 120.0


# --- a monitor in a process of its own


def app_of(url: str, name: str) -> App:
    """Return the app whose store is watched: that of the drain, or one with the tasks of the stock."""
    if name == "benchmark":
        return workload.make(url).app
    app = App(url, name=name)
    for task in TASKS:
        app.task(name=task, limit=1000)(_nothing)
    return app


def _nothing() -> None: ...


class MonitorProcess:
    """What ``holdfast monitor`` serves, in a process of its own."""

    def __init__(self, url: str, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.monitor", "--serve", url, name]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self._place = self.address.removeprefix("http://")
        self._connection = http.client.HTTPConnection(self._place, timeout=60)

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path, headers={"accept": "text/html"})
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered with {answer.status}")
        return body

    def processor(self) -> float:
        """Return the seconds of processor time that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self) -> float:
        """Return what it holds in memory, in MiB."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    async def follow(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a live feed, and return what it sends, and what has to be closed."""
        host, _, port = self._place.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        topics = _WATCHED.replace(" ", "+")
        writer.write(f"GET /api/v1/live?topics={topics} HTTP/1.1\r\nHost: {self._place}\r\n\r\n".encode())
        return reader, writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


# --- pages


class Visit(NamedTuple):
    """What a page has cost."""

    milliseconds: float
    size: int
    looked: int
    paint: float  # milliseconds until the browser has painted something; 0 without a browser


@contextmanager
def filled(fresh: Any, sizes: tuple[int, int, int]) -> Iterator[str]:
    few, archived, backlog = sizes
    with fresh() as url:
        asyncio.run(_fill(url, few, archived, backlog))
        yield url


async def _fill(url: str, few: int, archived: int, backlog: int) -> None:
    store = open_store(url, clock=SystemClock())
    await store.open()
    await stock(url, store, few=few, archived=archived, backlog=backlog, rng=random.Random(1))
    await store.close()


def paths_of(app: App) -> dict[str, str]:
    """Return an address for each page; not for pages about one thing of a kind that this store has none of."""

    async def newest() -> str:
        engine = await app.runtime.engine()
        return (await engine.store.find(engine.app, Filter(), 1))[0].id

    given = {"/invocations/{id}": app.runtime.run(newest()), "/tasks/{name}": TASKS[0], "/limits/{name}": TASKS[0]}
    found = {each.path: each.path for each in PAGES if "{" not in each.path}
    found |= {path: path[: path.index("{")] + value for path, value in given.items()}
    return found | {
        "/invocations, failed": "/invocations?q=status:failed",
        "/archive, failed": "/archive?status=failed",
    }


def visit_all(url: str, rounds: int, visits: dict[str, list[Visit]]) -> None:
    """Ask for all pages of a store once per round."""
    listen(url)
    with ExitStack() as stack:
        from starlette.testclient import TestClient

        app = stack.enter_context(app_of(url, APP))
        here = stack.enter_context(TestClient(WebApp(app, is_local=True), base_url="http://localhost"))
        looked = {name: _looked(app, here, url, path) for name, path in paths_of(app).items()}
        monitor = stack.enter_context(MonitorProcess(url, APP))
        painted = stack.enter_context(_browser())
        for _ in range(rounds + 1):
            for name, path in paths_of(app).items():
                began = time.perf_counter()
                size = len(monitor.get(path))
                taken = (time.perf_counter() - began) * 1000
                paint = painted(monitor.address + path)
                visits.setdefault(name, []).append(Visit(taken, size, looked[name], paint))
    for name in visits:
        del visits[name][0]  # what is imported and prepared once


def _looked(app: App, client: Any, url: str, path: str) -> int:
    async def count() -> int:
        store = (await app.runtime.engine()).store
        await asyncio.to_thread(client.get, path)
        return await counter(url, store)(lambda: asyncio.to_thread(client.get, path))

    return app.runtime.run(count())


@contextmanager
def _browser() -> Iterator[Any]:
    """Yield what returns the milliseconds from the click to the first paint of a page."""
    if not Path(_PLACE).exists():
        print(f"first paint is left out: {_PLACE} does not exist", file=sys.stderr)
        yield lambda address: 0.0
        return
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=_PLACE, args=["--no-sandbox", "--disable-gpu"]) as launched,
    ):
        page = launched.new_page()

        def painted(address: str) -> float:
            page.goto(address)
            asked = "performance.getEntriesByName('first-contentful-paint').map((each) => each.startTime)"
            while not (found := page.evaluate(asked)):
                page.wait_for_timeout(10)
            return float(found[0])

        yield painted


def report_pages(small: Mapping[str, Sequence[Visit]], large: Mapping[str, Sequence[Visit]]) -> list[str]:
    """Print what the pages cost. Return those that paint too late beside a million."""
    rows, late = [], []
    for name in large:
        few, many = (_middle(visits[name]) for visits in (small, large))
        rows.append(
            [
                name,
                f"{few.milliseconds:.0f}",
                f"{many.milliseconds:.0f}",
                f"{few.paint:.0f}",
                f"{many.paint:.0f}",
                f"{many.size / 1024:.0f}",
                f"{few.looked:,}",
                f"{many.looked:,}",
            ]
        )
        late += [name] if many.paint > FIRST_PAINT_MS else []
    titles = ["page", "answer, few: ms", "many", "first paint, few: ms", "many", "KiB", "looked at, few", "many"]
    print(table(titles, rows))
    folder = Path(sys.modules["holdfast.web.pages.table"].__file__ or "").parent / "static"
    print(f"and {sum((folder / name).stat().st_size for name in FILES) / 1024:.0f} KiB of files, once for all pages")
    return late


def _middle(visits: Sequence[Visit]) -> Visit:
    return Visit(*(statistics.median(each) for each in zip(*visits, strict=True)))  # type: ignore[arg-type]


# --- a monitor that watches a drain


class Drained(NamedTuple):
    """What a drain took, and what the monitor beside it did."""

    rate: float
    processor: float
    watcher: float
    fetches: int


class Watching:
    """A browser that shows the overview: it follows the feed, and fetches the page when it is told, once a second."""

    def __init__(self, monitor: MonitorProcess) -> None:
        self.fetches = 0
        self._monitor, self._ends = monitor, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))

    async def _watch(self) -> None:
        reader, writer = await self._monitor.follow()
        while not self._ends.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    if b"changed" in await reader.readline():
                        self.fetches += 1
                        await asyncio.to_thread(self._monitor.get, "/")
        writer.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()


def drain(fresh: Any, calls: int, *, watched: bool) -> Drained:
    """Drain so many calls in a process of its own."""
    with fresh() as url, ExitStack() as stack:
        app = stack.enter_context(workload.make(url).app)
        app.get_task("benchmark:function").map(range(calls))
        worker = stack.enter_context(Worker(url))
        worker.loaded()
        last = app.invocations(limit=1)[0].id
        monitor = stack.enter_context(MonitorProcess(url, "benchmark")) if watched else None
        watching = None
        if monitor is not None:
            watching = stack.enter_context(Watching(monitor))
            time.sleep(3.0)  # the browser is told of everything once
        before, spent = worker.cpu_seconds(), 0.0 if monitor is None else monitor.processor()
        worker.start()
        began = time.perf_counter()
        while app.invocation(last).status != "success":
            time.sleep(0.05)
        took = time.perf_counter() - began
        watcher = 0.0 if monitor is None else monitor.processor() - spent
        worker.ready()
        fetches = 0 if watching is None else watching.fetches
        return Drained(calls / took, worker.cpu_seconds() - before, watcher, fetches)


def report_drains(fresh: Any, calls: int, rounds: int) -> float:
    """Print what the watcher costs. Return its share of the processor time of the drain."""
    alone, watched = [], []
    for number in range(rounds):
        for is_watched in (False, True) if number % 2 == 0 else (True, False):
            (watched if is_watched else alone).append(drain(fresh, calls, watched=is_watched))
    share = statistics.median(each.watcher / each.processor for each in watched)
    rows = [
        ["calls per second", *(f"{statistics.median(each.rate for each in some):,.0f}" for some in (alone, watched))],
        [
            "processor time, s",
            *(f"{statistics.median(each.processor for each in some):.2f}" for some in (alone, watched)),
        ],
        ["of the monitor, s", "", f"{statistics.median(each.watcher for each in watched):.2f}"],
        ["pages fetched", "", f"{statistics.median(each.fetches for each in watched):.0f}"],
        ["the monitor's share", "", f"{share:.1%}"],
    ]
    print(table([f"a drain of {calls:,} calls, {rounds} rounds", "alone", "watched"], rows))
    return share


# --- many clients


class Told:
    """When each of some clients was told last."""

    def __init__(self, clients: int) -> None:
        self.times: dict[int, float] = {}
        self.all = asyncio.Event()
        self._clients = clients

    def note(self, number: int) -> None:
        self.times[number] = time.perf_counter()
        if len(self.times) == self._clients:
            self.all.set()

    def forget(self) -> None:
        self.times.clear()
        self.all.clear()


async def crowd(monitor: MonitorProcess, app: App, clients: int, changes: int, *, fetches: bool) -> list[list[str]]:
    """Let so many clients follow the feed while calls are submitted. Return rows of figures."""
    before, told = monitor.memory(), Told(clients)
    feeds = await asyncio.gather(*[monitor.follow() for _ in range(clients)])
    place = monitor.address if fetches else ""
    tasks = [asyncio.create_task(_note(number, reader, told, place)) for number, (reader, _) in enumerate(feeds)]
    await asyncio.sleep(25)  # each is told once that it has come
    lone, idle = monitor.processor(), time.perf_counter()
    await asyncio.sleep(10)
    idle_share = (monitor.processor() - lone) / (time.perf_counter() - idle)
    some, last = [], []
    spent, began = monitor.processor(), time.perf_counter()
    for number in range(changes):
        told.forget()
        await asyncio.to_thread(app.get_task("benchmark:function").submit, number)
        submitted = time.perf_counter()
        async with asyncio.timeout(_LONGEST_SECONDS):
            await told.all.wait()
        late = [at - submitted for at in told.times.values()]
        some.append(statistics.median(late))
        last.append(max(late))
    share = (monitor.processor() - spent) / (time.perf_counter() - began)
    for task, (_, writer) in zip(tasks, feeds, strict=True):
        task.cancel()
        writer.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [
        ["until half know, s", f"{statistics.median(some):.1f}"],
        ["until the last one knows, s", f"{statistics.median(last):.1f}"],
        ["processor of the monitor, nothing changes", f"{idle_share:.1%}"],
        ["the same, a change as soon as all know", f"{share:.1%}"],
        ["memory, MiB more than without", f"{monitor.memory() - before:.1f}"],
    ]


async def _note(number: int, reader: asyncio.StreamReader, told: Told, address: str) -> None:
    """Note when a client is told; with an address, it fetches the overview then, as a browser does."""
    while line := await reader.readline():
        if line.startswith(b"event: changed"):
            if address:
                await asyncio.to_thread(_fetched, address)
            told.note(number)


def _fetched(address: str) -> None:
    place = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    place.request("GET", "/", headers={"accept": "text/html"})
    place.getresponse().read()
    place.close()


def report_crowd(fresh: Any, clients: int, changes: int) -> None:
    kinds = {"1": (1, False), f"{clients}": (clients, False), f"{clients}, each fetches the overview": (clients, True)}
    with fresh() as url, workload.make(url).app as app:
        app.get_task("benchmark:function").submit(0)
        columns = []
        for count, fetches in kinds.values():
            with MonitorProcess(url, "benchmark") as monitor:
                columns.append(asyncio.run(crowd(monitor, app, count, changes, fetches=fetches)))
        rows = [[each[0][0], *(value for _, value in each)] for each in zip(*columns, strict=True)]
        print(table(["clients of the live feed", *kinds], rows))


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.monitor", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--serve", nargs=2, metavar=("URL", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", default=["pages", "drain", "crowd"], choices=["pages", "drain", "crowd"])
    parser.add_argument("--store", default="sqlite", choices=sorted(set(TARGETS) - {"memory"}))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100_000, help="in a drain")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--archived", type=int, default=LARGE[1])
    parser.add_argument("--backlog", type=int, default=LARGE[2])
    parser.add_argument("--stores", nargs=2, metavar="URL", help="a small and a large store of an earlier run")
    options = parser.parse_args(arguments)
    if options.serve:
        with app_of(*options.serve) as app:
            serve(app, "127.0.0.1", 0, started=lambda address: print(address, flush=True))
        return 0
    failures = []
    with TARGETS[options.store].served() as fresh:
        if "pages" in options.parts:
            small: dict[str, list[Visit]] = {}
            large: dict[str, list[Visit]] = {}
            with ExitStack() as stack:
                sizes = SMALL, (LARGE[0], options.archived, options.backlog)
                few, many = options.stores or [stack.enter_context(filled(fresh, each)) for each in sizes]
                visit_all(few, options.rounds, small)
                visit_all(many, options.rounds, large)
            failures += [f"{name} is painted late" for name in report_pages(small, large)]
        if "drain" in options.parts and (share := report_drains(fresh, options.calls, options.rounds)) > SHARE:
            failures.append(f"the monitor costs {share:.1%} of a drain")
        if "crowd" in options.parts:
            report_crowd(fresh, options.clients, options.rounds)
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    end_orderly()
    sys.exit(main())
