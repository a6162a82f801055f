"""Tasks under rates that write down when each attempt begins: what is seen from outside, by the host's clock."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import App, context
from holdfast.retries import Fixed

STARTS = "starts.txt"
SECONDS = 0.1  # that an attempt takes


class Pace(NamedTuple):
    """What a key may have: so many starts in a second, and so many at once."""

    per_second: float
    burst: int


LASTING = "lasting"
PACES = {
    "steady": Pace(50, 5),
    "ann": Pace(10, 2),
    "bob": Pace(10, 2),
    "api": Pace(20, 4),
    "shaky": Pace(25, 3),
    LASTING: Pace(5, 2),
}


class Start(NamedTuple):
    """The first line of an attempt."""

    key: str
    at: float
    id: str
    attempt: int


def note_start(key: str) -> None:
    here = context()
    line = f"{key} {time.time()} {here.invocation_id} {here.attempt}\n"
    file = os.open(Path(os.environ["HOLDFAST_TEST_LEDGERS"]) / STARTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())  # lines of several processes do not mix
    finally:
        os.close(file)


def starts_in(folder: Path) -> dict[str, list[Start]]:
    """Return the starts that were written down, by key, in the order of their times."""
    found: dict[str, list[Start]] = defaultdict(list)
    path = folder / STARTS
    for line in path.read_text().splitlines() if path.exists() else ():
        key, at, id, attempt = line.split()
        found[key].append(Start(key, float(at), id, int(attempt)))
    for starts in found.values():
        starts.sort(key=lambda start: start.at)
    return found


def steady(key: str) -> str:
    note_start(key)
    time.sleep(SECONDS)
    return key


async def by_customer(key: str) -> str:
    note_start(key)
    return key


def read_api(key: str) -> str:
    return steady(key)


def write_api(key: str) -> str:
    return steady(key)


def shaky(key: str) -> str:
    """Fails at first: each attempt takes a start."""
    note_start(key)
    if context().attempt == 1:
        raise OSError("the first attempt fails")
    return key


def lasting(key: str) -> str:
    """Runs until its process is killed, or the test says so."""
    note_start(key)
    while context().attempt == 1 and not (Path(os.environ["HOLDFAST_TEST_LEDGERS"]) / "release").exists():
        time.sleep(0.02)
    return key


def _rate(key: str) -> dict[str, Any]:
    return {"rate": f"{PACES[key].per_second}/s", "burst": PACES[key].burst}


TASKS: dict[Callable[..., Any], dict[str, Any]] = {
    steady: _rate("steady"),
    by_customer: _rate("ann") | {"rate_by": "key"},
    read_api: _rate("api") | {"rate_name": "api"},
    write_api: _rate("api") | {"rate_name": "api"},
    lasting: _rate(LASTING),
    shaky: _rate("shaky") | {"retries": Fixed(2, 0.05)},
}


def declare(app: App) -> None:
    for function, options in TASKS.items():
        app.task(name=function.__name__, **options)(function)


if "HOLDFAST_TEST_LEDGERS" in os.environ:  # a runner of a test imports this
    app = App()
    declare(app)
