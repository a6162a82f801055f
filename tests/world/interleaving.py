"""Servers whose calls to one store are interleaved as a test says, and lose their replies as it says.

The store is the real one in memory. Each call of a server waits for its turn; a reply that is lost was carried out, and
a call that is lost was not. Also an independent judge of logs, which knows nothing of the World's rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from tests.world.worlds import Server

from holdfast.errors import StoreUnavailable
from holdfast.model.log import Appended, Page
from holdfast.store.contract import Store
from holdfast.world.errors import WorldError

WRITES = frozenset({"insert", "append", "apply", "put_entry", "remove_entry"})
READS = frozenset({"read_log", "get", "entries", "find"})
CARRIED_OUT, LOST, UNANSWERED = range(3)


class Turns:
    """Calls that wait, and the pages in the order in which they were stored."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices or [0]
        self._next = 0
        self.waiting: list[tuple[str, asyncio.Future[int]]] = []
        self.pages: list[Page] = []
        self.faults = 0

    def choose(self, count: int) -> int:
        self._next += 1
        return self._choices[self._next % len(self._choices)] * (self._next // len(self._choices) + 1) % count

    async def drive(self, work: Sequence[Coroutine[Any, Any, Any]]) -> None:
        tasks = [asyncio.create_task(each) for each in work]
        while not all(task.done() for task in tasks):
            for _ in range(4):
                await asyncio.sleep(0)
            if self.waiting:
                name, turn = self.waiting.pop(self.choose(len(self.waiting)))
                fault = (CARRIED_OUT,) * 6 + (LOST, UNANSWERED)
                turn.set_result(fault[self.choose(8)] if name in WRITES and self.faults < 12 else CARRIED_OUT)
        for task in tasks:
            task.result()


class InTurns:
    """A store, for one server."""

    def __init__(self, store: Store, turns: Turns) -> None:
        self._store, self._turns = store, turns

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in WRITES | READS:
            return method

        async def call(*args: Any, **fields: Any) -> Any:
            turn = asyncio.get_running_loop().create_future()
            self._turns.waiting.append((name, turn))
            fault = await turn
            self._turns.faults += fault != CARRIED_OUT
            if fault == LOST:
                raise StoreUnavailable("the call was lost")
            answer = await method(*args, **fields)
            if name == "append":
                for page, verdict in zip(args[0], answer, strict=True):
                    if isinstance(verdict, Appended) and page not in self._turns.pages:
                        self._turns.pages.append(page)
            if fault == UNANSWERED:
                raise StoreUnavailable("the reply was lost")
            return answer

        return call


Asked = tuple[str, str, str | None, dict[str, Any]]
"""A run, an event type, a correlation id and data."""


async def write(server: Server, name: str, asked: Sequence[Asked]) -> list[tuple[Asked, Any]]:
    """Write events one after another, each until there is an answer that is no outage. Return the answers."""
    answers: list[tuple[Asked, Any]] = []
    for number, (run, kind, call, data) in enumerate(asked):
        event = {"eventType": kind, "correlationId": call, "eventData": data, "specVersion": 5}
        event = {field: value for field, value in event.items() if value is not None}
        while True:
            try:
                answer: Any = await server.storage.events_create(
                    run_id=run, event=event, operation_id=f"{name}-{number}"
                )
            except WorldError as error:
                if error.status == 503:
                    continue
                answer = error
            answers.append(((run, kind, call, data), answer))
            break
    return answers


def forbidden(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return what in this log is against the contract."""
    wrong: list[str] = []
    run, steps, hooks, waits = "", dict[str, str](), dict[str, str](), dict[str, str]()
    for number, event in enumerate(events, 1):
        kind, call = event["eventType"], event.get("correlationId", "")
        before = {"step": steps, "hook": hooks, "wait": waits}.get(kind.partition("_")[0], {}).get(call)
        is_over = run in ("completed", "failed", "cancelled")
        may = {
            "run_created": run == "" and number == 1,
            "run_started": run == "pending",
            "run_completed": bool(run) and not is_over,
            "run_failed": bool(run) and not is_over,
            "run_cancelled": bool(run) and not is_over,
            "attr_set": bool(run) and not is_over,
            "step_created": before is None and not is_over,
            "step_started": before in ("pending", "running") and not (is_over and before == "pending"),
            "step_retrying": before in ("pending", "running") and not (is_over and before == "pending"),
            "step_completed": before in ("pending", "running") and not (is_over and before == "pending"),
            "step_failed": before in ("pending", "running") and not (is_over and before == "pending"),
            "hook_created": before is None and not is_over,
            "hook_conflict": before is None and not is_over,
            "hook_received": before == "open" and not is_over,
            "hook_disposed": before == "open" and not is_over,
            "wait_created": before is None and not is_over,
            "wait_completed": before == "waiting" and not is_over,
        }
        if event["eventId"] != f"evnt_{number:026d}" or not may[kind]:
            wrong.append(f"{number}: {kind} of {call or 'the run'}, which is {before or run}")
        after = {
            "run_created": "pending",
            "run_started": "running",
            "step_created": "pending",
            "step_started": "running",
            "step_retrying": "pending",
            "hook_created": "open",
            "hook_received": "open",
            "wait_created": "waiting",
        }.get(kind, kind.partition("_")[2])
        if kind.startswith("run"):
            run = after
        elif kind != "attr_set" and kind != "hook_conflict":
            {"step": steps, "hook": hooks, "wait": waits}[kind.partition("_")[0]][call] = after
    return wrong
