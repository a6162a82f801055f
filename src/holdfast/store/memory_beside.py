"""What lies beside the invocations in memory: payloads, the roster, executions of services, paused queues, entries."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.lifecycle.queues import MOST_OPERATIONS, QueuePause
from holdfast.lifecycle.records import Entry, Piece, RunnerRecord, StoredPayload, WorkerRecord
from holdfast.lifecycle.slots import Execution, ExecutionStatus


class MemoryBeside:
    """The part of `holdfast.store.contract.Store` that is not about invocations."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runners: dict[tuple[str, str], RunnerRecord] = {}
        self._executions: dict[tuple[str, str], Execution] = {}
        self._entries: dict[tuple[str, str, str], Entry] = {}
        self._payloads: dict[tuple[str, str], tuple[float, StoredPayload]] = {}
        self._pieces: dict[tuple[str, str, int], tuple[float, Piece]] = {}
        self._pauses: dict[tuple[str, str], QueuePause] = {}
        self._paused_by: dict[tuple[str, str], list[str]] = {}  # the last operations on each queue
        self._lock = threading.Lock()  # an app has one loop, but two apps may share a store in a test

    def now(self) -> float:
        return self._clock.now()

    def clock_error(self) -> float:
        return 0.0

    async def pause_queue(self, pause: QueuePause) -> QueuePause | None:
        with self._lock:
            queue = (pause.app, pause.name)
            if queue not in self._pauses and self._is_new(queue, pause.operation):
                self._pauses[queue] = pause
            return self._pauses.get(queue)

    async def resume_queue(self, app: str, name: str, operation: str) -> bool:
        with self._lock:
            if operation in self._paused_by.get((app, name), ()):
                return True
            return self._pauses.pop((app, name), None) is not None and self._is_new((app, name), operation)

    def _is_new(self, queue: tuple[str, str], operation: str) -> bool:
        """Whether it was not carried out before; from now on it was."""
        before = self._paused_by.get(queue, [])
        if operation in before:
            return False
        self._paused_by[queue] = [*before, operation][-MOST_OPERATIONS:]
        return True

    async def pauses(self, app: str) -> Sequence[QueuePause]:
        with self._lock:
            return sorted((p for p in self._pauses.values() if p.app == app), key=lambda pause: pause.name)

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        with self._lock:
            there = [(app, digest) in self._payloads for digest in digests]
            for digest in itertools.compress(digests, there):
                self._payloads[app, digest] = (self.now(), self._payloads[app, digest][1])
            return there

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        with self._lock:
            self._pieces[app, digest, number] = (self.now(), piece)

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        with self._lock:
            self._payloads.update({(app, payload.digest): (self.now(), payload) for payload in payloads})

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        with self._lock:
            return self._payloads.get((app, digest), (0.0, None))[1]

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        with self._lock:
            return self._pieces.get((app, digest, number), (0.0, None))[1]

    async def enrol(self, runner: RunnerRecord) -> None:
        with self._lock:
            self._runners[runner.app, runner.id] = runner

    async def heartbeat(
        self,
        app: str,
        runner_id: str,
        workers: Sequence[WorkerRecord] = (),
        *,
        ticks: bool = True,
        draining: bool = False,
    ) -> RunnerRecord | None:
        with self._lock:
            runner = self._runners.get((app, runner_id))
            if runner is None:
                return None
            facts = {
                "heartbeat_at": self.now(),
                "workers": tuple(workers),
                "can_run_atomic_service": ticks,
                "draining": draining,
            }
            fresh = self._runners[app, runner_id] = replace(runner, **facts)
            return fresh

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        with self._lock:
            mine = sorted(
                (runner for runner in self._runners.values() if runner.app == app),
                key=lambda runner: (runner.heartbeat_at, runner.id),
            )
            ages = [(runner, self.now() - runner.heartbeat_at) for runner in mine]
            return ages[:1] + [each for each in ages[1:] if each[1] < -1.0]

    async def declare_dead(self, runner: RunnerRecord) -> bool:
        with self._lock:
            there = self._runners.get((runner.app, runner.id))
            if there is None or there.heartbeat_at != runner.heartbeat_at:
                return False
            del self._runners[runner.app, runner.id]
            return True

    async def ask_runner(
        self, app: str, runner_id: str, *, wish: str | None = None, sits_out_until: float | None = None
    ) -> bool:
        with self._lock:
            runner = self._runners.get((app, runner_id))
            if runner is None:
                return False
            asked = {"wish": wish, "sits_out_until": sits_out_until}
            facts = {name: value for name, value in asked.items() if value is not None}
            self._runners[app, runner_id] = replace(runner, **facts)
            return True

    async def leave(self, app: str, runner_id: str) -> None:
        with self._lock:
            self._runners.pop((app, runner_id), None)

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        with self._lock:
            mine = [runner for runner in self._runners.values() if runner.app == app]
            return sorted(mine, key=lambda runner: (runner.started_at, runner.id))

    async def put_execution(self, app: str, execution: Execution) -> Execution | None:
        with self._lock:
            if (app, execution.id) in self._executions:
                return None
            if execution.status is ExecutionStatus.RUNNING:
                for (other_app, _), other in self._executions.items():
                    same = other_app == app and other.service == execution.service
                    if same and other.status is ExecutionStatus.RUNNING:
                        return other
            self._executions[app, execution.id] = execution
            return None

    async def end_execution(self, app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
        with self._lock:
            there = self._executions.get((app, id))
            if there is None:
                return False
            ended = replace(there, status=status, ended_at=at, reason=reason)
            if there.status is ExecutionStatus.RUNNING:
                self._executions[app, id] = ended
            return self._executions[app, id] == ended

    async def executions(self, app: str, service: str, limit: int) -> Sequence[Execution]:
        with self._lock:
            found = [each for (other, _), each in self._executions.items() if other == app and each.service == service]
            return sorted(found, key=lambda each: (each.started_at, each.id), reverse=True)[:limit]

    async def forget_executions(self, app: str, ids: Sequence[str]) -> None:
        with self._lock:
            for id in ids:
                there = self._executions.get((app, id))
                if there is not None and there.status is not ExecutionStatus.RUNNING:
                    del self._executions[app, id]

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        with self._lock:
            name = entry.app, entry.kind, entry.name
            there = self._entries.get(name)
            is_other = over is not None and there is not None and there.body != over.body
            if (there.version if there else 0) == entry.version - 1 and not is_other:
                self._entries[name] = entry
            return self._entries.get(name) == entry

    async def entries(self, app: str, kind: str, names: Sequence[str] | None = None) -> Sequence[Entry]:
        with self._lock:
            found = [entry for entry in self._entries.values() if (entry.app, entry.kind) == (app, kind)]
        return sorted((e for e in found if names is None or e.name in names), key=lambda entry: entry.name)

    async def due_entries(self, app: str, kind: str, limit: int) -> Sequence[Entry]:
        dated = [(e.due_at, e.name, e) for e in await self.entries(app, kind) if e.due_at is not None]
        return [entry for _, _, entry in sorted(dated, key=lambda each: each[:2])][:limit]

    async def latest_entries(self, app: str, kind: str, limit: int, before: str | None = None) -> Sequence[Entry]:
        found = [entry for entry in await self.entries(app, kind) if before is None or entry.name < before]
        return found[::-1][:limit]

    def _remove_expired_entries(self, app: str, at: float, limit: int) -> int:
        dated = [(e.keep_until, name) for name, e in self._entries.items() if e.app == app and e.keep_until is not None]
        gone = sorted(each for each in dated if each[0] <= at)[:limit]
        for _, name in gone:
            del self._entries[name]
        return len(gone)

    async def remove_entry(self, entry: Entry) -> bool:
        with self._lock:
            name = entry.app, entry.kind, entry.name
            there = self._entries.get(name)
            if there is None or (there.version, there.body) != (entry.version, entry.body):
                return False
            del self._entries[name]
            return True
