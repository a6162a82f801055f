"""The simulated server, and the line of each process to it.

The server is the memory store. A request travels, is carried out, and its reply travels back; each way takes time, may
be cut, and a sender that hears nothing gives up after a while. So a request may be carried out although its sender
froze, died or gave up meanwhile. Hints travel between processes and may be lost or doubled.

All that happens here is written into a trace, whose hash is the same whenever the seed is, and into the ledger.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from tests.support.checker import Violation
from tests.support.simulation.plan import Weather
from tests.support.simulation.scheduler import Process
from tests.support.witness import Event, What

from holdfast.errors import StoreUnavailable
from holdfast.fleet.services import GATE, execution_of
from holdfast.fleet.slots import ExecutionStatus
from holdfast.model.changes import Change, Lost
from holdfast.model.claims import Claimed
from holdfast.model.records import Entry, Hint, RunnerRecord
from holdfast.store.contract import Ability, Transaction
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock

GIVES_UP_SECONDS = 2.0


_BY_ANYBODY = frozenset({"recovered", "rescued", "woken", "awakened", "amended", "cancelled", "cancelling", "expired"})


class Ledger:
    """What is seen from outside. Its clock is the simulation's."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._spans = 0
        self.events: list[Event] = []

    def span(self) -> str:
        self._spans += 1
        return f"s{self._spans}"

    def write(self, what: What, pid: int, **facts: Any) -> None:
        self.events.append(Event(what=what, at=self._clock.monotonic(), pid=pid, **facts))


class Trace:
    """Every message with its time, as a hash; and as text, if somebody wants to read it."""

    def __init__(self, *, keep: bool) -> None:
        self._hash = hashlib.sha256()
        self._encode = msgspec.msgpack.Encoder(order="deterministic", enc_hook=repr).encode
        self.lines: list[str] | None = [] if keep else None

    def add(self, at: float, process: str, event: str, name: str, said: object) -> None:
        self._hash.update(f"{at:.6f} {process} {event} {name} ".encode() + self._encode(said))
        if self.lines is not None:
            self.lines.append(f"{at:9.4f} {process:6} {event:7} {name} {said!r:.300}")

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class Stamping(MemoryStore):
    """The server's store. Heartbeats may be stamped, and judged, by the clock of whoever asks."""

    off = 0.0  # of that clock; it is set for one call
    shows_all = False

    def now(self) -> float:
        return super().now() + self.off

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        if not self.shows_all:
            return await super().silent(app)
        return [(runner, self.now() - runner.heartbeat_at) for runner in await self.roster(app)]


class Server:
    """Carries out what arrives, and notes what only it can know."""

    def __init__(self, clock: VirtualClock, ledger: Ledger, trace: Trace) -> None:
        self.store = Stamping(clock)
        self.clock = clock
        self.ledger = ledger
        self.trace = trace
        self.outages = 0  # that last
        self.is_over = False
        self.context = contextvars.Context()
        self.refuted: list[Violation] = []
        self.declared: list[tuple[float, str]] = []
        self._ends: dict[tuple[str, int, str], str] = {}  # of each epoch: the operations of its owner's writes
        self._refused: set[str] = set()  # operations
        self._gone: set[str] = set()  # runners that are off the roster
        self._spans: dict[str, tuple[str, int]] = {}  # of runners and services that have begun

    def later(self, seconds: float, function: Callable[..., None], *args: object) -> None:
        asyncio.get_running_loop().call_later(seconds, function, *args, context=self.context)

    def carry_out(self, process: Process, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The memory store never waits, so its coroutines end with their first step."""
        work = getattr(self.store, name)(*args, **named)
        try:
            work.send(None)
        except StopIteration as done:
            answer = done.value
        note = getattr(self, f"_after_{name}", None)
        if note is not None:
            note(process, answer, *args, **named)
        return answer

    # --- what the server sees

    def _after_enrol(self, process: Process, answer: None, runner: RunnerRecord) -> None:
        if runner.id in self._gone:
            return  # a request that came late: nobody is there
        if runner.id not in self._spans:
            self._spans[runner.id] = (self.ledger.span(), process.pid)
            self.ledger.write(What.RUNNER_START, process.pid, owner=runner.id, span=self._spans[runner.id][0])

    def _after_heartbeat(
        self, process: Process, answer: RunnerRecord | None, app: str, runner_id: str, *more: Any, **named: Any
    ) -> None:
        if answer is None:
            return
        span, pid = self._spans.get(runner_id, ("", process.pid))
        self.ledger.write(What.RUNNER_BEAT, pid, owner=runner_id, span=span)
        if runner_id in self._gone:
            sentence = f"the runner {runner_id} was off the roster, and its heartbeat brought it back"
            self.refuted.append(Violation("roster", None, sentence))

    def _after_remove_runner(
        self, process: Process, answer: bool, app: str, runner_id: str, heartbeat_at: float | None = None
    ) -> None:
        if heartbeat_at is not None:
            if answer:
                self._gone.add(runner_id)
                self.declared.append((self.clock.monotonic(), runner_id))
            return
        if runner_id in self._spans and runner_id not in self._gone:
            self.ledger.write(What.RUNNER_END, process.pid, owner=runner_id, span=self._spans[runner_id][0])
        self._gone.add(runner_id)

    def _after_put_entry(self, process: Process, answer: bool, entry: Entry, over: Entry | None = None) -> None:
        if not answer or entry.kind != GATE:
            return
        execution = execution_of(entry)
        if execution.status is not ExecutionStatus.RUNNING:
            if execution.id in self._spans:
                span, pid = self._spans.pop(execution.id)
                self.ledger.write(What.SERVICE_END, pid, span=span)
        elif execution.id not in self._spans:
            self._spans[execution.id] = (self.ledger.span(), process.pid)
            facts = {"service": execution.service, "owner": execution.runner_id}
            self.ledger.write(What.SERVICE_START, process.pid, span=self._spans[execution.id][0], **facts)

    def _after_apply(self, process: Process, answer: Sequence[object], changes: Sequence[object]) -> None:
        """A write of an owner that is repeated, because its reply was lost, has to be recognised as the same."""
        for change, verdict in zip(changes, answer, strict=True):
            if not isinstance(change, Change) or change.name in _BY_ANYBODY or change.epoch is None:
                continue
            key = (change.id, change.epoch, change.name)
            if isinstance(verdict, Lost) and change.operation in self._refused:
                continue  # a message about the inbox came first; a copy of it that was on its way does no harm
            if isinstance(verdict, Lost) and self._ends.get(key, change.operation) != change.operation:
                sentence = f"'{change.name}' of epoch {change.epoch} was written, and came again as another write"
                self.refuted.append(Violation("I6", change.id, sentence))
            if isinstance(verdict, Lost):
                self._refused.add(change.operation)
            else:
                self._ends[key] = change.operation


class Line:
    """One process's store: see `holdfast.store.contract.Store`."""

    def __init__(
        self,
        server: Server,
        process: Process,
        rng: random.Random,
        weather: Callable[[], Weather],
        *,
        hints: Hints,
        abilities: Ability,
        skew: float,
        off: float | None = None,
    ) -> None:
        self._server = server
        self._process = process
        self._rng = rng
        self._weather = weather
        self._hints = hints
        self._skew = skew
        self._off = off  # of the clock that stamps its heartbeats, if that is its own
        self.shift = 0.0  # of its host's clock, which somebody has set
        self.abilities = abilities
        self.schema_version = 0
        self.cuts = 0  # that last
        self.epochs: dict[str, int] = {}  # of what it claimed
        self.came_late: set[str] = set()  # invocations that were given to it when it had given up its claim
        self.heard_at = float("-inf")  # when the last heartbeat was sent that was answered

    def now(self) -> float:
        return self._server.clock.now() + self._skew + self.shift

    def clock_error(self) -> float:
        return 0.0

    def needs_restart(self, *, by_children: bool = False) -> str:
        return ""

    def hints(self) -> Hints:
        return self._hints

    def joined(self, session: object) -> Transaction:
        return self._server.store.joined(session)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def ask(*args: Any, **named: Any) -> Any:
            return await self._ask(name, self._disguised(name, args), named)

        return ask

    def _disguised(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All simulated processes are one process, and nobody should notice. Sets are put in order."""
        pid = self._process.pid
        match name:
            case "enrol":
                stamp = args[0].heartbeat_at + (self._off or 0.0)
                return (replace(args[0], host=self._process.name, pid=pid, heartbeat_at=stamp),)
            case "heartbeat":
                return (*args[:2], tuple(replace(worker, pid=pid) for worker in args[2]))
            case "claim":
                return (replace(args[0], lanes=tuple(sorted(args[0].lanes))),)
        return args

    async def _ask(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._server.is_over:
            raise StoreUnavailable("the simulation is over")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        sent, weather = loop.time(), self._weather()
        self._server.trace.add(sent, self._process.name, "asks", name, [args, named])
        there, lot = self._travel(weather), self._rng.random()
        if lot < weather.refused or (self._is_cut and lot < 0.5):
            self._server.later(there, _fail, answer, "refused")
        else:
            unheard = lot < weather.refused + weather.unheard
            if not unheard and lot < weather.refused + weather.unheard + weather.late:
                there += GIVES_UP_SECONDS + self._rng.random() * 3
            self._server.later(there, self._arrive, answer, unheard, name, args, named)
        timer = loop.call_later(GIVES_UP_SECONDS, _fail, answer, "no answer")
        try:
            found = await answer
        finally:
            timer.cancel()
        if isinstance(found, Claimed):
            self.epochs |= {record.id: record.epoch for record in found.records}
        if name == "enrol" or (name == "heartbeat" and found is not None):
            self.heard_at = sent
        return found

    def _travel(self, weather: Weather) -> float:
        if weather.slow and self._rng.random() < weather.slow:
            return self._rng.random() * weather.slow_seconds
        return self._rng.random() * weather.latency

    @property
    def _is_cut(self) -> bool:
        return self.cuts > 0 or self._server.outages > 0

    def _arrive(
        self, answer: asyncio.Future[Any], unheard: bool, name: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if self._is_cut:
            return
        store = self._server.store
        if self._off is not None and name in ("heartbeat", "silent"):
            store.off, store.shows_all = self._off + self.shift, True
        found = self._server.carry_out(self._process, name, args, named)
        store.off, store.shows_all = 0.0, False
        said = [record.id for record in found.records] if isinstance(found, Claimed) else found
        self._server.trace.add(self._server.clock.monotonic(), self._process.name, "is told", name, said)
        if isinstance(found, Claimed) and answer.done():
            self.came_late.update(record.id for record in found.records)
        self._server.later(self._travel(self._weather()), self._reply, answer, unheard, found)

    def _reply(self, answer: asyncio.Future[Any], unheard: bool, found: Any) -> None:
        if unheard:
            _fail(answer, "the reply was lost")
        elif not self._is_cut and not answer.done():
            answer.set_result(found)


def _fail(answer: asyncio.Future[Any], why: str) -> None:
    if not answer.done():
        answer.set_exception(StoreUnavailable(why))


class Hints:
    """See `holdfast.model.records.HintChannel`: carries hints to the other processes, if the weather allows."""

    trust = 1

    def __init__(
        self, server: Server, process: Process, rng: random.Random, weather: Callable[[], Weather], all_: list[Hints]
    ) -> None:
        self._server = server
        self._process = process
        self._rng = rng
        self._weather = weather
        self._all = all_
        self._receive: dict[str, Callable[[Hint], None]] = {}
        all_.append(self)

    def send(self, hints: Sequence[Hint]) -> None:
        weather = self._weather()
        for other in self._all:
            if other is self or other._process.is_dead:
                continue
            for hint in hints:
                for _ in range(1 + (self._rng.random() < weather.hints_doubled)):
                    if self._rng.random() >= weather.hints_lost:
                        self._server.later(self._rng.random() * 0.05, other._take, hint)

    def _take(self, hint: Hint) -> None:
        receive = self._receive.get(hint.kind)
        if receive is not None:
            self._process.call(lambda: receive(hint))

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        self._receive[kind] = receive

    async def close(self) -> None:
        self._receive.clear()
