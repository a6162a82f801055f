"""An application that runs workflows as the core of Workflow DevKit does: a replay for each delivery, steps inline.

Its calls are repeated with the same operation id until some server answers. So a test may kill servers, and ask
afterwards what became of the runs. A run reserves, charges, waits for an approval, sleeps, and mails.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.patience import patient
from tests.world.application import Application, Delivered
from tests.world.interleaving import forbidden
from tests.world.serving import Client

from holdfast.ids import derived_id
from holdfast.world.errors import WorldError
from holdfast.world.records import run_name

NAME = "workflow//./shop.ts//checkout"
STEPS = ("reserve", "charge", "mail")
SLEEP_SECONDS = 0.3
_GONE = (OSError, http.client.HTTPException)


class Flow:
    """The application, and clients of it. `servers` returns the addresses of servers that may be alive."""

    def __init__(self, servers: Callable[[], list[str]], *, loses_replies: bool = False) -> None:
        self.servers = servers
        self._loses_replies = loses_replies  # each write is repeated, as if its answer had been lost
        self.application = Application(self._answer)
        self.ran: Counter[tuple[str, str]] = Counter()  # steps, by run and name
        self.deliveries: Counter[str] = Counter()
        self.is_down = False
        self._lock = threading.Lock()
        self._of_run: dict[str, threading.Lock] = {}
        self._made = 0

    def call(self, method: str, **fields: Any) -> Any:
        """Call any server until one answers. Raises `WorldError`, but not for a store that does not answer now."""
        deadline = time.monotonic() + patient(60)
        while True:
            for url in self.servers():
                try:
                    if self._loses_replies and "operationId" in fields:
                        with contextlib.suppress(WorldError):
                            Client(url).call(method, **fields)
                    return Client(url).call(method, **fields)
                except WorldError as error:
                    if error.status < 500:
                        raise
                except _GONE:
                    pass
            assert time.monotonic() < deadline, f"no server answers {method}"
            time.sleep(0.02)

    def create(self, run: str, kind: str, call: str | None = None, *, once: str = "", **data: Any) -> Any:
        with self._lock:
            self._made += 1
            operation = once or f"flow {id(self)} {self._made}"
        event: dict[str, Any] = {"eventType": kind, "specVersion": 5, "eventData": data}
        event |= {} if call is None else {"correlationId": call}
        return self.call("events.create", runId=run, event=event, operationId=operation)

    def start(self, number: int) -> str:
        """Start a run as a client does: an event and a message."""
        run = run_name(derived_id(f"{id(self)} {number}", at=time.time()))
        self.create(run, "run_created", deploymentId="dpl", workflowName=NAME, input=b"devl[[1],1]", once=f"make {run}")
        self.send(run, f"start {run}")
        return run

    def send(self, run: str, operation: str) -> None:
        fields: dict[str, Any] = {"queueName": f"__wkf_workflow_{NAME}", "message": {"runId": run}}
        self.call("queue", **fields, operationId=operation, baseUrl=self.application.url)

    def approve(self, run: str) -> bool:
        """Give the run its payload. Return False if it has no hook yet."""
        given: dict[str, Any] = {"token": f"approve:{run}", "payload": b"devl[true]", "once": f"ok {run}"}
        try:
            self.create(run, "hook_received", f"hook_{run}", **given)
        except WorldError as error:
            if error.status == 404:
                return False
            raise
        self.send(run, f"approved {run}")
        return True

    # --- deliveries

    def _answer(self, delivered: Delivered) -> tuple[int, bytes]:
        run = delivered.message["runId"]
        self.deliveries[run] += 1
        if self.is_down:
            return 503, b"down"
        try:
            with self._lock:
                one_at_a_time = self._of_run.setdefault(run, threading.Lock())
            with one_at_a_time:
                seconds = self._replay(run)
        except WorldError as error:
            if error.status == 410:
                return 200, b""  # the run has ended
            return 500, str(error).encode()
        return 200, b"" if seconds is None else b'{"timeoutSeconds": %f}' % seconds

    def _replay(self, run: str) -> float | None:
        """Take a run as far as it goes. Return after how many seconds it wants to go on; None: it ended or waits."""
        self.create(run, "run_started")
        for name in STEPS[:2]:
            self._step(run, name)
        known = self._events(run)
        if "hook_created" not in known:
            self._unless_there(run, "hook_created", f"hook_{run}", token=f"approve:{run}")
        if "hook_received" not in self._events(run):
            return None
        if "hook_disposed" not in known:
            self._unless_there(run, "hook_disposed", f"hook_{run}")
        if "wait_created" not in known:
            due = dt.datetime.fromtimestamp(time.time() + SLEEP_SECONDS, dt.UTC)
            self._unless_there(run, "wait_created", "wait_1", resumeAt=due)
        wait = self._events(run)["wait_created"]
        if (left := wait["eventData"]["resumeAt"].timestamp() - time.time()) > 0:
            return left
        self._unless_there(run, "wait_completed", "wait_1")
        self._step(run, STEPS[2])
        self.call("streams.close", runId=run, name="out", operationId=f"close {run}")
        self._unless_there(run, "run_completed", output=b"devl[1]")
        return None

    def _step(self, run: str, name: str) -> None:
        if ("step_completed", name) in self._events(run):
            return
        try:
            self.create(run, "step_started", name, stepName=f"step//./shop.ts//{name}", input=b"devl[[],1]")
        except WorldError as error:
            if error.status != 409:
                raise
            if ("step_completed", name) in self._events(run):
                return
            self.create(run, "step_started", name)
        self.ran[run, name] += 1
        self.call("streams.write", runId=run, name="out", chunks=[name], operationId=f"chunk {run} {name}")
        self._unless_there(run, "step_completed", name, result=b"devl[1]")

    def _unless_there(self, run: str, kind: str, call: str | None = None, **data: Any) -> None:
        try:
            self.create(run, kind, call, **data)
        except WorldError as error:
            if error.status != 409:
                raise

    def _events(self, run: str) -> dict[Any, Any]:
        events = self.call("events.list", runId=run)["data"]
        known = {event["eventType"]: event for event in events}
        return known | {(event["eventType"], event.get("correlationId")): event for event in events}

    # --- the verdict

    def check(self, runs: list[str], *, faults: int) -> None:
        """Assert that each run is whole: ended once, with its steps in order, and none run again without a fault."""
        for run in runs:
            events = self.call("events.list", runId=run)["data"]
            assert forbidden(events) == [], run
            kinds = Counter((event["eventType"], event.get("correlationId")) for event in events)
            once = {
                ("run_created", None),
                ("run_started", None),
                ("run_completed", None),
                ("hook_created", f"hook_{run}"),
            }
            once |= {("wait_created", "wait_1"), ("wait_completed", "wait_1"), ("hook_received", f"hook_{run}")}
            once.add(("hook_disposed", f"hook_{run}"))
            for kind in once | {(kind, name) for name in STEPS for kind in ("step_created", "step_completed")}:
                assert kinds[kind] == 1, (run, kind, kinds[kind])
            assert [event["eventId"] for event in events] == [f"evnt_{n:026d}" for n in range(1, len(events) + 1)]
            chunks = self.call("streams.getChunks", runId=run, name="out")
            assert ([chunk["data"] for chunk in chunks["data"]], chunks["done"]) == (
                [name.encode() for name in STEPS],
                True,
            )
            for name in STEPS:
                assert 1 <= self.ran[run, name] <= 1 + faults, (run, name, self.ran[run, name])
            assert self.call("runs.get", runId=run)["status"] == "completed"
