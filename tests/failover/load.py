"""A load on the replica set: runners and a submitter, each a process of its own, and the verdict when all is over."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from pymongo import MongoClient
from tests.failover.ledger import ACCEPTED, BEGAN, READY, SEEN, UNKNOWN, Event, Reader
from tests.failover.verdict import Dump, violations
from tests.mongo.tools import database_of, with_options

_ROOT = Path(__file__).resolve().parents[2]
_FINISH_SECONDS = 60


class Load:
    """Entered, it runs. `progress` waits for more of it, `finish` ends it, `verdict` judges."""

    def __init__(
        self, url: str, folder: Path, *, runners: int = 2, write_concern: str | int = "majority", hasty: bool = False
    ) -> None:
        self.url = with_options(url, serverMonitoringMode="poll") if hasty else url
        self._hasty = hasty
        self.app = f"load-{secrets.token_hex(4)}"  # so that the loads of all tests can share a database
        self.folder = folder
        self._write_concern = write_concern
        self._roles = ["submit", *["run"] * runners]
        self._parties: list[subprocess.Popen[bytes]] = []
        self._ledgers = [folder / f"{number}.jsonl" for number in range(len(self._roles))]
        self._reader = Reader(self._ledgers)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        for number, role in enumerate(self._roles):
            self._start(number, role)
        self._wait(lambda: self.count(READY) == len(self._roles) - 1, 60, "the runners are ready")
        self.progress(5)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
        if error is not None:
            self._show_logs()

    def abort(self) -> None:
        """End it now, with everything that is under way."""
        for party in self._parties:
            party.kill()
            party.wait()
            assert party.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                party.stdin.close()

    def _start(self, number: int, role: str) -> None:
        given = {
            "role": role,
            "url": self.url,
            "app": self.app,
            "ledger": str(self._ledgers[number]),
            "write_concern": self._write_concern,
            "hasty": self._hasty,
        }
        with open(self.folder / f"{number}.log", "wb") as log:
            command = [sys.executable, "-m", "tests.failover.party", json.dumps(given)]
            self._parties.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=_ROOT))

    def _wait(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            dead = [self._roles[number] for number, party in enumerate(self._parties) if party.poll() is not None]
            assert not dead, f"{dead} ended by themselves"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    def _show_logs(self) -> None:
        for number, role in enumerate(self._roles):
            print(f"--- {role} {number}")
            print("".join((self.folder / f"{number}.log").read_text(errors="replace").splitlines(keepends=True)[-40:]))

    # --- while it runs

    @property
    def events(self) -> list[Event]:
        return self._reader.events

    def count(self, what: str) -> int:
        return sum(event["what"] == what for event in self.events)

    def progress(self, results: int = 20, seconds: float = 60.0) -> None:
        """Wait until clients have got so many more results of what is submitted from now on."""
        now = time.monotonic()

        def enough() -> bool:
            events = self.events
            fresh = {id for event in events if event["what"] == ACCEPTED and event["at"] > now for id in event["ids"]}
            return len([event for event in events if event["what"] == SEEN and event["id"] in fresh]) >= results

        self._wait(enough, seconds, f"{results} more results")

    def accepts(self, count: int = 1, seconds: float = 30.0) -> None:
        """Wait until so many more submits have returned."""
        before = self.count(ACCEPTED)
        self._wait(lambda: self.count(ACCEPTED) >= before + count, seconds, f"{count} more submits return")

    # --- the end

    def finish(self) -> None:
        """Nothing more is submitted; wait until clients have all results, then until the runners have left."""
        for party in self._parties:
            assert party.stdin is not None
            party.stdin.close()
            try:
                code = party.wait(timeout=_FINISH_SECONDS)
            except subprocess.TimeoutExpired:
                pytest.fail(f"a party does not end; the verdict so far: {self.judge()}")
            assert code == 0, f"a party ended with {code}"

    def verdict(self, *, reruns_excused: int = 0) -> list[str]:
        """Everything that is wrong with it. Call it after `finish`."""
        found = self.judge(reruns_excused)
        if found:
            self._show_logs()
        return found

    def judge(self, reruns_excused: int = 0) -> list[str]:
        client: MongoClient[dict[str, Any]] = MongoClient(self.url, readConcernLevel="majority")
        with client:
            database = client[database_of(self.url)]
            dump = Dump(
                invocations=list(database.holdfast_invocations.find({"app": self.app})),
                runners=list(database.holdfast_runners.find({"app": self.app})),
                quarantine=list(database.holdfast_quarantine.find({"app": self.app})),
                payloads={
                    found["_id"].rpartition("|")[2]
                    for found in database.holdfast_payloads.find({"app": self.app}, {"_id": True})
                },
            )
        return violations(dump, self.events, reruns_excused=reruns_excused)

    def summary(self) -> str:
        """A line for whoever reads the output of a long run."""
        events = self.events
        pauses = _gaps([event["at"] for event in events if event["what"] == SEEN])
        return (
            f"{sum(len(event['ids']) for event in events if event['what'] == ACCEPTED)} accepted, "
            f"{self.count(UNKNOWN)} submits of unknown outcome, {self.count(BEGAN)} executions, "
            f"longest pause between results {max(pauses, default=0):.1f} s"
        )


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
