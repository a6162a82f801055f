"""An event loop in its own thread, which user code cannot end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import DutyFailed, LoopBroken, LoopDisturbed

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.1
_QUIET_SECONDS = 5.0  # a loop that has turned for so long is well
_MAX_FAILURES = 8  # in a row, of the loop itself; it has had a quarter of a second by then
_CLEAN_UP_SECONDS = 1.0

_on_broken: list[Callable[[], object]] = []
_broken: list[asyncio.AbstractEventLoop] = []


def when_a_loop_is_broken(do: Callable[[], object]) -> None:
    """Call this, on the thread of the loop, when a loop of this process can never turn again. A worker ends itself."""
    _on_broken.append(do)


class LoopThread:
    """A loop that user code cannot end.

    `sys.exit()` in a task, or `loop.stop()`, makes `run_forever` return or raise; everything else on that loop would be
    stuck for ever. So it is run again until `end`, after a pause that grows while that goes on. Then the rest of its
    tasks are cancelled, and no caller waits for an answer that cannot come any more.

    An OSError is the loop's own: user code has closed the descriptor that it waits with. Such a loop is broken, and is
    given up after some tries, and its listeners are called (`on_broken`).
    """

    def __init__(self, name: str, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self.loop = asyncio.new_event_loop()
        self._ending = False
        self.is_broken = False
        self._callbacks: list[Callable[[], object]] = []
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.thread.start()

    def on_broken(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call this, on the loop's thread, when the loop can never turn again. Return a function
        that takes that back.
        """
        self._callbacks.append(callback)

        def undo() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return undo

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        failures, pause = 0, _FIRST_PAUSE_SECONDS
        while not self._ending:
            began = time.monotonic()
            try:
                self.loop.run_forever()
                failed = False
            except BaseException as error:
                failed = isinstance(error, OSError)
                self.telemetry.emit(LoopDisturbed(self.thread.name, error))
            if time.monotonic() - began > _QUIET_SECONDS:
                failures, pause = 0, _FIRST_PAUSE_SECONDS
            failures = failures + 1 if failed else 0
            if failures > _MAX_FAILURES:
                self._give_up()
                return
            if not self._ending:
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
        try:
            self._end_the_rest()
        except OSError:  # it had to end before that was clear
            return self._give_up()
        except BaseException:
            self.loop.close()
            raise
        self.loop.close()

    def _give_up(self) -> None:
        self.is_broken = True
        why = "its descriptor does not work any more, user code may have closed it"
        self.telemetry.emit(LoopBroken(self.thread.name, why))
        for callback in (*self._callbacks, *_on_broken):
            try:
                callback()
            except Exception as error:
                self.telemetry.emit(DutyFailed("engine", f"report the end of event loop {self.thread.name}", error))
        # Not closed, and kept: its descriptors' numbers may be in use for other files by now.
        _broken.append(self.loop)

    def _end_the_rest(self) -> None:
        """Run the loop for the last time. The stop that `end` has sent may be processed only now."""
        ending = self.loop.create_task(self._cancel_the_rest())
        while not ending.done():
            try:
                self.loop.run_until_complete(ending)
            except RuntimeError:
                if ending.done():
                    raise

    async def _cancel_the_rest(self) -> None:
        await asyncio.sleep(0)  # what was handed over a moment ago gets its task, so that it can be cancelled too
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CLEAN_UP_SECONDS)

    def end(self, *, wait: bool = True) -> None:
        """Stop the loop; with `wait`, until its thread has ended."""
        self._ending = True
        if self.is_broken:
            return
        if not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(self.loop.stop)
            except RuntimeError:
                return  # closed in between
        if wait and threading.current_thread() is not self.thread:
            self.thread.join()
