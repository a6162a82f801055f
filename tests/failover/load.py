"""A load on the replica set: runners and a submitter, each a process of its own, and the verdict over what they did."""

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
from typing import Any

from pymongo import MongoClient
from tests.failover.ledger import ACCEPTED, BEGAN, QUIET, READY, SEEN, UNKNOWN, Event, Reader
from tests.failover.verdict import Dump, violations
from tests.store.mongo.tools import database_of, with_options
from tests.support.patience import patient

from holdfast.store.mongo.sentinels import NO_SENTINEL

LOADS = "loads"  # the database of all loads; each is an app of its own
CLIENT = "load"  # the name by which fail points know the clients of a load

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = patient(60)
_END_SECONDS = patient(60)


class Load:
    """`go` starts it, `progress` waits for more of it, `verdict` lets it come to rest and judges.

    It can go on after that: to start the processes is most of what a load costs.
    """

    def __init__(
        self, url: str, folder: Path, *, runners: int = 2, write_concern: str | int = "majority", hasty: bool = False
    ) -> None:
        url = with_options(url, appname=CLIENT)
        self.url = with_options(url, serverMonitoringMode="poll") if hasty else url
        self.app = f"load-{secrets.token_hex(4)}"
        self.hasty = hasty
        self._folder = folder
        self._write_concern = write_concern
        self._roles = ["submit", *["run"] * runners]
        self._parties: list[subprocess.Popen[bytes]] = []
        self._ledgers = [folder / f"{number}.jsonl" for number in range(len(self._roles))]
        self._reader = Reader(self._ledgers)
        self._since = 0.0  # when it last began to go
        self.is_sound = False  # it rests, and the verdict was good

    # --- the processes

    def _start(self) -> None:
        for number, role in enumerate(self._roles):
            given = {
                "role": role,
                "url": self.url,
                "app": self.app,
                "ledger": str(self._ledgers[number]),
                "write_concern": self._write_concern,
                "hasty": self.hasty,
            }
            command = [sys.executable, "-m", "tests.failover.party", json.dumps(given)]
            with open(self._folder / f"{number}.log", "wb") as log:
                party = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=_ROOT)
            self._parties.append(party)
        self._wait(lambda: self.count(READY) == len(self._roles) - 1, _START_SECONDS, "the runners are ready")

    def finish(self) -> None:
        """Let everybody end what they have begun, and leave."""
        for party in self._parties:
            assert party.stdin is not None
            party.stdin.close()
        codes = [party.wait(timeout=_END_SECONDS) for party in self._parties]
        self._parties = []
        assert not any(codes), f"the parties ended with {codes}"

    def abort(self) -> None:
        """End everybody now, with everything that is under way."""
        for party in self._parties:
            party.kill()
            party.wait()
            assert party.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                party.stdin.close()
        self._parties = []

    def _tell(self, line: str) -> None:
        submitter = self._parties[0].stdin
        assert submitter is not None
        submitter.write(f"{line}\n".encode())
        submitter.flush()

    def _wait(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            dead = [role for role, party in zip(self._roles, self._parties, strict=True) if party.poll() is not None]
            assert not dead, f"{dead} ended by themselves"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    def show_logs(self) -> None:
        """Print the last lines of each party's log, for somebody who looks for a reason."""
        for number, role in enumerate(self._roles):
            lines = (self._folder / f"{number}.log").read_text(errors="replace").splitlines()[-40:]
            print(f"--- {role} {number}", *lines, sep="\n")

    # --- while it runs

    @property
    def events(self) -> list[Event]:
        return self._reader.events

    def count(self, what: str) -> int:
        """How many such lines there are since it last began to go."""
        return len([event for event in self.events if event["what"] == what and event["at"] > self._since])

    def go(self) -> None:
        """From now on there is work. Returns when some of it is done."""
        if not self._parties:
            self._start()
        self._since, self.is_sound = time.monotonic(), False
        self._tell("go")
        self.progress(5)

    def progress(self, results: int = 20, seconds: float = patient(60.0)) -> None:
        """Wait until clients have got so many results of what is submitted from now on."""
        now = time.monotonic()

        def enough() -> bool:
            events = [event for event in self.events if event["at"] > now]
            fresh = {id for event in events if event["what"] == ACCEPTED for id in event["ids"]}
            return len([event for event in events if event["what"] == SEEN and event["id"] in fresh]) >= results

        self._wait(enough, seconds, f"{results} more results")

    def accepts(self, count: int, seconds: float = patient(30.0)) -> None:
        """Wait until so many more submits have returned."""
        before = self.count(ACCEPTED)
        self._wait(lambda: self.count(ACCEPTED) >= before + count, seconds, f"{count} more submits return")

    # --- the end

    def verdict(self, *, reruns_excused: int = 0) -> list[str]:
        """Submit nothing more, wait until clients know the ends of everything, and tell what is wrong."""
        before = self.count(QUIET)
        self._tell("pause")
        try:
            self._wait(lambda: self.count(QUIET) > before, _END_SECONDS, "all results")
        except AssertionError as error:
            return [str(error), *self.judge(reruns_excused)]
        found = self.judge(reruns_excused)
        self.is_sound = not found
        return found

    def judge(self, reruns_excused: int = 0) -> list[str]:
        """What is wrong as it is now. Nothing may be under way."""
        living = {event["id"] for event in self.events if event["what"] == READY} if self._parties else set()
        client: MongoClient[dict[str, Any]] = MongoClient(self.url, readConcernLevel="majority")
        with client:
            database, ours = client[database_of(self.url)], {"app": self.app}
            dump = Dump(
                invocations=list(database.holdfast_invocations.find(ours | NO_SENTINEL)),
                runners=list(database.holdfast_runners.find(ours)),
                quarantine=list(database.holdfast_quarantine.find(ours)),
                payloads={
                    found["_id"].rpartition("|")[2] for found in database.holdfast_payloads.find(ours, {"_id": True})
                },
            )
        return violations(dump, self.events, living=living, reruns_excused=reruns_excused)

    def summary(self) -> str:
        """A line for whoever reads the output of a long run."""
        events = [event for event in self.events if event["at"] > self._since]
        pauses = _gaps([event["at"] for event in events if event["what"] == SEEN])
        return (
            f"{sum(len(event['ids']) for event in events if event['what'] == ACCEPTED)} accepted, "
            f"{self.count(UNKNOWN)} submits of unknown outcome, {self.count(BEGAN)} executions, "
            f"longest pause between results {max(pauses, default=0):.1f} s"
        )


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
