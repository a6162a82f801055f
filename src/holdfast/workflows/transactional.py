"""Transactional steps: a step's own writes and its page are committed together.

    begin · the code of the step · reserve the log · append the page · commit

- The code runs on the loop or thread of every step, inside of a transaction of the store (`StepTransaction`).
- The page needs the place behind the last page of the run, so no other page of it may be under way: the step
  reserves the log. On MongoDB it does so when its code has ended. On SQLite it does so before it begins: while its
  transaction is open, no other page could be written, and to wait for one would be a deadlock.
- A page that finds its place taken comes from a zombie: its transaction is rolled back, with its effects.
- A transaction that conflicts with another (MongoDB: `TransientTransactionError`) is run again, including the code.
- Where the outcome of a commit is unknown, the log shows it: by the operation id of the page. If the page is not there,
  the run goes on at the same place of the log: of the two pages, one is stored.
- A step that raises is rolled back, and recorded as other steps are.

Methods are of the host's thread, unless they say that they are the step's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.codec import Payload
from holdfast.crashpoints import crashpoint
from holdfast.errors import TimedOut
from holdfast.executors.call import INTERRUPTED, Call, Outcome, Raised, Returned, raised, run, run_coroutine
from holdfast.executors.context import Context
from holdfast.executors.local import Executor
from holdfast.executors.sharing import StepPort
from holdfast.model.log import Appended, AppendVerdict, Behind, Fenced, Page
from holdfast.runtime.payloads import whole
from holdfast.store.contract import StepTransaction
from holdfast.workflows import events as e
from holdfast.workflows.attempts import Item, RunningStep
from holdfast.workflows.events import Event
from holdfast.workflows.rules import Past

if TYPE_CHECKING:
    from holdfast.workflows.executor import WorkflowExecutor
    from holdfast.workflows.host import Host
    from holdfast.workflows.run import Run

T = TypeVar("T")
_RETRY_SECONDS = 120.0  # for a transaction that meets others; a killed process keeps its own open for a minute
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 1.0


class Reserved(msgspec.Struct, frozen=True):
    """The place of the page, and the events that come before those of the step's end."""

    first: int
    generation: int
    items: tuple[Item, ...]
    code: str
    at: float


class Again(Exception):
    """The transaction was rolled back, and is to be run again."""


class TransactionalStep:
    """One attempt of a transactional step."""

    def __init__(
        self,
        host: Host,
        there: WorkflowExecutor,
        run: Run,
        key: str,
        transaction: StepTransaction,
        *,
        is_async: bool,
    ) -> None:
        self._host = host
        self._there = there
        self._run = run
        self._key = key
        self._transaction = transaction
        self._is_async = is_async
        self._reserved: Reserved | None = None
        self._granted: asyncio.Event | threading.Event = asyncio.Event() if is_async else threading.Event()
        self._clock = there.engine.clock
        self._stopped = threading.Event()
        self._deciding = threading.Lock()
        self._is_committing = self._is_given_up = False
        self._holds = False  # the log of the run
        self._written: list[Item] | None = None
        self._lost_to: AppendVerdict | None = None
        self._tried: dict[str, tuple[Page, list[Item], Returned]] = {}  # by operation

    # --- from start to end

    def start(self, call: Call, executor: Executor) -> None:
        wrapped = call._replace(within=self)
        if self._transaction.excludes_writers:
            self._reserve(lambda: executor.start([wrapped]))
        else:
            executor.start([wrapped])

    def _reserve(self, then: Callable[[], None]) -> None:
        def granted() -> None:
            step = self._step
            if step is None or self._is_given_up:
                self._granted.set()
                return self._run.release()
            self._holds = True
            self._reserved = self._place(step)
            then()

        if self._run.is_over or self._is_given_up:
            return self._granted.set()
        self._run.pages.reserve(granted)

    @property
    def _step(self) -> RunningStep | None:
        return next((step for step in self._run.attempts.running.values() if step.key == self._key), None)

    def _place(self, step: RunningStep) -> Reserved:
        """Return the next place of the log, and the events of the step's start that it does not have."""
        owner, id = self._run, step.command.call.id
        if step.slow is not None:  # the start is in the same page as the end
            step.slow.cancel()
        past = owner.replay.past.get(id) or Past()
        items = [] if past.created else [Item(owner.created(step.command), True, step.command.payloads)]
        if past.attempts < step.attempt:
            items.append(Item(owner.started(id, step.attempt, step.began_at), True))
        return Reserved(owner.pages.tail + 1, owner.generation, tuple(items), owner.pages.take_code(), owner.at())

    def _release(self) -> None:
        if self._holds:
            self._holds = False
            if self._reserved is not None and self._reserved.code:
                self._run.pages.give_code_back(self._reserved.code)
            self._reserved = None
            self._run.release()

    def give_up(self) -> bool:
        """Have the transaction rolled back. Return False if it is being committed."""
        with self._deciding:
            if self._is_committing:
                return False
            self._is_given_up = True
        self._stopped.set()
        self._granted.set()
        self._release()
        return True

    def finish(self, outcome: Outcome) -> None:
        """Go on with the run: the transaction is over."""
        match self._lost_to:
            case Fenced(epoch):
                return self._run.fenced(f"epoch {epoch} owns the log")
            case Behind():
                return self._run.lost("its log has pages of this epoch that this owner did not write")
        if self._written is not None:
            self._holds = False
            return self._run.attempts.recorded(self._key, self._written)
        self._release()
        self._run.attempts.ended(self._key, outcome)

    # --- on the step's own loop or thread

    def run(self, call: Call) -> Outcome:
        async def execute(call: Call) -> Outcome:
            return run(call)

        return _driven(self._perform(call, execute))

    async def run_coroutine(self, call: Call) -> Outcome:
        return await self._perform(call, run_coroutine)

    async def _perform(self, call: Call, execute: Callable[[Call], Awaitable[Outcome]]) -> Outcome:
        deadline, pause = self._clock.monotonic() + _RETRY_SECONDS, _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._once(call, execute)
            except Again as again:
                error = again.__cause__
            except Exception as failure:
                if not self._transaction.is_transient(failure):
                    return self._raised(call, failure)
                error = failure
            if (found := await self._found()) is not None:
                return found
            if self._is_given_up:
                return INTERRUPTED
            assert error is not None
            if self._clock.monotonic() > deadline:
                return self._raised(call, error)
            if not self._transaction.excludes_writers:
                self._host.inbox.post(self._release)
            await self._pause(pause * (0.5 + self._there.engine.rng.random()))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _once(self, call: Call, execute: Callable[[Call], Awaitable[Outcome]]) -> Outcome:
        """Run the code, and commit. Raises `Again`, and what the store raises."""
        transaction, port, caught = self._transaction, _port_of(call), list[BaseException]()
        try:
            await transaction.begin()
            port.begin(transaction.session)
            outcome = await execute(_observed(call, caught, is_async=self._is_async))
            if (why := transaction.explained()) is not None:
                raise why
            if isinstance(outcome, Returned):
                return await self._to_its_end(self._commit(call, outcome, port))
            if caught and transaction.is_transient(caught[0]):
                raise Again from caught[0]
            return outcome
        finally:
            await transaction.rollback()
            if self._written is None:
                port.begin(None)

    async def _commit(self, call: Call, outcome: Returned, port: StepPort) -> Outcome:
        reserved = await self._place_of_page()
        if reserved is None:
            return INTERRUPTED
        if self._run.is_over:
            return INTERRUPTED
        items = self._items(call, reserved, outcome, port)
        page = self._there.page(self._run.record, reserved.first, reserved.generation, [item.event for item in items])
        verdict = await self._append(page, [payload for item in items for payload in item.payloads])
        if not isinstance(verdict, Appended):
            self._judge(verdict)
            return INTERRUPTED
        crashpoint("transaction.appended")
        with self._deciding:
            if self._is_given_up:
                return INTERRUPTED
            self._is_committing = True
        self._tried[page.operation] = page, items, outcome
        try:
            await self._transaction.commit()
        except Exception as error:
            if not self._transaction.is_transient(error) and (found := await self._found()) is not None:
                return found
            self._is_committing = False
            raise
        crashpoint("transaction.committed")
        self._written = items
        return outcome

    async def _append(self, page: Page, payloads: Sequence[Payload]) -> AppendVerdict:
        joined = self._there.engine.store.joined(self._transaction.session)
        if payloads and not joined.carries_payloads:
            await self._on_engine(self._there.keep(payloads))
        crashpoint("transaction.ran")
        stored = whole(payloads) if joined.carries_payloads else ()
        verdicts = await joined.aappend([page], stored) if joined.is_async else joined.append([page], stored)
        return verdicts[0]

    async def _found(self) -> Outcome | None:
        """Look into the log for a page whose commit was not answered. None: the place is free."""
        if not self._tried:
            return None
        page = next(reversed(self._tried.values()))[0]
        there = await self._on_engine(self._there.page_at(page))
        if there is None:
            return None
        if there.operation in self._tried:
            _, self._written, outcome = self._tried[there.operation]
            return outcome
        self._judge(Fenced(there.epoch) if there.epoch > page.epoch else Behind((there,)))
        return INTERRUPTED

    def _judge(self, verdict: AppendVerdict) -> None:
        """Note that the place of the page is taken, unless by a page of this step."""
        mine = [page for page in verdict.pages if page.operation in self._tried] if isinstance(verdict, Behind) else []
        if mine:
            self._written = self._tried[mine[0].operation][1]
        else:
            self._lost_to = verdict

    def _items(self, call: Call, reserved: Reserved, outcome: Returned, port: StepPort) -> list[Item]:
        id, at = _call_id(self._key, self._run), max(reserved.at, self._host.now())
        items = [*reserved.items]
        for kind, changes in zip((e.DATA_SET, e.ATTRIBUTES_SET), port.changes(), strict=True):
            if not changes:
                continue
            packed = call.codec.pack(changes, call.limits, at="data")
            items.append(Item(Event(type=kind, at=at, call=id, data=packed.data), True, packed.payloads))
        attempt = int(self._key.rpartition("/")[2])
        end = Event(type=e.STEP_COMPLETED, at=at, call=id, data=outcome.result, attempt=attempt)
        items.append(Item(end, False, outcome.payloads))
        first = items[0]
        items[0] = Item(msgspec.structs.replace(first.event, code=reserved.code), first.seen, first.payloads)
        return items

    async def _place_of_page(self) -> Reserved | None:
        """Wait for the log. Return None if the step was given up meanwhile."""
        if not self._transaction.excludes_writers:
            self._granted.clear()
            self._host.inbox.post(lambda: self._reserve(self._granted.set))
            if isinstance(self._granted, asyncio.Event):
                await self._granted.wait()
            else:
                self._granted.wait()
        return None if self._is_given_up else self._reserved

    def _raised(self, call: Call, error: BaseException) -> Raised:
        if type(error) is TimeoutError:  # of the transaction
            error = TimedOut(f"{_call_id(self._key, self._run)}: {error}", invocation_id=self._run.id)
        return raised(call, error)

    async def _on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._there.loop)
        return await asyncio.wrap_future(future) if self._is_async else future.result()

    async def _pause(self, seconds: float) -> None:
        if self._is_async:
            await asyncio.sleep(seconds)
        else:
            self._stopped.wait(seconds)

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the commit be neither interrupted nor cancelled: its outcome would be unknown."""
        if not self._is_async:
            return await work
        task = asyncio.ensure_future(work)
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        return task.result()


def _call_id(key: str, run: Run) -> str:
    return key.removeprefix(f"{run.key}/").rpartition("/")[0]


def _port_of(call: Call) -> StepPort:
    assert isinstance(call.about, Context)
    assert isinstance(call.about.run, StepPort)
    return call.about.run


def _observed(call: Call, caught: list[BaseException], *, is_async: bool) -> Call:
    """Return the call with its own copy of large arguments, and with a note of what its function raises."""
    function = call.function

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        try:
            return await function(*args, **kwargs)
        except BaseException as error:
            caught.append(error)
            raise

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            caught.append(error)
            raise

    return call._replace(function=awaited if is_async else called, payloads=dict(call.payloads))


def _driven(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, on a thread without a loop."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("a transaction on a thread has waited for an event loop")
