"""Several runners over one memory store in virtual time, each with a line to the store that a test can disturb."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from msgspec.structs import replace
from tests.support.engines import make_engine, make_runner

from holdfast.codec import Codec
from holdfast.errors import StoreUnavailable
from holdfast.executors.local import InlineExecutor
from holdfast.fleet.recovery import Recovery
from holdfast.fleet.runner import Runner
from holdfast.fleet.supervisor import Workers
from holdfast.ids import Ids
from holdfast.model.records import InvocationRecord, RunnerRecord, registered
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.worker import Account
from holdfast.store.contract import Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock, run_virtual
from holdfast.triggers.rules import TriggerRecord

APP, CORE_APP = "app", "app~core"
HEARTBEAT, DEAD_AFTER, POLL = 2.0, 15.0, 1.0
LATENCY = 0.001
SWALLOWED_SECONDS = 20.0  # as long as a driver waits for an answer
NEVER = "0 0 0 1 1 *"  # so that a test sees what happens without the backstop
WITHOUT_BACKSTOP = {"recover_running_invocations_cron": NEVER, "recover_pending_invocations_cron": NEVER}
PLAIN = frozenset({"abilities", "schema_version", "now", "clock_error", "needs_restart", "joined", "hints"})


class Line:
    """One runner's line to the store: it can be cut, frozen, told to lose replies, and it counts."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.calls: list[tuple[float, str]] = []
        self.cut = False
        self.errors: dict[str, Exception] = {}  # raised by each call of that name
        self.lost: Counter[str] = Counter()  # how many replies of that name are still to be lost
        self.swallowed: Counter[str] = Counter()  # how many calls of that name are still to vanish
        self.before: dict[str, Callable[[], None]] = {}
        self.freezes_at_claim = False  # the next claim of user work is on the line when it freezes
        self._flows = asyncio.Event()
        self._flows.set()

    def freeze(self) -> None:
        """Nothing gets through, in either direction, until `thaw`; then it goes on as if no time had passed."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    @property
    def is_frozen(self) -> bool:
        return not self._flows.is_set()

    def count(self, *names: str, since: float = 0.0) -> int:
        return sum(at >= since and (not names or name in names) for at, name in self.calls)

    def __getattr__(self, name: str) -> Any:
        there = getattr(self.store, name)
        if name in PLAIN:
            return there

        async def call(*args: Any, **named: Any) -> Any:
            self.calls.append((self.store.now(), name))
            await asyncio.sleep(LATENCY)
            if self.freezes_at_claim and name == "claim" and args[0].app == APP:
                self.freezes_at_claim = False
                self.freeze()
            await self._flows.wait()
            if self.swallowed[name] > 0:
                self.swallowed[name] -= 1
                await asyncio.sleep(SWALLOWED_SECONDS)
                raise StoreUnavailable("no answer")
            if self.cut:
                raise StoreUnavailable("the line is cut")
            if name in self.errors:
                raise type(self.errors[name])(*self.errors[name].args)
            if name in self.before:
                self.before[name]()
            answer = await there(*args, **named)
            await self._flows.wait()
            if self.lost[name] > 0:
                self.lost[name] -= 1
                raise StoreUnavailable("the reply was lost")
            return answer

        return call


class Member:
    """A runner of the fleet."""

    def __init__(self, engine: Engine, line: Line, make: Callable[[], Runner]) -> None:
        self.engine = engine
        self.line = line
        self.runner = make()
        self.life: asyncio.Task[Account] | None = None

    @property
    def id(self) -> str:
        assert self.runner.record is not None
        return self.runner.record.id

    async def start(self) -> Member:
        ready = asyncio.Event()
        self.life = asyncio.create_task(self.runner.run(ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self.life}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.life.done():
            self.life.result()
        return self

    async def stop(self, *, hurry: bool = False) -> Account:
        assert self.life is not None
        self.runner.stop(hurry=hurry)
        return await self.life

    def crash(self) -> None:
        """As if its process had been killed: nothing that it does reaches anybody any more."""
        self.line.freeze()


class Fleet:
    def __init__(self, clock: VirtualClock, store: MemoryStore | None = None) -> None:
        self.clock = clock
        self.store = store or MemoryStore(clock)
        self.codec = Codec()
        self.settings: dict[str, Any] = {}
        self.members: list[Member] = []
        self._rng = random.Random(11)
        self._ids = Ids(clock, self._rng)

    def engine(self, store: Store) -> Engine:
        rng = random.Random(self._rng.random())
        return make_engine(store, self.clock, rng, app=APP, poll_interval_seconds=POLL, **self.settings)

    def member(
        self,
        *functions: Callable[..., Any] | TaskDefinition,
        concurrency: int = 4,
        drain: float = 30.0,
        triggers: Sequence[TriggerRecord] = (),
        queues: Sequence[str] | None = None,
        make_line: Callable[[MemoryStore], Line] = Line,
        make_workers: Callable[[RunnerRecord, Recovery], Workers] | None = None,
    ) -> Member:
        line = make_line(self.store)
        engine = self.engine(cast(Store, line))

        def make() -> Runner:
            return make_runner(
                engine,
                [definition(function) for function in functions],
                concurrency=concurrency,
                queues=queues,
                drain_timeout_seconds=drain,
                make_executor=lambda kind, deliver: InlineExecutor(deliver),
                make_workers=make_workers,
                triggers=triggers,
            )

        member = Member(engine, line, make)
        self.members.append(member)
        return member

    async def started(self, *functions: Callable[..., Any] | TaskDefinition, **options: Any) -> Member:
        return await self.member(*functions, **options).start()

    def new(self, task: str, *args: Any, **facts: Any) -> InvocationRecord:
        now = self.clock.now()
        arguments = self.codec.encode_call(args, {})
        record = InvocationRecord(
            id=self._ids.new(), app=APP, task=task, arguments=arguments, created_at=now, due_at=now
        )
        return registered(replace(record, **facts), operation=self._ids.operation(), at=now)

    async def submit(self, task: str, *args: Any, **facts: Any) -> str:
        """Put it into the store, without a hint: a runner finds it within a polling interval."""
        record = self.new(task, *args, **facts)
        await self.store.insert([record])
        return record.id

    async def record(self, id: str, app: str = APP) -> InvocationRecord:
        (record,) = await self.store.get(app, [id])
        assert record is not None
        return record

    async def story(self, id: str) -> list[str]:
        return [str(entry.status) for entry in (await self.record(id)).history]

    async def end(self, id: str, within: float = 120.0) -> InvocationRecord:
        async def ended() -> bool:
            return (await self.record(id)).status in FINAL

        await self.until(ended, within)
        return await self.record(id)

    async def until_status(self, id: str, status: Status, within: float = 120.0) -> InvocationRecord:
        async def there() -> bool:
            return (await self.record(id)).status is status

        await self.until(there, within)
        return await self.record(id)

    async def until(self, holds: Callable[[], Coroutine[Any, Any, bool]], within: float = 120.0) -> float:
        """Wait until it holds; the virtual seconds that took."""
        began = self.clock.now()
        while not await holds():
            assert self.clock.now() - began < within, f"not within {within} s: {holds}"
            await asyncio.sleep(0.05)
        return self.clock.now() - began

    async def roster(self) -> list[str]:
        return [runner.id for runner in await self.store.roster(APP)]

    async def recoveries(self) -> int:
        found = [r for app in (APP, CORE_APP) for r in self.store._of(app)]
        return sum(entry.status is Status.RUNNING_RECOVERY for record in found for entry in record.history)

    async def gone(self, runner_id: str, within: float = 60.0) -> float:
        """Wait until it is off the roster."""

        async def gone() -> bool:
            return runner_id not in await self.roster()

        return await self.until(gone, within)

    async def stop(self, *members: Member) -> None:
        for member in members or self.members:
            member.line.thaw()
            member.line.cut = False
            if member.life is not None and not member.life.done():
                await member.stop(hurry=True)


def definition(function: Callable[..., Any] | TaskDefinition) -> TaskDefinition:
    if isinstance(function, TaskDefinition):
        return function
    kind = ExecutorKind.LOOP if inspect.iscoroutinefunction(function) else ExecutorKind.THREAD
    name, signature = function.__name__, inspect.signature(function)
    return TaskDefinition(name=name, function=function, signature=signature, executor=kind)


def virtually(
    scenario: Callable[[Fleet], Coroutine[Any, Any, None]], store: Callable[[VirtualClock], MemoryStore] = MemoryStore
) -> None:
    """Run the scenario and stop whoever is still there."""

    async def main(clock: VirtualClock) -> None:
        fleet = Fleet(clock, store(clock))
        try:
            await scenario(fleet)
        finally:
            await fleet.stop()

    run_virtual(main)


def statuses(records: Sequence[InvocationRecord]) -> list[str]:
    return [str(record.status) for record in records]


def add(x: int, y: int) -> int:
    return x + y


async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "rested"
