"""A process of a load: ``python -m tests.failover.party '{"role": "run", …}'``.

A runner works until its standard input ends. A submitter submits from each line ``go`` to the next line ``pause``, and
says so in its ledger when nothing is under way any more. When the input ends, both finish what they have begun and
exit; so they never outlive the test. The app is an ordinary one with ordinary settings.
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
from tests.failover.ledger import ACCEPTED, BEGAN, GONE, QUIET, READY, SEEN, SUBMITS, UNKNOWN, Ledger, answer, fails

from holdfast import App, Invocation, TaskFailed
from holdfast.errors import InvocationNotFound, StoreError
from holdfast.store.mongo import store

PLACES = 8
SINGLE_SECONDS, BATCH_SECONDS, BATCH = 0.03, 0.15, 5


class Party:
    def __init__(self, url: str, app: str, ledger: Path) -> None:
        self.app = App(url, name=app, runner_heartbeat_seconds=0.5)
        self.ledger = Ledger(ledger)
        self.plain = self.app.task(name="plain")(self._plain)
        self.async_ = self.app.task(name="async")(self._async)
        self._numbers = itertools.count()
        self._pausing = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()

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
        with self.app.runner(concurrency=PLACES) as runner:
            self.ledger.write(READY, id=runner.id)
            sys.stdin.read()

    def submit(self) -> None:
        asyncio.run(self._submit())

    async def _submit(self) -> None:
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str] = asyncio.Queue()

        def listen() -> None:
            for line in itertools.chain(sys.stdin, ["end"]):
                loop.call_soon_threadsafe(lines.put_nowait, line.strip())

        threading.Thread(target=listen, daemon=True).start()
        while await lines.get() == "go":
            self._pausing.clear()
            submitting = asyncio.gather(self._keep_submitting(1), self._keep_submitting(BATCH))
            line = await lines.get()
            self._pausing.set()
            await submitting
            while self._under_way:
                await asyncio.wait(self._under_way)
            self.ledger.write(QUIET)
            if line == "end":
                return

    async def _keep_submitting(self, size: int) -> None:
        """One after another until somebody says stop; each is watched by itself."""
        while not self._pausing.is_set():
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
                    self._under_way.add(watching)
                    watching.add_done_callback(self._under_way.discard)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SINGLE_SECONDS if size == 1 else BATCH_SECONDS):
                    await self._pausing.wait()

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
    logging.basicConfig(level="INFO", format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    if given["write_concern"] != "majority":
        assert isinstance(store._MAJORITY, WriteConcern)
        store._MAJORITY = WriteConcern(w=given["write_concern"])  # a planted bug, to see that it is found
    if given["hasty"]:
        common.MIN_HEARTBEAT_INTERVAL = 0.05  # after a failure the driver looks for the server twice a second
    party = Party(given["url"], given["app"], Path(given["ledger"]))
    with party.app:
        {"run": party.run, "submit": party.submit}[given["role"]]()


if __name__ == "__main__":
    main()
