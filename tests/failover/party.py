"""A process of a load: ``python -m tests.failover.party '{"role": "run", …}'``.

It works until its standard input ends, then finishes what it has begun and exits; so it never outlives the test. Its
app is an ordinary one with ordinary settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pymongo import WriteConcern, common
from tests.failover.ledger import ACCEPTED, BEGAN, GONE, READY, SEEN, SUBMITS, UNKNOWN, Ledger, answer, fails

from holdfast import App, Invocation, InvocationNotFound, StoreError, TaskFailed
from holdfast.store.mongo import store as mongo_store

PLACES = 8
SINGLE_SECONDS, BATCH_SECONDS, BATCH = 0.03, 0.15, 5


class Party:
    def __init__(self, url: str, app: str, ledger: Path) -> None:
        self.app = App(url, name=app, runner_heartbeat_seconds=0.2)
        self.ledger = Ledger(ledger)
        self.plain = self.app.task(name="plain")(self._plain)
        self.async_ = self.app.task(name="async")(self._async)
        self._numbers = itertools.count()
        self._watching: set[asyncio.Task[None]] = set()

    # --- the tasks

    def _plain(self, number: int, padding: str = "") -> str:
        self.ledger.write(BEGAN, number=number)
        time.sleep(0.01 * (number % 2))  # some are still under way when a fault comes
        return _end(number)

    async def _async(self, number: int, padding: str = "") -> str:
        self.ledger.write(BEGAN, number=number)
        await asyncio.sleep(0.05)
        return _end(number)

    # --- the roles

    def run(self) -> None:
        with self.app.runner(concurrency=PLACES):
            self.ledger.write(READY)
            sys.stdin.read()

    def submit(self) -> None:
        asyncio.run(self._submit())

    async def _submit(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait_for_end() -> None:
            sys.stdin.read()
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait_for_end, daemon=True).start()
        await asyncio.gather(self._keep_submitting(stop, 1), self._keep_submitting(stop, BATCH))
        while self._watching:
            await asyncio.wait(self._watching)

    async def _keep_submitting(self, stop: asyncio.Event, size: int) -> None:
        """One after another until somebody says stop; each is watched by itself."""
        while not stop.is_set():
            numbers = list(itertools.islice(self._numbers, size))
            self.ledger.write(SUBMITS, numbers=numbers)
            task = self.async_ if numbers[0] % 3 else self.plain
            calls = [(number, _padding(number)) for number in numbers]
            try:
                group = [await task.asubmit(*calls[0])] if size == 1 else list(await task.amap(calls))
            except StoreError as error:
                self.ledger.write(UNKNOWN, numbers=numbers, why=str(error))
            else:
                self.ledger.write(ACCEPTED, numbers=numbers, ids=[invocation.id for invocation in group])
                for number, invocation in zip(numbers, group, strict=True):
                    watching = asyncio.create_task(self._watch(number, invocation))
                    self._watching.add(watching)
                    watching.add_done_callback(self._watching.discard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SINGLE_SECONDS if size == 1 else BATCH_SECONDS):
                    await stop.wait()

    async def _watch(self, number: int, invocation: Invocation[Any]) -> None:
        while True:
            try:
                seen = {"result": await invocation.aresult()}
            except TaskFailed as error:
                seen = {"error": error.message}
            except InvocationNotFound:
                self.ledger.write(GONE, number=number, id=invocation.id)
                return
            except StoreError as error:
                logging.warning("a client waits on: %s", error)
                continue
            self.ledger.write(SEEN, number=number, id=invocation.id, **seen)
            return


class Refused(Exception):
    pass


def _padding(number: int) -> str:
    """A few calls are large, and some of them so large that their argument is stored apart."""
    if number % 16 == 7:
        return f"{number} " * 30_000
    return "x" * 30_000 if number % 16 == 15 else ""


def _end(number: int) -> str:
    if fails(number):
        raise Refused(answer(number))
    return answer(number)


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.basicConfig(
        level="INFO", stream=sys.stderr, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s"
    )
    if given["write_concern"] != "majority":
        mongo_store._MAJORITY = WriteConcern(w=given["write_concern"])  # a planted bug, to see that it is found
    if given["hasty"]:
        common.MIN_HEARTBEAT_INTERVAL = 0.02  # after a failure the driver looks for the server twice a second
    party = Party(given["url"], given["app"], Path(given["ledger"]))
    with party.app:
        {"run": party.run, "submit": party.submit}[given["role"]]()


if __name__ == "__main__":
    main()
