"""The evidence put in order, once, so that each check can ask short questions: who owned this when, what ran in which
epoch, which fault touched it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import cached_property
from math import inf
from typing import Any

import msgspec
from tests.support.checker.evidence import Bounds, Dump, Fault, FaultKind, Faults
from tests.support.witness import Event, Ledgers, What

from holdfast.model.records import HistoryEntry, InvocationRecord
from holdfast.model.status import OWNED, TABLE, Status

Body = Callable[..., Coroutine[Any, Any, Any]]


class Tenure(msgspec.Struct, frozen=True, kw_only=True):
    """The time in which one owner had an invocation, by its history."""

    id: str
    owner: str
    epoch: int
    since: float
    until: float  # inf: still
    ran: bool  # it was RUNNING in it
    first: HistoryEntry
    release: HistoryEntry | None


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One run of user code, by the ledgers."""

    start: Event
    end: Event | None
    until: float  # its end, or its process's; inf if neither is known
    epoch: int | None  # as it said, or as far as the history tells


class Case:
    """Everything that is known about a run."""

    def __init__(
        self, dump: Dump, ledgers: Ledgers, faults: Faults, bounds: Bounds, bodies: Mapping[str, Body] | None = None
    ) -> None:
        self.dump = dump
        self.bodies = bodies or {}  # the code of workflows, by task
        self.ledgers = ledgers
        self.faults = faults
        self.bounds = bounds
        self.records: dict[str, InvocationRecord] = {record.id: record for record in dump.records}
        self._events: dict[What, list[Event]] = defaultdict(list)
        for event in sorted(ledgers.events, key=lambda event: event.at):
            self._events[event.what].append(event)

    def events(self, kind: What) -> list[Event]:
        return self._events.get(kind, [])

    @cached_property
    def last(self) -> float:
        """The time of the last line."""
        return max((event.at for event in self.ledgers.events), default=0.0)

    # --- names

    @cached_property
    def ids_by_token(self) -> dict[str, list[str]]:
        """Which invocations a token stands for: those that were acknowledged, and those that have it as an argument."""
        known = {event.token for event in self.ledgers.events if event.token is not None}
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for event in self.events(What.SUBMIT_OK):
            if event.token is not None and event.id is not None:
                found[event.token][event.id] = None
        for id, token in self.dump.tokens.items():
            if token in known:
                found[token][id] = None
        return {token: list(ids) for token, ids in found.items()}

    def id_of(self, event: Event) -> str | None:
        """The invocation that an event is about."""
        if event.id is not None or event.token is None:
            return event.id
        ids = self.ids_by_token.get(event.token, ())
        return next((id for id in ids if id in self.records), next(iter(ids), None))

    @cached_property
    def names_of_pid(self) -> dict[int, set[str]]:
        """The runners and workers that a process was."""
        names: dict[int, set[str]] = defaultdict(set)
        for event in self.events(What.RUNNER_START):
            if event.owner is not None:
                names[event.pid].add(event.owner)
        for runner in self.dump.runners:
            names[runner.pid].add(runner.id)
            for worker in runner.workers:
                names[worker.pid].add(f"{runner.id}/{worker.id}")
        for fault in self.faults.all:
            if fault.pid is not None and fault.owner is not None:
                names[fault.pid].add(fault.owner)
        return names

    def names_in(self, fault: Fault) -> set[str]:
        """The runners and workers that a fault struck."""
        own = {fault.owner} if fault.owner is not None else set()
        return own | (self.names_of_pid.get(fault.pid, set()) if fault.pid is not None else set())

    # --- time

    def time_of(self, entry: HistoryEntry) -> float:
        """When a change was built, in elapsed time."""
        return entry.at - self.dump.offset

    @cached_property
    def healed_at(self) -> float:
        """From then on nothing was in the way."""
        return max((fault.ended for fault in self.faults.all), default=-inf)

    @cached_property
    def slack(self) -> float:
        """How much the times of histories may be off. If a clock was set, nothing is concluded from them."""
        shifted = any(fault.kind is FaultKind.CLOCK for fault in self.faults.all)
        return inf if shifted else self.bounds.tolerance_seconds

    @cached_property
    def end_of_pid(self) -> dict[int, float]:
        """When processes were killed."""
        kills = [fault for fault in self.faults.all if fault.kind is FaultKind.KILL and fault.pid is not None]
        return {fault.pid: fault.ended for fault in reversed(kills) if fault.pid is not None}

    def joined(self, start: What, end: What) -> list[tuple[Event, Event | None, float]]:
        """Starts with their ends, and when each was over: with its end, or with its process."""
        ends = {event.span: event for event in self.events(end)}
        pairs = [(event, ends.get(event.span)) for event in self.events(start)]
        return [(s, e, e.at if e is not None else self.end_of_pid.get(s.pid, inf)) for s, e in pairs]

    # --- who owned what

    @cached_property
    def tenures(self) -> dict[str, list[Tenure]]:
        return {record.id: list(self._tenures(record)) for record in self.dump.records}

    def _tenures(self, record: InvocationRecord) -> Iterator[Tenure]:
        first: HistoryEntry | None = None
        ran = False

        def closed(release: HistoryEntry | None) -> Iterator[Tenure]:
            if first is not None and first.owner is not None:
                yield Tenure(
                    id=record.id,
                    owner=first.owner,
                    epoch=first.epoch,
                    since=self.time_of(first),
                    until=inf if release is None else self.time_of(release),
                    ran=ran,
                    first=first,
                    release=release,
                )

        for entry in record.history:
            if TABLE[entry.status].acquires_ownership or TABLE[entry.status].releases_ownership:
                yield from closed(entry)
                first, ran = (entry if TABLE[entry.status].acquires_ownership else None), False
            ran = ran or entry.status is Status.RUNNING
        yield from closed(None)

    def tenure_of(self, event: Event) -> Tenure | None:
        """In which tenure something happened: the one of its epoch; if it told none, the only one of its process, or
        the only one at all.
        """
        tenures = self.tenures.get(self.id_of(event) or "", [])
        names = self.names_of_pid.get(event.pid)
        if event.epoch is not None:
            tenures = [tenure for tenure in tenures if tenure.epoch == event.epoch]
        elif names:
            tenures = [tenure for tenure in tenures if any(covers(name, tenure.owner) for name in names)]
        return tenures[0] if len(tenures) == 1 else None

    @cached_property
    def tenures_by_owner(self) -> dict[str, list[Tenure]]:
        found: dict[str, list[Tenure]] = defaultdict(list)
        for several in self.tenures.values():
            for tenure in several:
                found[tenure.owner].append(tenure)
        return found

    # --- what ran

    @cached_property
    def executions(self) -> dict[str, list[Execution]]:
        """By invocation, in the order of their starts; those of invocations that are not there too."""
        found: dict[str, list[Execution]] = defaultdict(list)
        for start, end, until in self.joined(What.EXEC_START, What.EXEC_END):
            id = self.id_of(start)
            if id is not None:
                found[id].append(Execution(start=start, end=end, until=until, epoch=start.epoch))
        return {id: self._with_epochs(id, several) for id, several in found.items()}

    def _with_epochs(self, id: str, several: list[Execution]) -> list[Execution]:
        """Where an execution did not say its epoch: that of the run of the same process, if there is no doubt."""
        runs = [tenure for tenure in self.tenures.get(id, ()) if tenure.ran]
        by_pid: dict[int, list[Execution]] = defaultdict(list)
        for execution in several:
            by_pid[execution.start.pid].append(execution)
        epochs: dict[str, int | None] = {}
        for pid, mine in by_pid.items():
            names = self.names_of_pid.get(pid)
            if names:
                own = [run for run in runs if any(covers(name, run.owner) for name in names)]
                epochs |= _matched(mine, own)
        if not epochs:
            epochs = _matched(several, runs)
        return [
            execution
            if execution.epoch is not None
            else msgspec.structs.replace(execution, epoch=epochs.get(execution.start.span))
            for execution in several
        ]

    @cached_property
    def broken_off(self) -> dict[int, list[tuple[str, Execution]]]:
        """The executions without an end, with their invocations, by process."""
        found: dict[int, list[tuple[str, Execution]]] = defaultdict(list)
        for id, several in self.executions.items():
            for execution in several:
                if execution.end is None:
                    found[execution.start.pid].append((id, execution))
        return found

    @cached_property
    def witnessed_tasks(self) -> set[str]:
        """The tasks that write down their executions."""
        return {self.records[id].task for id in self.executions if id in self.records}

    # --- which fault touched what

    def touching(self, id: str) -> list[Fault]:
        """The faults because of which an invocation may have been run again: its owner was struck while it had it."""
        return [fault for fault in self._explaining if self._touches(fault, id)]

    @cached_property
    def _explaining(self) -> list[Fault]:
        return [fault for fault in self.faults.all if fault.kind.explains_reruns]

    def _touches(self, fault: Fault, id: str) -> bool:
        if id in fault.ids:
            return True
        names = self.names_in(fault)
        return any(
            tenure.since - self.slack <= fault.ended and fault.at <= tenure.until + self.slack
            for tenure in self.tenures.get(id, ())
            if any(covers(name, tenure.owner) for name in names)
        ) or any(
            execution.start.pid == fault.pid and execution.start.at <= fault.ended and fault.at <= execution.until
            for execution in self.executions.get(id, ())
        )


def covers(name: str, owner: str) -> bool:
    """Whether a runner's or worker's name is that owner's, or its runner's."""
    return owner == name or owner.startswith(name + "/")


def _matched(executions: list[Execution], runs: list[Tenure]) -> dict[str, int | None]:
    """The epochs of executions by their spans: as many as there were runs, or all of the one run."""
    if len(runs) == 1:
        runs = runs * len(executions)
    known = len(runs) == len(executions)
    return {execution.start.span: runs[n].epoch if known else None for n, execution in enumerate(executions)}


def left_by_owner(record: InvocationRecord) -> HistoryEntry | None:
    """The last entry, if it was its owner who wrote it: the status before it is one that an owner has to leave."""
    before_last = record.history[-2:-1]
    return record.history[-1] if before_last and before_last[0].status in OWNED else None
