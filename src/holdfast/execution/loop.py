"""An event loop in a thread of its own, which ends only when it is told to."""

from __future__ import annotations

import asyncio
import logging
import threading

log = logging.getLogger("holdfast.engine")


class LoopThread:
    """A loop that user code cannot end.

    `sys.exit()` in a task, or `loop.stop()`, makes `run_forever` return or raise; everything else on that loop would be
    stuck for ever. So it is simply run again until `end`. Then whatever is left on it is cancelled, and nobody waits
    for an answer that cannot come any more.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ending = False
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ending:
            try:
                self.loop.run_forever()
            except BaseException as error:
                log.warning("something tried to end the event loop %s: %r", self.thread.name, error)
        try:
            self.loop.run_until_complete(self._cancel_the_rest())
        finally:
            self.loop.close()

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
        if not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(self.loop.stop)
            except RuntimeError:
                return  # closed in between
        if wait and threading.current_thread() is not self.thread:
            self.thread.join()


_CLEAN_UP_SECONDS = 1.0
