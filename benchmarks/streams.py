"""``make bench-streams``: chunks per second, how soon readers see them, and what long streams and many readers cost.

A chunk has 100 bytes. A rate counts from the first `write` of a task to the end of its `flush`, with one runner in this
process. Readers are in a process of their own. ``--parts write,index`` measures only some of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.quiet import Quiet
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe, end_orderly
from holdfast import App, Invocation, stream
from holdfast.executors.chunks import CHUNK
from holdfast.model.log import MAX_PAGE_EVENTS, Page, stream_log
from holdfast.streams.records import StreamEntry, StreamEvent, encode, entry_of

_LIMIT_SECONDS = 600.0
_NAME = "bench-streams"
_DATA = b"x" * 100
WRITERS = 10
READERS = 200
PARTS = ("write", "ten", "latency", "index", "readers")


class Sizes:
    """How much is done for one figure."""

    def __init__(self, *, quick: bool, long: int | None = None) -> None:
        self.rounds = 1 if quick else 3
        self.chunks = 2_000 if quick else 50_000
        self.paced = 20 if quick else 300
        self.long = long or (10_000 if quick else 1_000_000)
        self.followed = 500 if quick else 5_000


class Streams:
    """An app with the tasks that are measured."""

    def __init__(self, url: str) -> None:
        app = self.app = App(url, name=_NAME)

        @app.task(name="write")
        def write(chunks: int) -> tuple[float, float]:
            return _write(chunks)

        @app.task(name="paced")
        async def paced(chunks: int) -> int:
            for _ in range(chunks):
                await stream().write(time.time())
                await asyncio.sleep(0.02)
            return chunks

        @app.step(name="part")
        def part(chunks: int) -> tuple[float, float]:
            return _write(chunks)

        @app.workflow(name="together")
        async def together(writers: int, chunks: int) -> list[Any]:
            steps: list[Any] = [part(chunks) for _ in range(writers)]  # awaited in a body, as every step there
            return list(await asyncio.gather(*steps))

        self.write, self.paced, self.together = write, paced, together


def _write(chunks: int) -> tuple[float, float]:
    """Write chunks, and return when that began and ended."""
    out, began = stream(), time.perf_counter()
    for _ in range(chunks):
        out.write(_DATA)
    out.flush()
    return began, time.perf_counter()


# --- writing


def one_writer(url: str, sizes: Sizes) -> float:
    made = Streams(url)
    with made.app as app, app.runner():
        made.write.submit(10).result(_LIMIT_SECONDS)
        began, ended = made.write.submit(sizes.chunks).result(_LIMIT_SECONDS)
        return sizes.chunks / (ended - began)


def ten_writers(url: str, sizes: Sizes) -> float:
    """Return the chunks per second of parallel steps that write to one stream."""
    made = Streams(url)
    with made.app as app, app.runner(concurrency=WRITERS):
        made.together.submit(WRITERS, 10).result(_LIMIT_SECONDS)
        each = sizes.chunks // WRITERS
        times = made.together.submit(WRITERS, each).result(_LIMIT_SECONDS)
        return WRITERS * each / (max(ended for _, ended in times) - min(began for began, _ in times))


# --- reading


class Reader:
    """Readers of a stream, in a process of their own. `report` is what they say at the end."""

    def __init__(self, url: str, call: Invocation[Any], readers: int) -> None:
        command = [sys.executable, "-m", "benchmarks.streams", "--read", url, call.id, str(readers)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is there

    def report(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.wait(_LIMIT_SECONDS)
        found: dict[str, float] = json.loads(line)
        return found


def read(url: str, id: str, readers: int) -> None:
    """Follow a stream with so many readers, and print what they saw."""
    app = App(url, name=_NAME)

    async def follow() -> tuple[list[float], int]:
        delays, count = [], 0
        async for chunk in app.invocation(id).stream():
            count += 1
            if isinstance(chunk.value, float):
                delays.append(time.time() - chunk.value)
        return delays, count

    async def main() -> list[tuple[list[float], int]]:
        print("there", flush=True)
        return list(await asyncio.gather(*[follow() for _ in range(readers)]))

    with app:
        app.runners()  # opens the store
        found = asyncio.run(main())
    delays = sorted(delay for each, _ in found for delay in each)
    report: dict[str, float] = {"least": min(count for _, count in found), "most": max(count for _, count in found)}
    if delays:
        report |= {"p50": statistics.median(delays), "p95": delays[int(len(delays) * 0.95)]}
    print(json.dumps(report), flush=True)


def latency(url: str, sizes: Sizes) -> dict[str, float]:
    """Return the milliseconds from a `write` to a reader in another process."""
    made = Streams(url)
    with made.app as app:
        call = made.paced.submit(sizes.paced)
        reader = Reader(url, call, 1)  # before the first chunk: what it finds there was written long ago
        with app.runner():
            report = reader.report()
        return {name: report[name] * 1000 for name in ("p50", "p95")}


def followed(url: str, sizes: Sizes, readers: int) -> float:
    """Return the chunks per second of one writer whose stream so many readers follow."""
    made = Streams(url)
    with made.app as app:
        call = made.write.submit(sizes.followed)
        reader = Reader(url, call, readers) if readers else None
        with app.runner():
            began, ended = call.result(_LIMIT_SECONDS)
            report = {"least": sizes.followed} if reader is None else reader.report()
        if report["least"] != sizes.followed:
            raise RuntimeError(f"a reader saw {report['least']} of {sizes.followed} chunks")
        return sizes.followed / (ended - began)


def by_index(url: str, sizes: Sizes) -> dict[str, float]:
    """Return the milliseconds to read ten items at the beginning and at the end of a long stream."""
    made = Streams(url)
    with made.app as app, app.runner():
        call = made.write.submit(1)
        call.result(_LIMIT_SECONDS)
        _fill(app, call, sizes.long)
        places = {"at the beginning": 10, "at the end": sizes.long - 20}
        return {place: _best(lambda start=start: _ten(call, start)) for place, start in places.items()}  # type: ignore[misc]


def _ten(call: Invocation[Any], start: int) -> None:
    items = list(call.stream("long", start=start, stop=start + 10))
    if [chunk.index for chunk in items] != list(range(start, start + 10)):
        raise RuntimeError(f"{start} was read wrongly: {items}")


def _best(work: Callable[[], None]) -> float:
    def once() -> float:
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1000

    return statistics.median(once() for _ in range(20))


def _fill(app: App, call: Invocation[Any], chunks: int) -> None:
    """Put so many chunks into a stream, past its writer: in full pages."""

    async def work() -> None:
        store, log = (await app.runtime.engine()).store, stream_log(call.id, "long")
        await store.put_entry(entry_of(app.name, log, StreamEntry(created_at=store.now()), store.now() + 60))
        event = StreamEvent(CHUNK, store.now(), "", 1, app.runtime.codec.encode(_DATA))
        events = encode([event] * MAX_PAGE_EVENTS)
        for first in range(1, chunks + 1, MAX_PAGE_EVENTS):
            last = first + MAX_PAGE_EVENTS - 1
            facts: dict[str, Any] = {"app": app.name, "run": log, "epoch": 1, "at": store.now(), "events": events}
            await store.append([Page(first=first, last=last, operation=f"page {first}", **facts)])

    app.runtime.run(work())


# --- the program


def measure(name: str, sizes: Sizes, quiet: Quiet, parts: Sequence[str]) -> dict[str, float]:
    figures: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        figures.setdefault(what, []).append(value)

    with TARGETS[name].served() as fresh:
        for _ in range(sizes.rounds):
            quiet.wait()
            if "write" in parts:
                with fresh() as url:
                    note("one writer [1/s]", one_writer(url, sizes))
            if "ten" in parts:
                with fresh() as url:
                    note(f"{WRITERS} writers [1/s]", ten_writers(url, sizes))
            if "latency" in parts:
                with fresh() as url:
                    for part, value in latency(url, sizes).items():
                        note(f"to a reader elsewhere, {part} [ms]", value)
            if "readers" in parts:
                with fresh() as url:
                    alone = followed(url, sizes, 0)
                with fresh() as url:
                    note(f"with {READERS} readers / alone", followed(url, sizes, READERS) / alone)
        if "index" in parts:
            with fresh() as url:
                for place, value in by_index(url, sizes).items():
                    note(f"10 of {sizes.long:,}, {place} [ms]", value)
    return {what: statistics.median(values) for what, values in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams")
    parser.add_argument("--stores", default="sqlite,mongo", help="which ones, separated by commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="which ones, separated by commas")
    parser.add_argument("--long", type=int, metavar="N", help="chunks in the stream that is read by index")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it work at all?")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--read", nargs=3, metavar=("URL", "ID", "READERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        return read(options.read[0], options.read[1], int(options.read[2]))
    end_orderly()
    sizes, quiet = Sizes(quick=options.quick, long=options.long), Quiet(0.0 if options.quick else 60.0)
    results: dict[str, dict[str, float]] = {}
    for name in options.stores.split(","):
        try:
            results[name] = measure(name, sizes, quiet, options.parts.split(","))
        except CannotServe as error:
            print(f"{name}: {error}", file=sys.stderr)
    if options.json:
        return print(json.dumps(results))
    rows = list(dict.fromkeys(what for figures in results.values() for what in figures))
    cells = [[what, *[_cell(figures.get(what)) for figures in results.values()]] for what in rows]
    print(table(["streams", *results], cells))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
