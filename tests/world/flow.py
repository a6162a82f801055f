"""An application that runs workflows as the core of Workflow DevKit does: a replay for each delivery, steps inline.

Its calls are repeated with the same operation id until some server answers. So a test may kill servers, and ask
afterwards what became of the runs. A run reserves, charges, waits for two approvals, sleeps, and mails. What happens is
written to a ledger, for the checker.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import witness
from tests.support.checker import check_worlds, dump_worlds
from tests.support.checker.world_runs import RunLeft
from tests.support.patience import patient
from tests.support.witness import What, Witness, digest_of
from tests.world.application import Application, Delivered
from tests.world.interleaving import forbidden
from tests.world.serving import Client

from holdfast import App
from holdfast.ids import derived_id
from holdfast.world.errors import WorldError
from holdfast.world.records import run_name

NAME = "workflow//./shop.ts//checkout"
STEPS = ("reserve", "charge", "mail")
PAYLOADS = ("first", "second")
SLEEP_SECONDS = 0.3
_GONE = (OSError, http.client.HTTPException)


class Flow:
    """The application, and clients of it. `servers` returns the addresses of servers that may be alive; the ledgers are
    in `folder`.
    """

    def __init__(self, servers: Callable[[], list[str]], folder: Path, *, loses_replies: bool = False) -> None:
        self.servers = servers
        self._folder = folder
        self.witness = Witness.in_folder(folder, "flow")
        self._loses_replies = loses_replies  # each write is repeated, as if its answer had been lost
        self.application = Application(self._answer)
        self.deliveries: Counter[str] = Counter()
        self.is_down = False
        self.may_go_on = threading.Event()  # until then deliveries wait before they do anything
        self.may_go_on.set()
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
        given: dict[str, Any] = {"deploymentId": "dpl", "workflowName": NAME, "input": b"devl[[1],1]"}
        with self.witness.submission(run) as accepted:
            self.create(run, "run_created", once=f"make {run}", **given)
            accepted(run)
        self.send(run, f"start {run}")
        return run

    def send(self, run: str, operation: str) -> None:
        fields: dict[str, Any] = {"queueName": f"__wkf_workflow_{NAME}", "message": {"runId": run}}
        self.call("queue", **fields, operationId=operation, baseUrl=self.application.url)

    def approve(self, run: str) -> bool:
        """Give the run its payloads, one after the other. Return False if it has no hook yet."""
        for name in PAYLOADS:
            if not self._give(run, name):
                return False
        self.send(run, f"approved {run}")
        return True

    def _give(self, run: str, name: str) -> bool:
        token, payload = f"approve:{run}", f'devl["{name} {run}"]'.encode()
        given: dict[str, Any] = {"token": token, "payload": payload, "once": f"{name} {run}"}

        def send() -> None:
            try:
                self.create(run, "hook_received", f"hook_{run}", **given)
            except WorldError as error:
                if error.status == 404:
                    raise LookupError(error.message) from error
                raise

        return self.witness.resume(token, f"{name} {run}", send, digest=digest_of(payload))

    # --- deliveries

    def _answer(self, delivered: Delivered) -> tuple[int, bytes]:
        run = delivered.message["runId"]
        self.deliveries[run] += 1
        if self.is_down:
            return 503, b"down"
        assert self.may_go_on.wait(patient(60))
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
        if self._payloads(run) < len(PAYLOADS):
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
            begun = self.create(run, "step_started", name, stepName=f"step//./shop.ts//{name}", input=b"devl[[],1]")
        except WorldError as error:
            if error.status != 409:
                raise
            if ("step_completed", name) in self._events(run):
                return
            begun = self.create(run, "step_started", name)
        facts: dict[str, Any] = {"id": run, "step": name, "attempt": begun["step"]["attempt"], "epoch": 0}
        with self.witness.step(**facts) as execution:
            for chunk in (chunks := chunks_of(name)):
                named = {"key": "out", "idempotency_key": f"{run} {chunk.decode()}"}
                self.witness.write(What.CHUNK_SAID, **facts, **named, digest=digest_of(chunk))
            self.call("streams.write", runId=run, name="out", chunks=chunks, operationId=f"chunk {run} {name}")
            result = execution.returns(f'devl["{execution.stamp}"]'.encode())
        self._unless_there(run, "step_completed", name, result=result)

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

    def _payloads(self, run: str) -> int:
        """Return how many payloads a replay is shown."""
        found = [each for each in self.call("events.list", runId=run)["data"] if each["eventType"] == "hook_received"]
        for index, event in enumerate(found):
            digest = digest_of(event["eventData"]["payload"])
            self.witness.write(What.PAYLOAD_SEEN, id=run, key=f"approve:{run}", index=index, digest=digest)
        return len(found)

    # --- the verdict

    def check(self, runs: list[str], app: App) -> None:
        """Assert that each run is whole: ended once, with its steps in order; and that the checker finds nothing."""
        read = {run: self._chunks(run) for run in runs}

        async def left() -> dict[str, RunLeft]:
            return await dump_worlds(await app.runtime.engine())

        found = check_worlds(app.runtime.run(left()), witness.read(self._folder))
        assert not found, "\n".join(map(str, found))
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
            once |= {("wait_created", "wait_1"), ("wait_completed", "wait_1")}
            once.add(("hook_disposed", f"hook_{run}"))
            for kind in once | {(kind, name) for name in STEPS for kind in ("step_created", "step_completed")}:
                assert kinds[kind] == 1, (run, kind, kinds[kind])
            assert [event["eventId"] for event in events] == [f"evnt_{n:026d}" for n in range(1, len(events) + 1)]
            assert kinds["hook_received", f"hook_{run}"] == len(PAYLOADS)
            assert [chunk["data"] for chunk in read[run]] == [chunk for name in STEPS for chunk in chunks_of(name)]
            assert self.call("runs.get", runId=run)["status"] == "completed"

    def _chunks(self, run: str) -> list[Any]:
        """Read the whole stream of a run."""
        answer, span = self.call("streams.getChunks", runId=run, name="out"), secrets.token_hex(6)
        assert answer["done"]
        for index, chunk in enumerate(answer["data"]):
            facts = {"span": span, "id": run, "key": "out", "index": index}
            self.witness.write(What.CHUNK_READ, **facts, digest=digest_of(chunk["data"]))
        return list(answer["data"])


def chunks_of(step: str) -> list[bytes]:
    return [f"{step} {number}".encode() for number in range(2)]
