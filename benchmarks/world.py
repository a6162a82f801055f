"""``make bench-world``: events per second of World runs, whether long runs are slower, how soon messages arrive.

Events are those of a serial workflow: `step_started` with its input, then `step_completed`, each awaited before the
next. They are written by the storage of one server in this process; HTTP is not in these figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from benchmarks.quiet import Quiet
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe, end_orderly
from holdfast import App
from holdfast.world.deliveries import Deliveries
from holdfast.world.queue import Messages
from holdfast.world.storage import WorldStorage

_DATA = b"x" * 200
RUNS = 20


class Sizes:
    """How much is done for one figure."""

    def __init__(self, *, quick: bool) -> None:
        self.rounds = 1 if quick else 3
        self.steps = 50 if quick else 500
        self.long = 1_000 if quick else 10_000
        self.messages = 30 if quick else 300


class Server:
    """The storage of a server, and the events of runs."""

    def __init__(self, storage: WorldStorage) -> None:
        self.storage = storage

    async def _create(self, run: str | None, kind: str, call: str | None = None, **data: Any) -> Any:
        event = {"eventType": kind, "specVersion": 5, "eventData": data}
        event |= {} if call is None else {"correlationId": call}
        params = {"skipPreload": True}
        return await self.storage.events_create(run_id=run, event=event, params=params)

    async def start(self) -> str:
        answer = await self._create(None, "run_created", deploymentId="d", workflowName="bench", input=_DATA)
        run: str = answer["run"]["runId"]
        await self._create(run, "run_started")
        return run

    async def steps(self, run: str, numbers: range) -> None:
        for number in numbers:
            await self._create(run, "step_started", f"step_{number}", stepName="step", input=_DATA)
            await self._create(run, "step_completed", f"step_{number}", result=_DATA)

    async def sequential(self, sizes: Sizes) -> float:
        run = await self.start()
        began = time.perf_counter()
        await self.steps(run, range(sizes.steps))
        return 2 * sizes.steps / (time.perf_counter() - began)

    async def together(self, sizes: Sizes) -> float:
        runs = [await self.start() for _ in range(RUNS)]
        steps = max(5, sizes.steps // 5)
        began = time.perf_counter()
        await asyncio.gather(*[self.steps(run, range(steps)) for run in runs])
        return 2 * RUNS * steps / (time.perf_counter() - began)

    async def long(self, sizes: Sizes) -> tuple[float, float]:
        """Return the events per second of the first and of the last tenth of a long run."""
        run, tenth = await self.start(), sizes.long // 20
        rates = []
        for number in range(10):
            began = time.perf_counter()
            await self.steps(run, range(number * tenth, (number + 1) * tenth))
            rates.append(2 * tenth / (time.perf_counter() - began))
        return rates[0], rates[-1]


async def delivered(app: App, sizes: Sizes) -> list[float]:
    """Return the milliseconds from a call of `queue` to the request at the application, one message after another."""
    arrived = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    application = await asyncio.start_server(answer, "127.0.0.1", 0)
    base_url = f"http://127.0.0.1:{application.sockets[0].getsockname()[1]}"
    deliveries, found = Deliveries(app.runtime), list[float]()
    await deliveries.start()
    messages = (await app.runtime.engine()).part(Messages)
    sending: dict[str, Any] = {"queue_name": "__wkf_workflow_bench", "message": {"runId": "r"}, "base_url": base_url}
    for number in range(sizes.messages):
        arrived.clear()
        began = time.perf_counter()
        await messages.send(**sending, operation_id=f"bench {number}")
        await arrived.wait()
        found.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.005)
    await deliveries.stopped()
    application.close()
    return found


def milliseconds_of_deliveries(url: str, sizes: Sizes) -> list[float]:
    with App(url, name="bench-world") as app:
        return app.runtime.run(delivered(app, sizes))


def measured(url: str, work: Callable[[Server], Coroutine[Any, Any, Any]]) -> Any:
    with App(url, name="bench-world") as app:

        async def do() -> Any:
            return await work(Server((await app.runtime.engine()).part(WorldStorage)))

        return app.runtime.run(do())


def measure(name: str, sizes: Sizes, quiet: Quiet) -> dict[str, float]:
    figures: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        figures.setdefault(what, []).append(value)

    with TARGETS[name].served() as fresh:
        for _ in range(sizes.rounds):
            quiet.wait()
            with fresh() as url:
                note("one after another [1/s]", measured(url, lambda server: server.sequential(sizes)))
                note(f"{RUNS} runs at once [1/s]", measured(url, lambda server: server.together(sizes)))
        with fresh() as url:
            quiet.wait()
            waits = sorted(milliseconds_of_deliveries(url, sizes))
            note("from queue to the application, p50 [ms]", waits[len(waits) // 2])
            note("from queue to the application, p95 [ms]", waits[len(waits) * 95 // 100])
        with fresh() as url:
            quiet.wait()
            first, last = measured(url, lambda server: server.long(sizes))
            note(f"the last tenth of {sizes.long:,} events / the first", last / first)
    return {what: statistics.median(values) for what, values in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.world")
    parser.add_argument("--stores", default="sqlite,mongo", help="which ones, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it work at all?")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(arguments)
    end_orderly()
    sizes, quiet = Sizes(quick=options.quick), Quiet(0.0 if options.quick else 60.0)
    results: dict[str, dict[str, float]] = {}
    for name in options.stores.split(","):
        try:
            results[name] = measure(name, sizes, quiet)
        except CannotServe as error:
            print(f"{name}: {error}", file=sys.stderr)
    if options.json:
        return print(json.dumps(results))
    rows = list(dict.fromkeys(what for figures in results.values() for what in figures))
    cells = [[what, *[_cell(figures.get(what)) for figures in results.values()]] for what in rows]
    print(table(["World", *results], cells))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
