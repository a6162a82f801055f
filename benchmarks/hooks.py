"""``make bench-hooks``: how soon a resumed body goes on, and what ten thousand waiting runs cost.

The time to the next line is from `resume_hook` in this process to the line behind ``await`` in a runner of its own
process; both read the clock of this machine. ``--parts latency,crowd`` measures only some of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.quiet import Quiet
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe, end_orderly
from holdfast import App, hook
from holdfast.errors import HookNotFound

_LIMIT_SECONDS = 1_800.0
_NAME = "bench-hooks"
PARTS = ("latency", "crowd")


class Sizes:
    """How much is done for one figure."""

    def __init__(self, *, quick: bool) -> None:
        self.resumed = 20 if quick else 200
        self.steps = 3 if quick else 5
        self.waiting = 40 if quick else 10_000


class Hooks:
    """An app with the workflows that are measured."""

    def __init__(self, url: str) -> None:
        app = self.app = App(url, name=_NAME)

        @app.workflow(name="echo", check=False)  # it reads the clock
        async def echo(token: str, times: int) -> list[float]:
            """Return how long each payload took. It stays in memory: no replay asks the clock again."""
            came, payloads = [], hook(token, float)
            for _ in range(times):
                sent = await payloads
                came.append(time.time() - sent)
            return came

        @app.workflow(name="wait", check=False)
        async def wait(token: str) -> float:
            sent = float(await hook(token, float))
            return time.time() - sent

        self.echo, self.wait = echo, wait


def serve(url: str) -> None:
    """Run what is there, until the end of input."""
    with Hooks(url).app.runner(concurrency=50):
        print("there", flush=True)
        sys.stdin.read()


@contextmanager
def runner(url: str) -> Iterator[int]:
    """Start a runner in a process of its own. Yields its process id."""
    command = [sys.executable, "-m", "benchmarks.hooks", "--serve", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def resume(app: App, token: str) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        try:
            app.resume_hook(token, time.time())
            return
        except HookNotFound:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# --- latency


def to_a_live_body(url: str, sizes: Sizes) -> dict[str, float]:
    """Return the milliseconds from `resume_hook` to the next line of a body that is in memory."""
    made = Hooks(url)
    with made.app as app:
        app.prepare()
        with runner(url):
            run = made.echo.submit("live", sizes.resumed)
            for _ in range(sizes.resumed):
                resume(app, "live")
                time.sleep(0.05)
            delays = sorted(run.result(_LIMIT_SECONDS))
    return _milliseconds(delays)


# --- a crowd


def crowd(url: str, sizes: Sizes) -> dict[str, float]:
    """Return what many waiting runs cost the memory of their runner, and the time to resume one of few and of many."""
    made, found = Hooks(url), {}
    with made.app as app:
        app.prepare()
        with runner(url) as pid:
            waiting = 0
            for count in (max(10, sizes.waiting // 100), sizes.waiting):
                made.wait.map([(f"of {number}",) for number in range(waiting, count)])
                _until_suspended(app, count - waiting, f"of {waiting}")
                waiting = count
                found[f"memory of the runner, {count:,} wait [MiB]"] = _memory(pid)
                tokens = [f"of {number}" for number in range(count)][: -1 - sizes.steps * 10 : -1]
                began = time.perf_counter()
                for token in tokens:
                    resume(app, token)
                seconds = (time.perf_counter() - began) / len(tokens)
                found[f"resume_hook, {count:,} wait [ms]"] = seconds * 1000
    return found


def _until_suspended(app: App, count: int, first: str) -> None:
    """Wait until all runs have suspended: from then on they are rows."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        queued = sum(len(app.invocations(status=status, limit=1)) for status in ("registered", "pending", "running"))
        if not queued:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count:,} runs from {first} do not suspend")
        time.sleep(0.25)


def _memory(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no memory of {pid} is known")


def _milliseconds(delays: Sequence[float]) -> dict[str, float]:
    return {"p50": statistics.median(delays) * 1000, "p95": delays[int(len(delays) * 0.95)] * 1000}


# --- the program


def measure(name: str, sizes: Sizes, quiet: Quiet, parts: Sequence[str]) -> dict[str, float]:
    figures: dict[str, float] = {}
    with TARGETS[name].served() as fresh:
        quiet.wait()
        if "latency" in parts:
            with fresh() as url:
                for part, value in to_a_live_body(url, sizes).items():
                    figures[f"resume to the next line, {part} [ms]"] = value
        if "crowd" in parts:
            with fresh() as url:
                figures |= crowd(url, sizes)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hooks")
    parser.add_argument("--stores", default="sqlite,mongo", help="which ones, separated by commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="which ones, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work at all?")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return serve(options.serve)
    end_orderly()
    sizes, quiet = Sizes(quick=options.quick), Quiet(0.0 if options.quick else 60.0)
    results: dict[str, dict[str, float]] = {}
    for name in options.stores.split(","):
        try:
            results[name] = measure(name, sizes, quiet, options.parts.split(","))
        except CannotServe as error:
            print(f"{name}: {error}", file=sys.stderr)
    if options.json:
        return print(json.dumps(results))
    rows: list[Any] = list(dict.fromkeys(what for figures in results.values() for what in figures))
    print(table(["hooks", *results], [[what, *[_cell(each.get(what)) for each in results.values()]] for what in rows]))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
