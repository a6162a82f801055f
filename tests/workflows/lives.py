"""A small owner of runs, in memory: it drives `AsyncLife` and `Replay` as `holdfast.workflows.run` does, without a
store. It decides by a seed what ends next, and which events share a page.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
from tests.support.engines import make_engine

from holdfast.codec import Codec, SizeLimits
from holdfast.executors.call import Call
from holdfast.executors.context import Context
from holdfast.runtime.definition import signature_of
from holdfast.runtime.engine import Engine
from holdfast.store.memory.store import MemoryStore
from holdfast.testing import FakeClock
from holdfast.workflows import events as e
from holdfast.workflows.api import AsyncStep
from holdfast.workflows.declaring import step_of
from holdfast.workflows.events import Event
from holdfast.workflows.life import AsyncLife, CallAnswer, Command, Life, PlainLife, Then
from holdfast.workflows.rules import Deliver, Finished, Mismatch, Replay

Body = Callable[..., Coroutine[Any, Any, Any]]
CODEC = Codec()
LIMITS = SizeLimits(inline=100_000, max_bytes=10_000_000)
START = 1_000_000.0


class Diverged(Exception):
    """Two lives of one run differ."""


def made_step(function: Callable[..., Any], **options: Any) -> AsyncStep[..., Any]:
    return AsyncStep(None, step_of(function, options))  # type: ignore[arg-type, typeddict-item]


def call_of(body: Body, run: str = "run-1") -> Call:
    about = Context(
        invocation_id=run,
        app="tests",
        task="body",
        attempt=1,
        epoch=1,
        idempotency_key=run,
        is_last_attempt=None,
    )
    return Call("key", "body", body, signature_of(body), b"", CODEC, LIMITS, {}, about)


def new_life(body: Body, *args: Any, events: Iterable[Event] = (), run: str = "run-1", code: str = "code") -> AsyncLife:
    log = Replay(list(events), code=code, same=lambda recorded, made: False)
    life = AsyncLife(log, CODEC, call_of(body, run), generation=0, now=START)
    life.give(args, {})
    return life


def nothing() -> None:
    """Be called when a body is quiet."""


def begun(body: Body, *args: Any, **more: Any) -> AsyncLife:
    """Return a life whose body has run to its first wait."""
    life = new_life(body, *args, **more)
    life.start(nothing)
    return life


def answer(life: AsyncLife, call: str, value: object = None, error: BaseException | None = None) -> None:
    life.replay.answered(Event(type=e.STEP_COMPLETED, at=life.now, call=call))
    life.deliver(call, CallAnswer(value, error), nothing)


class Owner:
    """The owner of one run, over all of its lives."""

    def __init__(self, body: Body, seed: int | random.Random, *, log: list[Event] | None = None) -> None:
        self.body = body
        self.rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.log: list[Event] = [] if log is None else log
        self.commands: list[str] = []  # that any life has given, in order
        self.life: Life | None = None
        self.evictions = self.crashes = 0
        self._given = 0
        self._open: dict[str, Command] = {}
        self._created: set[str] = {event.call for event in self.log if event.type == e.STEP_CREATED}
        self._at = max([START, *[event.at for event in self.log]])
        self._undelivered: list[Event] = []

    # --- a life

    def _new_life(self) -> Life:
        life = new_life(self.body, events=self.log)
        life.engine = engine()
        return life

    def _act(self, act: Callable[[Then], None]) -> None:
        """Do this, and wait until the body is quiet."""
        act(nothing)

    def begin(self) -> Life:
        """Replay the log in a new life."""
        self._given = 0
        self._open.clear()
        self._undelivered.clear()
        self.life = life = self._new_life()
        self._act(life.start)
        self._take(life)
        while not isinstance(following := life.replay.next(), Finished):
            if isinstance(following, Mismatch):
                raise Diverged(following.why)
            if not isinstance(following, Deliver):
                raise Diverged(f"the log has not what {following.call} returned")
            self._deliver(life, following.event)
        return life

    def _deliver(self, life: Life, event: Event) -> None:
        life.clock_to(event.at)
        if event.type == e.CANCEL_REQUESTED:
            self._act(life.cancel)
        else:
            life.replay.answered(event)
            self._open.pop(event.call, None)
            self._act(lambda then: life.deliver(event.call, _answer(event), then))
        self._take(life)

    def _take(self, life: Life) -> None:
        for command in life.commands:
            call = command.call
            said = f"{call.id} {call.name} {call.due} {call.data!r} {'cancel' if command.is_cancelled else ''}"
            if self._given < len(self.commands) and self.commands[self._given] != said:
                raise Diverged(f"command {self._given} is {said}, and was {self.commands[self._given]}")
            if self._given == len(self.commands):
                self.commands.append(said)
            self._given += 1
            if command.is_cancelled and command.step is None:
                self._open.pop(call.id, None)
            else:
                self._open[call.id] = command
        life.commands.clear()

    def end(self) -> None:
        if self.life is not None:
            self.life.evict()
            self.life = None

    # --- live

    def run(self, *, evict: float = 0.0, crash: float = 0.0, cancel: float = 0.0) -> object:
        """Run to the end. The numbers are the chances of what happens at each turn."""
        try:
            life = self.begin()
            for turn in range(2000):
                if turn == 1000:  # a source that keeps to evictions would let no run end
                    evict = crash = 0.0
                if life.ended is not None:
                    return self._result(life)
                if self.rng.random() < evict + crash:
                    self.evictions += 1
                    self.end()
                    life = self.begin()
                    continue
                if self.rng.random() < cancel:
                    cancel = 0.0
                    self._write([Event(type=e.CANCEL_REQUESTED, at=self._at)])
                else:
                    self._write(self._page(life))
                if self.rng.random() < crash:  # the page is durable, and nobody has seen it
                    self.crashes += 1
                    self.end()
                    life = self.begin()
                    continue
                while self._undelivered:  # what came with the end of the body is delivered too
                    self._deliver(life, self._undelivered.pop(0))
            raise AssertionError("it does not end")
        finally:
            self.end()

    def _result(self, life: Life) -> object:
        assert life.ended is not None
        value, error = life.ended
        return value if error is None else f"{type(error).__name__}: {_flat(error)}"

    def _page(self, life: Life) -> list[Event]:
        """Return the events of one page: one to three calls end together."""
        page: list[Event] = []
        if not self._open:
            raise Diverged(f"stuck:\n{life.why_stuck()}")
        for _ in range(self.rng.randint(1, 3)):
            ended = {event.call for event in page}
            steps = [id for id, command in self._open.items() if not _is_wait(command) and id not in ended]
            waits = [(c.call.due or 0.0, id) for id, c in self._open.items() if _is_wait(c) and id not in ended]
            if steps and (not waits or self.rng.random() < 0.7):
                page += self._step_ended(self._open[self.rng.choice(steps)])
            elif waits:
                due, id = min(waits)
                self._at = max(self._at, due)
                call = self._open[id].call
                page.append(Event(type=e.WAIT_COMPLETED, at=self._at, call=id, name=call.name, due=due))
        return page

    def _step_ended(self, command: Command) -> list[Event]:
        call = command.call
        self._at += self.rng.choice([0.0, 0.1, 0.7])
        found: list[Event] = []
        if call.id not in self._created:
            self._created.add(call.id)
            created = Event(type=e.STEP_CREATED, at=self._at, call=call.id, name=call.name, data=call.data, code="code")
            child = "" if command.child is None else command.child.id
            found.append(msgspec.structs.replace(created, child=child))
        digest = hashlib.sha256(call.id.encode() + call.data).digest()[0]
        if command.is_cancelled and self.rng.random() < 0.7:
            found.append(Event(type=e.STEP_FAILED, at=self._at, call=call.id))
        elif digest < 40:
            found.append(Event(type=e.STEP_FAILED, at=self._at, call=call.id, why="refused"))
        else:
            found.append(Event(type=e.STEP_COMPLETED, at=self._at, call=call.id, data=CODEC.encode(digest)))
        return found

    def _write(self, page: list[Event]) -> None:
        self.log += page
        self._undelivered += [event for event in page if event.type in e.DELIVERED]


class PlainOwner(Owner):
    """The owner of a run whose body is a plain function, which waits on a thread of its own."""

    def __init__(self, body: Callable[..., Any], seed: int | random.Random, *, log: list[Event] | None = None) -> None:
        super().__init__(body, seed, log=log)
        self._loop = asyncio.new_event_loop()

    def _new_life(self) -> Life:
        async def made() -> PlainLife:  # a life takes the loop that runs
            log = Replay(list(self.log), code="code", same=lambda recorded, made: False)
            life = PlainLife(log, CODEC, call_of(self.body), generation=0, now=START)
            life.give((), {})
            return life

        life = self._loop.run_until_complete(made())
        life.engine = engine()
        return life

    def _act(self, act: Callable[[Then], None]) -> None:
        async def quiet() -> None:
            is_quiet = asyncio.Event()
            act(is_quiet.set)
            async with asyncio.timeout(20):
                await is_quiet.wait()

        self._loop.run_until_complete(quiet())

    def end(self) -> None:
        life = self.life
        super().end()
        if isinstance(life, PlainLife) and life._thread is not None:
            life._thread.join(20)
            assert not life._thread.is_alive(), "its thread does not end"

    def close(self) -> None:
        self._loop.close()


@functools.cache
def engine() -> Engine:
    """The engine that makes records of children."""
    clock = FakeClock()
    return make_engine(MemoryStore(clock), clock, random.Random(1), app="tests")


def _is_wait(command: Command) -> bool:
    return command.step is None and command.child is None


def _answer(event: Event) -> CallAnswer:
    if event.type == e.STEP_FAILED:
        return CallAnswer(error=ValueError(event.call)) if event.why else CallAnswer(is_cancelled=True)
    return CallAnswer(CODEC.decode(event.data)) if event.type == e.STEP_COMPLETED else CallAnswer()


def _flat(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(_flat(each) for each in error.exceptions)
    return str(error)
