"""Servers of a World that die between two writes, while an application runs workflows on them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.session import PATIENCE_SECONDS, Process, Session
from tests.world.flow import Flow

POINTS_OF_DELIVERIES = ("submit.after", "claim.after", "user.before", "user.after", "settle.before", "settle.after")
"""Points that a server comes to with each message, as workers do with each call."""


class Servers:
    """Servers of one story, by their addresses."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started: list[tuple[Process, str]] = []
        self._starting = threading.Lock()
        self.replaces = False  # a server is started where all are dead

    def start(self, **more: str) -> Process:
        """Start a server, and wait until it says where it is."""
        process = self._session.start("holdfast", "world", "serve", "--port", "0", "--json", **more)
        self._session.until(lambda: address_of(process) or process.code is not None, "a server says its address")
        self._started.append((process, address_of(process)))
        return process

    def addresses(self) -> list[str]:
        if self.replaces:
            with self._starting:
                if not self._alive():
                    self.start()
        return self._alive()

    def _alive(self) -> list[str]:
        return [address for process, address in self._started if process.code is None]


def address_of(process: Process) -> str:
    lines = process.log.read_text(errors="replace").splitlines()
    return next((str(json.loads(line)["url"]) for line in lines if line.startswith('{"url"')), "")


@contextmanager
def flowing(session: Session) -> Iterator[tuple[Servers, Flow]]:
    servers = Servers(session)
    flow = Flow(servers.addresses, session.ledgers_folder)
    with flow.application:
        yield servers, flow


def ended(session: Session, flow: Flow, runs: list[str]) -> None:
    """Approve the runs, and wait for their ends."""
    waiting = list(runs)

    def approved() -> bool:
        waiting[:] = [run for run in waiting if not flow.approve(run)]
        return not waiting

    session.until(approved, "the runs wait for approval", 2 * PATIENCE_SECONDS)
    session.until(
        lambda: all(flow.call("runs.get", runId=run)["status"] == "completed" for run in runs),
        "the runs end",
        2 * PATIENCE_SECONDS,
    )


def serving(session: Session, point: str) -> None:
    """A server dies at its point; another one is there, and goes on."""
    with flowing(session) as (servers, flow):
        with flow.witness.fault("kill"):  # from now on at any time
            victim = servers.start(HOLDFAST_CRASH_AT=point)
            servers.start()
            runs = [flow.start(number) for number in range(2)]
            ended(session, flow, runs)
            session.until(lambda: victim.code is not None, "the victim dies")
        assert victim.code == -signal.SIGKILL, f"it ended with {victim.code}"
        flow.check(runs, session.app)


def serving_alone(session: Session, point: str) -> None:
    """The only server dies at its point, and a new one is started as soon as a client misses it."""
    with flowing(session) as (servers, flow):
        with flow.witness.fault("kill"):
            victim = servers.start(HOLDFAST_CRASH_AT=point)
            servers.replaces = True
            runs = [flow.start(number) for number in range(2)]
            ended(session, flow, runs)
        assert victim.code == -signal.SIGKILL, f"it ended with {victim.code}"
        flow.check(runs, session.app)
